"""What travels in a round, and how devices make it: exactly one learner per run. Each module registers its own."""

from tacita.learn import rows as _rows  # noqa: F401
from tacita.learn import scores as _scores  # noqa: F401
from tacita.learn import statistic as _statistic  # noqa: F401
