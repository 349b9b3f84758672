"""What leaves a device: its layout (`forms`), and how uploads become a total (`totals`, `aggregation`)."""

from tacita.messages.aggregation import UploadAccumulator, make_accumulator
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
    count_wire_bytes,
    empty_total,
    map_symmetric_fields,
    merge_totals,
    touched_name,
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
    "UploadAccumulator",
    "add_upload",
    "count_wire_bytes",
    "empty_total",
    "make_accumulator",
    "map_symmetric_fields",
    "merge_totals",
    "touched_name",
]
