"""Attacks on what tally releases, each beside a control that says what it finds where there is nothing to find.

rebuilding: P and G from the released B; null_space: who took part, the rest of a history, histories from nothing;
retraction: what a lone leaver had, from the releases before and after; peeling: histories that stand alone in uncut
sums; trials: each attack with its control; table: settings side by side; budget: the same under a budget. uploads: what
rows that people upload show; canaries/: how large claimed epsilons are at least. These are the attacks we know: that
one of them finds nobody does not prove that nobody can be found.
"""
