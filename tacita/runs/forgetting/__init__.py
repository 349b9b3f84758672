"""What people ask of a finished run: share, take back, forget. One door for every method, and a certificate."""
