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
_INDEX = ir.IntType(32)


def _compute_vector_address(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any) -> Any:
    """The address of LANES numbers of a row, and the bytes of one."""
    assert kind.layout == "C"
    assert kind.ndim == 2
    make_proxy = cgutils.create_struct_proxy(kind)  # type: ignore[no-untyped-call]
    proxy = make_proxy(context, builder, value=array)
    number = context.get_data_type(kind.dtype)
    width = context.get_abi_sizeof(number)
    row_bytes = builder.extract_value(proxy.strides, 0)
    row_start = builder.mul(row, row_bytes)
    column_start = builder.mul(column, ir.Constant(_WORD, width))
    place = builder.add(row_start, column_start)
    table = builder.ptrtoint(proxy.data, _WORD)
    address = builder.add(table, place)
    pointer = ir.VectorType(number, LANES).as_pointer()
    return builder.inttoptr(address, pointer), width


def _build_add_lanes(typing: Any, target: Any, t: Any, source: Any, s: Any, first: Any, factor: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = signature.args[0]
        from_ = signature.args[2]
        lanes = ir.VectorType(context.get_data_type(to.dtype), LANES)
        target_address, target_width = _compute_vector_address(context, builder, to, args[0], args[1], args[4])
        source_address, source_width = _compute_vector_address(context, builder, from_, args[2], args[3], args[4])
        more = builder.load(source_address, align=source_width)
        if from_.dtype != to.dtype:
            more = builder.fpext(more, lanes)
        empty = ir.Constant(lanes, ir.Undefined)
        first_lane = ir.Constant(_INDEX, 0)
        single = builder.insert_element(empty, args[5], first_lane)
        all_first = ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES)
        factors = builder.shuffle_vector(single, single, all_first)
        before = builder.load(target_address, align=target_width)
        addend = builder.fmul(factors, more)
        total = builder.fadd(before, addend)
        builder.store(total, target_address, target_width)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64, target.dtype), build


add_lanes: Any = intrinsic(_build_add_lanes)
"""add_lanes(target, t, source, s, first, f): target[t, first:first + LANES] += f * source[s, first:first + LANES]"""
