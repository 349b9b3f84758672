"""What several test files share: builders, oracles, laws of noise, sites of servers and nodes."""
