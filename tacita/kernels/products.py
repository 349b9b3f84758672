"""Products of small matrices on one core, by vectors of sixteen numbers.

A library of linear algebra is made for large matrices. A tower's are small, and here a tile of the result stays in
registers while its sums are made. A number of the result is one sum from left to right, whatever the tile, so it
depends on its own row and column alone.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tacita.core.types import Floats

LANES = 16
_INDEX = ir.IntType(64)
_SHORT = ir.IntType(32)
_NUMBER = ir.FloatType()
_VECTOR = ir.VectorType(_NUMBER, LANES)
_HAS_WIDE_REGISTERS = bool(llvm.get_host_cpu_features().get("avx512f", False))
_TALL = 8 if _HAS_WIDE_REGISTERS else 6  # rows of a tile: with more of them its sums do not fit the registers
_WIDE = 2 if _HAS_WIDE_REGISTERS else 1  # vectors of a row


def _find_start(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
    """The address of an entry, in bytes, and the bytes from a row and from a column to the next."""
    assert kind.ndim == 2
    assert kind.dtype == types.float32
    make_proxy = cgutils.create_struct_proxy(kind)  # type: ignore[no-untyped-call]
    proxy = make_proxy(context, builder, value=array)
    row_bytes = builder.extract_value(proxy.strides, 0)
    column_bytes = builder.extract_value(proxy.strides, 1)
    table = builder.ptrtoint(proxy.data, _INDEX)
    before_row = builder.mul(row, row_bytes)
    before_column = builder.mul(column, column_bytes)
    return builder.add(table, builder.add(before_row, before_column)), row_bytes, column_bytes


def _point(builder: Any, kind: Any, address: Any, step: Any, times: int) -> Any:
    """A pointer so many steps further."""
    distance = builder.mul(step, ir.Constant(_INDEX, times))
    return builder.inttoptr(builder.add(address, distance), kind.as_pointer())


def _declare(builder: Any, kind: Any, name: str) -> Any:
    """An operation of the compiler's own."""
    return cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]


def _broadcast_to_lanes(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, number, ir.Constant(_SHORT, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(_SHORT, LANES), [0] * LANES))


