"""Prediction transfer: devices and server tell each other scores of items, never parameters (FedKDRec, PTF-FedRec).

uploads: what a device makes of its predictions before it tells them; candidates: what the server could send back, and
rules that pick from it; weighting: the agent that weighs uploads; selection: the agent that picks what is sent;
rewards: what selection learns from; traffic: bytes. dice, measures and networks serve them. Everything is a function
of values: lists as `Ragged`, agents as dicts of arrays.

Where the paper leaves a choice open, the first alternative of each option is what we take for the default.
"""
