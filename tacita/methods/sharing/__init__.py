"""Sharing: people give the server some of their interactions, it learns from them, and forgets what is taken back."""
