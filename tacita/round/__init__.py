"""The shapes of a federated round: what devices keep, parts and their hooks, learners, the plan."""
