"""Local training of whole cohorts."""

from tacita.trainer.cohort import Trained, train_cohort
from tacita.trainer.draw import Workspace

__all__ = ["Trained", "Workspace", "train_cohort"]
