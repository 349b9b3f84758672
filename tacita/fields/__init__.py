"""What leaves a device: how it is laid out (`forms`), and how uploads become a total (`totals`, `adding`)."""

from tacita.fields.adding import adding
from tacita.fields.forms import QUANTUM, Dense, Following, Form, Rows, Spec, Squares, Terms
from tacita.fields.totals import (
    Answer,
    Each,
    Total,
    Upload,
    add,
    empty_total,
    merge,
    symmetric_of,
    touched_of,
    wire_bytes,
)

__all__ = [
    "QUANTUM",
    "Answer",
    "Dense",
    "Each",
    "Following",
    "Form",
    "Rows",
    "Spec",
    "Squares",
    "Terms",
    "Total",
    "Upload",
    "add",
    "adding",
    "empty_total",
    "merge",
    "symmetric_of",
    "touched_of",
    "wire_bytes",
]
