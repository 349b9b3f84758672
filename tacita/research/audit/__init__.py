"""Attacks on what a run releases, each with a control that shows what it finds where there is nothing to find.

reconstruction: P and G from the released B. null_space: who took part, the rest of a history, histories from nothing.
retraction: what a lone leaver had, from the releases before and after. peeling_attack: histories that stand alone in
uncut sums. tally_attacks: each of these with its control; tally_settings: settings side by side; budget, budget_order:
the same under a budget. uploads: what rows that people upload show. canaries/: how large claimed epsilons are at least.
These are the attacks we know: that one of them finds nobody does not prove that nobody can be found.
"""