def _make_tile(tall: int, wide: int) -> Any:
    """An operation that writes `tall` rows and `wide` vectors of a product: out[i:, j:] = a[i:] @ b[:, j:]."""
    vector_bytes = ir.Constant(_INDEX, 4 * LANES)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, i, j, a, b, depth = args
        kinds = signature.args
        zero = ir.Constant(_INDEX, 0)
        out_start, out_row, _ = _find_start(context, builder, kinds[0], out, i, j)
        a_start, a_row, a_column = _find_start(context, builder, kinds[3], a, i, zero)
        b_start, b_row, _ = _find_start(context, builder, kinds[4], b, zero, j)
        multiply_add = _declare(builder, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32")
        before = builder.block
        loop = builder.append_basic_block("sum")
        after = builder.append_basic_block("write")
        has_terms = builder.icmp_signed(">", depth, zero)
        builder.cbranch(has_terms, loop, after)
        builder.position_at_end(loop)
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        k = builder.phi(_INDEX)
        sums = [builder.phi(_VECTOR) for _ in range(tall * wide)]
        a_place = builder.add(a_start, builder.mul(k, a_column))
        b_place = builder.add(b_start, builder.mul(k, b_row))
        columns = [builder.load(_point(builder, _VECTOR, b_place, vector_bytes, v), align=4) for v in range(wide)]
        totals = []
        for r in range(tall):
            factor = _broadcast_to_lanes(builder, builder.load(_point(builder, _NUMBER, a_place, a_row, r), align=4))
            for v in range(wide):
                totals.append(builder.call(multiply_add, [factor, columns[v], sums[r * wide + v]]))
        further = builder.add(k, ir.Constant(_INDEX, 1))
        k.add_incoming(zero, before)
        k.add_incoming(further, loop)
        for partial, total in zip(sums, totals, strict=True):
            partial.add_incoming(nothing, before)
            partial.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", further, depth), loop, after)
        builder.position_at_end(after)
        results = [builder.phi(_VECTOR) for _ in totals]
        for result, total in zip(results, totals, strict=True):
            result.add_incoming(nothing, before)
            result.add_incoming(total, loop)
        for r in range(tall):
            row = builder.add(out_start, builder.mul(out_row, ir.Constant(_INDEX, r)))
            for v in range(wide):
                builder.store(results[r * wide + v], _point(builder, _VECTOR, row, vector_bytes, v), 4)
        return context.get_dummy_value()

    def write_tile(typing: Any, out: Any, i: Any, j: Any, a: Any, b: Any, depth: Any) -> Any:
        return types.void(out, types.int64, types.int64, a, b, types.int64), build

    return intrinsic(write_tile)


def _prefetch_row(typing: Any, table: Any, row: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make_proxy = cgutils.create_struct_proxy(signature.args[0])  # type: ignore[no-untyped-call]
        proxy = make_proxy(context, builder, value=args[0])
        row_bytes = builder.extract_value(proxy.strides, 0)
        start = builder.add(builder.ptrtoint(proxy.data, _INDEX), builder.mul(args[1], row_bytes))
        byte = ir.IntType(8).as_pointer()
        fetch_type = ir.FunctionType(ir.VoidType(), [byte, _SHORT, _SHORT, _SHORT])
        fetch = _declare(builder, fetch_type, "llvm.prefetch.p0")
        hints = [ir.Constant(_SHORT, hint) for hint in (1, 3, 1)]  # to be written, near, data
        with cgutils.for_range_slice(builder, ir.Constant(_INDEX, 0), row_bytes, ir.Constant(_INDEX, 64), _INDEX) as (
            place,
            _,
        ):
            builder.call(fetch, [builder.inttoptr(builder.add(start, place), byte), *hints])
        return context.get_dummy_value()

    return types.void(table, types.int64), build


prefetch_row: Any = intrinsic(_prefetch_row)
"""prefetch_row(table, r): asks for row r of a table whose rows lie in one piece, and does not wait for it."""

_write_tile = _make_tile(_TALL, _WIDE)
_write_small_tile = _make_tile(_TALL // 2, _WIDE)
_write_row = _make_tile(1, _WIDE)
_write_narrow_tile = _make_tile(_TALL, 1)
_write_narrow_row = _make_tile(1, 1)
_TILE_WIDTH = _WIDE * LANES
_SMALL = _TALL // 2


@njit(nogil=True, cache=True)
def multiply_matrices(a: Floats, b: Floats, out: Floats) -> None:
    """out = a @ b; rows of `b` and `out` lie in one piece, `a` may be a view of any kind, such as a transposed one."""
    m, depth = a.shape
    n = b.shape[1]
    wide = n - n % _TILE_WIDTH
    for j in range(0, wide, _TILE_WIDTH):
        i = 0
        while i + _TALL <= m:
            _write_tile(out, i, j, a, b, depth)
            i += _TALL
        if i + _SMALL <= m:
            _write_small_tile(out, i, j, a, b, depth)
            i += _SMALL
        while i < m:
            _write_row(out, i, j, a, b, depth)
            i += 1
    vectors = n - n % LANES
    for j in range(wide, vectors, LANES):
        i = 0
        while i + _TALL <= m:
            _write_narrow_tile(out, i, j, a, b, depth)
            i += _TALL
        while i < m:
            _write_narrow_row(out, i, j, a, b, depth)
            i += 1
    for i in range(m if vectors < n else 0):
        for j in range(vectors, n):
            total = a.dtype.type(0)
            for k in range(depth):
                total += a[i, k] * b[k, j]
            out[i, j] = total


@njit(nogil=True, cache=True)
def transpose_matrix(matrix: Floats, out: Floats) -> None:
    """out = matrix.T, copied."""
    for j in range(matrix.shape[1]):
        for i in range(matrix.shape[0]):
            out[j, i] = matrix[i, j]
