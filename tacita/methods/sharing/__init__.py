"""People decide, item by item, what they share and what stays with them; and take it back (FedShare and others)."""
