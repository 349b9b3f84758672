"""Lower bounds on epsilon: canaries through the releases themselves, what they show of it, and the claim."""
