"""What noise costs and how it is made: calibration, noise, the ledger, secure sums. Knows no rounds."""
