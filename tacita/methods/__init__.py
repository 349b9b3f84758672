"""Methods as lists of parts."""

from tacita.methods.continual import error_memory as _error_memory  # noqa: F401  (each module registers its parts and presets)
from tacita.methods.continual import f3crec as _f3crec  # noqa: F401
from tacita.methods.continual import noise as _noise  # noqa: F401
from tacita.methods.continual import proxies as _proxies  # noqa: F401
from tacita.methods.continual import proximal as _proximal  # noqa: F401
from tacita.methods.distillation import cover as _cover  # noqa: F401
from tacita.methods.distillation import neighbours as _neighbours  # noqa: F401
from tacita.methods.distillation import presets as _presets  # noqa: F401
from tacita.methods.distillation import transfer as _transfer  # noqa: F401
from tacita.round.parts import (
    Part,
    PartConfig,
    World,
    build_parts,
    configured,
    effective_parts,
    label_of,
    overrides,
    part_class,
    part_names,
    preset,
    preset_names,
    preset_parts,
    register,
)

__all__ = [
    "Part",
    "PartConfig",
    "World",
    "build_parts",
    "configured",
    "effective_parts",
    "label_of",
    "overrides",
    "part_class",
    "part_names",
    "preset",
    "preset_names",
    "preset_parts",
    "register",
]
