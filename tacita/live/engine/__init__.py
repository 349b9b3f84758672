"""How messages travel: Flower and the gateway."""
