"""The models that can stand behind a federated round."""

from tacita.backbones import ego as _ego  # noqa: F401  (each module registers its models)
from tacita.backbones import factor as _factor  # noqa: F401
from tacita.backbones import graph as _graph  # noqa: F401
from tacita.backbones import linear as _linear  # noqa: F401
from tacita.backbones import neural as _neural  # noqa: F401
from tacita.backbones.base import Backbone, BackboneConfig, Context, backbone_class, backbone_names, register

__all__ = ["Backbone", "BackboneConfig", "Context", "backbone_class", "backbone_names", "register"]
