"""Vector and matrix instructions for products of a few rows with many weights: the LLVM side of matmul.py.

Weights lie in tiles of 16 outputs x 32 inputs, in the order in which they are used: [outputs/32][inputs/32][2][16][16][2],
where the last three are a pair of inputs, an output, and which of the pair. That is what one AMX register holds, and each
of its 64 byte rows is what one `vdpbf16ps` takes; so one layout serves every kind of processor, a thread reads its share
from front to back, and no sum runs across the lanes of a register.

The one thing to know: *an element of the result is one chain of additions in one register*, from the first input to the
last, whatever the number of rows beside it. Kinds differ from each other in the last bits (in float32), counts of rows
never:

    TILES     AMX `tdpbf16ps`: 32 rows x 32 outputs at once
    PAIRS     AVX-512 `vdpbf16ps`: 8 rows x 32 outputs
    PORTABLE  fused multiply-adds of bf16 widened to float32: 4 rows x 32 outputs

The first two take denormal bf16 as zero and flush denormal results, as Intel documents. All addresses are integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from hermetic.kernels.simd import LANES, VECTOR, cgutils, intrinsic
from hermetic.kernels.simd import _constants as constants
from hermetic.kernels.simd import _fma as fma
from hermetic.kernels.simd import _load as load
from hermetic.kernels.simd import _pointer as pointer
from hermetic.kernels.simd import _round_bf16 as round_bf16
from hermetic.kernels.simd import _store as store

PORTABLE, PAIRS, TILES = 0, 1, 2
TILE_INPUTS = 32  # inputs of one tile
BLOCK_OUTPUTS = 32  # outputs computed together: two tiles
TILE = TILE_INPUTS // 2 * VECTOR  # bytes
STEP = 2 * TILE  # bytes of weights that a block takes for 32 inputs
SUMS = 4 * BLOCK_OUTPUTS  # bytes of one row of a block's sums
TILE_ROWS = 16  # rows of x in one AMX register
ROWS_AT_ONCE = {PORTABLE: 4, PAIRS: 8, TILES: 2 * TILE_ROWS}

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(_I16, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks; here only as what an instruction's arguments are called."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def _addresses(b: ir.IRBuilder, base: ir.Value, *more: tuple[ir.Value | int, int]) -> ir.Value:
    """base plus each index times its stride."""
    for index, stride in more:
        index = ir.Constant(_I64, index) if isinstance(index, int) else index
        base = b.add(base, b.mul(index, ir.Constant(_I64, stride)))
    return base


# --- AMX. Registers: 0..3 the sums [rows / 16][2], 4..5 x, 6..7 the weights --------------------------------------------


def layouts() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [33, 64]: the tile configuration for each number of rows (Intel SDM, "LDTILECFG", palette 1)."""
    table = np.zeros((ROWS_AT_ONCE[TILES] + 1, 64), np.uint8)
    table[:, 0] = 1
    table[:, 16:32:2] = VECTOR  # bytes of a row of each register, as 16 bit words
    table[:, 48:56] = TILE_ROWS
    for rows, layout in enumerate(table):
        layout[[48, 49, 52]] = min(max(rows, 1), TILE_ROWS)
        layout[[50, 51, 53]] = max(rows - TILE_ROWS, 1)
    return table


def _load_tile(b: ir.IRBuilder, number: int, base: ir.Value, stride: ir.Value) -> None:
    at = pointer(b, base, 0, _I8)
    _call(b, "llvm.x86.tileloadd64", ir.VoidType(), ir.Constant(_I8, number), at, stride)


