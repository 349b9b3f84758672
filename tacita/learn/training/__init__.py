"""Local training of whole cohorts."""

from tacita.learn.training.cohort import Trained, check_training, train_cohort
from tacita.learn.training.draw import Workspace

__all__ = ["Trained", "Workspace", "check_training", "train_cohort"]
