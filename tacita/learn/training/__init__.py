"""Local training of whole cohorts."""

from tacita.learn.training.checks import check_training
from tacita.learn.training.cohort import TrainedCohort, train_cohort, train_without_upload
from tacita.learn.training.local_models import Workspace

__all__ = ["TrainedCohort", "Workspace", "check_training", "train_cohort", "train_without_upload"]