def _multiply_tiles(
    b: ir.IRBuilder,
    x: ir.Value,
    x_row: ir.Value,
    weights: ir.Value,
    steps: ir.Value,
    sums: ir.Value,
    parts: int,
) -> None:
    """One or two registers of rows of x times one block of weights. The layout that was loaded says how many rows."""
    for n in range(2 * parts):
        _call(b, "llvm.x86.tilezero", ir.VoidType(), ir.Constant(_I8, n))
    below = b.add(x, b.mul(x_row, ir.Constant(_I64, TILE_ROWS)))
    with cgutils.for_range(b, steps) as loop:
        for part, rows in enumerate((x, below)[:parts]):
            _load_tile(b, 4 + part, _addresses(b, rows, (loop.index, 2 * TILE_INPUTS)), x_row)
        for side in range(2):
            at = _addresses(b, weights, (loop.index, STEP), (side, TILE))
            _load_tile(b, 6 + side, at, ir.Constant(_I64, VECTOR))
        for part in range(parts):
            for side in range(2):
                numbers = (2 * part + side, 4 + part, 6 + side)
                registers = [ir.Constant(_I8, n) for n in numbers]
                _call(b, "llvm.x86.tdpbf16ps", ir.VoidType(), *registers)
    for part in range(parts):
        for side in range(2):
            at = pointer(b, sums, part * TILE_ROWS * SUMS + side * VECTOR, _I8)
            number, stride = ir.Constant(_I8, 2 * part + side), ir.Constant(_I64, SUMS)
            _call(b, "llvm.x86.tilestored64", ir.VoidType(), number, at, stride)


# --- vectors -------------------------------------------------------------------------------------------------------------


