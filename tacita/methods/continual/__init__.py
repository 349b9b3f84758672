"""Continual learning: F3CRec and the methods it is compared with."""
