"""What travels in a round: exactly one learner per run."""

from tacita.learners import rows as _rows  # noqa: F401  (each module registers its learner)
from tacita.learners import statistic as _statistic  # noqa: F401
from tacita.learners.base import Learner, learner_class, learner_of, register

__all__ = ["Learner", "learner_class", "learner_of", "register"]
