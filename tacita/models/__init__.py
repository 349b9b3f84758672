"""The models that can stand behind a federated round."""

from tacita.models import ego as _ego  # noqa: F401  (each module registers its models)
from tacita.models import factor as _factor  # noqa: F401
from tacita.models import fedpergnn as _fedpergnn  # noqa: F401
from tacita.models import interest as _interest  # noqa: F401
from tacita.models import lightgcn as _lightgcn  # noqa: F401
from tacita.models import neural_cf as _neural  # noqa: F401
from tacita.models.base import Backbone, BackboneConfig, find_backbone_class, list_backbones, register
from tacita.models.scorer import Context, Scorer
from tacita.models.statistic_model import StatisticModel
from tacita.models.tally import filter as _filter  # noqa: F401
from tacita.models.tally import model as _linear  # noqa: F401
from tacita.models.tally import order as _order  # noqa: F401
from tacita.models.tally import private_order as _private_order  # noqa: F401
from tacita.models.tally import private_tally as _private_tally  # noqa: F401

__all__ = [
    "Backbone",
    "BackboneConfig",
    "Context",
    "Scorer",
    "StatisticModel",
    "find_backbone_class",
    "list_backbones",
    "register",
]
