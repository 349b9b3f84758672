"""`python -m helpers.lead_ranks ARGUMENTS`: the command `tacita` with a checkpoint after every round.

A lost rank is waited for shortly.
"""

from __future__ import annotations

import math
import sys

from tacita.cli import main
from tacita.federation.ranks import process_group
from tacita.runs import training

if __name__ == "__main__":
    training.CHECKPOINT_SECONDS = 0.0
    training.CHECKPOINT_SHARE = math.inf
    process_group.ROLL_CALL_SECONDS = 2.0
    main(sys.argv[1:])
