"""What leaves a device: its layout (`forms`), and how uploads become a total (`totals`, `aggregation`)."""

from tacita.messages.aggregation import make_accumulator
from tacita.messages.forms import (
    QUANTUM,
    CooccurrenceTerms,
    DenseArrays,
    Form,
    OuterProducts,
    SequenceTerms,
    SparseRows,
    Spec,
)
from tacita.messages.totals import (
    CohortReply,
    PerClientField,
    Total,
    Upload,
    add_upload,
    empty_total,
    find_symmetric,
    merge_totals,
    touched_name,
    wire_bytes,
)

__all__ = [
    "QUANTUM",
    "CohortReply",
    "CooccurrenceTerms",
    "DenseArrays",
    "Form",
    "OuterProducts",
    "PerClientField",
    "SequenceTerms",
    "SparseRows",
    "Spec",
    "Total",
    "Upload",
    "add_upload",
    "empty_total",
    "find_symmetric",
    "make_accumulator",
    "merge_totals",
    "touched_name",
    "wire_bytes",
]