def _multiply_rows(
    b: ir.IRBuilder,
    x: ir.Value,
    x_row: ir.Value,
    weights: ir.Value,
    steps: ir.Value,
    sums: ir.Value,
    rows: int,
    kind: int,
) -> None:
    """`rows` rows of x times one block of weights."""
    held = {(r, s): cgutils.alloca_once(b, _FLOATS) for r in range(rows) for s in range(2)}
    for slot in held.values():
        b.store(ir.Constant(_FLOATS, None), slot)
    start = [b.add(x, b.mul(x_row, ir.Constant(_I64, r))) for r in range(rows)]
    with cgutils.for_range(b, steps) as loop:
        from_weights = _addresses(b, weights, (loop.index, STEP))
        from_x = [_addresses(b, row, (loop.index, 2 * TILE_INPUTS)) for row in start]
        for pair in range(TILE_INPUTS // 2):
            tiles = [load(b, from_weights, side * TILE + pair * VECTOR, _WORDS, 4) for side in range(2)]
            for r in range(rows):
                both = _spread(b, load(b, from_x[r], 4 * pair, _I32, 2))
                for side in range(2):
                    slot = held[r, side]
                    b.store(_add_pair(b, b.load(slot), both, tiles[side], kind), slot)
    for (r, side), slot in held.items():
        store(b, b.load(slot), sums, r * SUMS + side * VECTOR, 4)


def _add_pair(b: ir.IRBuilder, total: ir.Value, x: ir.Value, weights: ir.Value, kind: int) -> ir.Value:
    """total + products of 16 pairs of bf16; x and weights are words holding a pair each."""
    if kind == PAIRS:
        pairs = ir.VectorType(_BFloat(), 2 * LANES)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return _call(b, name, _FLOATS, total, b.bitcast(x, pairs), b.bitcast(weights, pairs))
    for half in (_lower, _upper):
        total = fma(b, half(b, x), half(b, weights), total)
    return total


def _lower(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return b.bitcast(b.shl(words, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)


def _upper(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return b.bitcast(b.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES)), _FLOATS)


def _spread(b: ir.IRBuilder, word: ir.Value) -> ir.Value:
    one = b.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


# --- a share of a product --------------------------------------------------------------------------------------------------


def _finish_row(b: ir.IRBuilder, sums: ir.Value, bias: ir.Value, to: ir.Value, item: int, kind: int) -> None:
    """One row of a block: 32 sums plus 32 biases to the result, as float32 or rounded to bf16 (item 4 or 2)."""
    for side in range(2):
        total, more = (load(b, base, side * VECTOR, _FLOATS, 4) for base in (sums, bias))
        value = b.fadd(total, more)
        if item == 2 and kind != PORTABLE:
            narrow = ir.VectorType(_BFloat(), LANES)
            value = b.bitcast(_call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, value), _SHORTS)
        elif item == 2:
            value = b.trunc(b.lshr(round_bf16(b, value), ir.Constant(_WORDS, [16] * LANES)), _SHORTS)
        store(b, value, to, side * LANES * item, item)


@intrinsic(prefer_literal=True)
def multiply_blocks(
    _context: Any,
    x: Any,
    x_row: Any,
    rows: Any,
    weights: Any,
    first: Any,
    last: Any,
    steps: Any,
    bias: Any,
    out: Any,
    out_row: Any,
    layouts: Any,
    ITEM: Any,
    KIND: Any,
) -> Any:
    """Blocks first..last-1, 32 outputs each, of rows times weights, plus bias.

    x, x_row             address of bf16 rows of 32 * steps inputs, bytes between them
    weights, bias        addresses: all blocks' tiles; float32, one an output
    out, out_row         address of float32 (ITEM 4) or bf16 (ITEM 2) rows, bytes between them
    layouts              address of `layouts()`'s table, for TILES
    """
    item, kind = constants(ITEM, KIND)

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        x, x_row, rows, weights, first, last, steps, bias, out, out_row, layouts = args[:11]
        most = ROWS_AT_ONCE[kind]
        scratch = cgutils.alloca_once(b, ir.ArrayType(_FLOATS, 2 * most))
        before = cgutils.alloca_once(b, ir.ArrayType(_FLOATS, 1))
        sums = b.ptrtoint(scratch, _I64)
        if kind == TILES:  # oneDNN may have left a configuration in this thread that it counts on
            _call(b, "llvm.x86.sttilecfg", ir.VoidType(), b.bitcast(before, _I8.as_pointer()))
        with cgutils.for_range(b, b.sub(last, first)) as blocks:
            block = b.add(first, blocks.index)
            tiles = b.add(weights, b.mul(b.mul(block, steps), ir.Constant(_I64, STEP)))
            more = _addresses(b, bias, (block, 4 * BLOCK_OUTPUTS))
            target = _addresses(b, out, (block, item * BLOCK_OUTPUTS))

            def piece(row: ir.Value, count: ir.Value, size: int) -> None:
                at = b.add(x, b.mul(row, x_row))
                if kind == TILES:
                    layout = pointer(b, _addresses(b, layouts, (count, 64)), 0, _I8)
                    _call(b, "llvm.x86.ldtilecfg", ir.VoidType(), layout)
                    _multiply_tiles(b, at, x_row, tiles, steps, sums, size // TILE_ROWS)
                else:
                    _multiply_rows(b, at, x_row, tiles, steps, sums, size, kind)
                to = b.add(target, b.mul(row, out_row))
                with cgutils.for_range(b, count) as done:
                    from_sums = _addresses(b, sums, (done.index, SUMS))
                    _finish_row(b, from_sums, more, b.add(to, b.mul(done.index, out_row)), item, kind)

            with cgutils.for_range(b, b.udiv(rows, ir.Constant(_I64, most))) as whole:
                piece(b.mul(whole.index, ir.Constant(_I64, most)), ir.Constant(_I64, most), most)
            rest = b.urem(rows, ir.Constant(_I64, most))
            if kind == TILES:
                row = b.sub(rows, rest)
                some = b.icmp_unsigned(">", rest, ir.Constant(_I64, 0))
                few = b.icmp_unsigned("<=", rest, ir.Constant(_I64, TILE_ROWS))
                with b.if_then(b.and_(some, few)):
                    piece(row, rest, TILE_ROWS)
                with b.if_then(b.not_(few)):
                    piece(row, rest, 2 * TILE_ROWS)
            else:
                size = most // 2
                while size:
                    present = b.and_(rows, ir.Constant(_I64, size))
                    with b.if_then(b.icmp_unsigned("!=", present, ir.Constant(_I64, 0))):
                        row = b.and_(rows, ir.Constant(_I64, -2 * size))  # after all larger pieces
                        piece(row, ir.Constant(_I64, size), size)
                    size //= 2
        if kind == TILES:
            _call(b, "llvm.x86.ldtilecfg", ir.VoidType(), b.bitcast(before, _I8.as_pointer()))
        return ir.Constant(_I64, 0)

    return types.int64(*[types.int64] * 11, ITEM, KIND), codegen
