"""What people and operators see and decide in a browser: one HTTP API, and pages that show what it answers."""
