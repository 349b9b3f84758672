"""`python -m helpers.lead_ranks ARGUMENTS`: the command `tacita` with a checkpoint after every round."""

from __future__ import annotations

import math
import sys

from tacita.cli import main
from tacita.runs import training

if __name__ == "__main__":
    training.CHECKPOINT_SECONDS = 0.0
    training.CHECKPOINT_SHARE = math.inf
    main(sys.argv[1:])
