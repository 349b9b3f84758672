"""`python -m tacita` is the command `tacita`."""

from tacita.cli import main

main()
