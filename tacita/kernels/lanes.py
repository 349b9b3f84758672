"""Sixteen columns at a time, where a plain loop over rows is compiled to single numbers.

Two arrays may overlap as far as the compiler knows, so it will not read ahead of what it writes. Loads and stores of
whole vectors say that these do not; every number is rounded as in the plain loop.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_WORD = ir.IntType(64)


def _vector_address(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any) -> Any:
    """The address of LANES numbers of a row, and the bytes of one."""
    assert kind.layout == "C"
    assert kind.ndim == 2
    one = cgutils.create_struct_proxy(kind)(context, builder, value=array)  # type: ignore[no-untyped-call]
    width = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    row_start = builder.mul(row, builder.extract_value(one.strides, 0))
    place = builder.add(row_start, builder.mul(column, ir.Constant(_WORD, width)))
    address = builder.add(builder.ptrtoint(one.data, _WORD), place)
    return builder.inttoptr(address, ir.VectorType(context.get_data_type(kind.dtype), LANES).as_pointer()), width


def _build_add_lanes(typing: Any, target: Any, t: Any, source: Any, s: Any, first: Any, factor: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, from_ = signature.args[0], signature.args[2]
        lanes = ir.VectorType(context.get_data_type(to.dtype), LANES)
        left, left_width = _vector_address(context, builder, to, args[0], args[1], args[4])
        right, right_width = _vector_address(context, builder, from_, args[2], args[3], args[4])
        more = builder.load(right, align=right_width)
        if from_.dtype != to.dtype:
            more = builder.fpext(more, lanes)
        alone = builder.insert_element(ir.Constant(lanes, ir.Undefined), args[5], ir.Constant(ir.IntType(32), 0))
        times = builder.shuffle_vector(alone, alone, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
        total = builder.fadd(builder.load(left, align=left_width), builder.fmul(times, more))
        builder.store(total, left, left_width)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64, target.dtype), build


add_lanes: Any = intrinsic(_build_add_lanes)
"""add_lanes(target, t, source, s, first, f): target[t, first:first + LANES] += f * source[s, first:first + LANES]"""
