"""What noise costs and how it is made: calibration, noise, the ledger (the home of dp-accounting). Knows no rounds."""
