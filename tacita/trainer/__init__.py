"""Local training of whole cohorts."""

from tacita.trainer.cohort import Trained, check_training, train_cohort
from tacita.trainer.draw import Workspace

__all__ = ["Trained", "Workspace", "check_training", "train_cohort"]
