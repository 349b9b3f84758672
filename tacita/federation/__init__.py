"""The one federated loop, and the devices it talks to."""
