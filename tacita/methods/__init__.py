"""Methods as lists of parts."""

from tacita.methods.continual import error_memory as _error_memory  # noqa: F401  (each module registers its parts and presets)
from tacita.methods.continual import f3crec as _f3crec  # noqa: F401
from tacita.methods.continual import laplace_noise as _laplace_noise  # noqa: F401
from tacita.methods.continual import presets as _continual_presets  # noqa: F401
from tacita.methods.continual import proxies as _proxies  # noqa: F401
from tacita.methods.continual import proximal as _proximal  # noqa: F401
from tacita.methods.distillation import cover as _cover  # noqa: F401
from tacita.methods.distillation import neighbours as _neighbours  # noqa: F401
from tacita.methods.distillation import presets as _presets  # noqa: F401
from tacita.methods.distillation import transfer as _transfer  # noqa: F401
from tacita.methods.personal import dp_fedavg as _dp_fedavg  # noqa: F401
from tacita.methods.personal import dpps as _dpps  # noqa: F401
from tacita.methods.personal import fedrec as _fedrec  # noqa: F401
from tacita.methods.personal import finetuning as _finetuning  # noqa: F401
from tacita.methods.personal import interest as _interest  # noqa: F401
from tacita.methods.personal import presets as _personal_presets  # noqa: F401
from tacita.methods.personal import training_loss as _watching  # noqa: F401
from tacita.methods.sharing import cfru as _cfru  # noqa: F401
from tacita.methods.sharing import contrastive_unlearning as _contrastive_unlearning  # noqa: F401
from tacita.methods.sharing import contribution as _contribution  # noqa: F401
from tacita.methods.sharing import cufru as _cufru  # noqa: F401
from tacita.methods.sharing import decoupled_learning as _decoupled  # noqa: F401
from tacita.methods.sharing import delta_replay as _delta_replay  # noqa: F401
from tacita.methods.sharing import fru as _fru  # noqa: F401
from tacita.methods.sharing import graph_mending as _graph_mending  # noqa: F401
from tacita.methods.sharing import ordinary_rounds as _ordinary_rounds  # noqa: F401
from tacita.methods.sharing import presets as _sharing_presets  # noqa: F401
from tacita.methods.sharing import retraction as _retraction  # noqa: F401
from tacita.methods.sharing import retraining as _retrain  # noqa: F401
from tacita.methods.sharing import server_client as _server_client  # noqa: F401
from tacita.methods.sharing import shared_graph_part as _graph_learning  # noqa: F401
from tacita.methods.sharing import sharing as _sharing  # noqa: F401
from tacita.methods.sharing import withdrawal as _withdrawal  # noqa: F401
from tacita.round.part import Part, PartConfig, RunContext, implements
from tacita.round.registry import (
    build_parts,
    find_part_class,
    list_part_names,
    list_preset_names,
    list_preset_parts,
    make_method_label,
    register,
    register_preset,
    resolve_config,
    resolve_parts,
)

__all__ = [
    "Part",
    "PartConfig",
    "RunContext",
    "build_parts",
    "find_part_class",
    "implements",
    "list_part_names",
    "list_preset_names",
    "list_preset_parts",
    "make_method_label",
    "register",
    "register_preset",
    "resolve_config",
    "resolve_parts",
]
