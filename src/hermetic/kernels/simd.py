"""Rows of K and V in vector registers: the LLVM instructions behind the Numba kernels.

Numba has no vector type and leaves the order of a float sum to LLVM's mood. Here the order is written down: every
function below emits LLVM IR for one block of rows, 16 float32 wide, with explicit fused multiply-adds, so that a
result has the same bits whether it is verified or not and wherever it is inlined. LLVM splits the vectors on
machines with narrower registers.

The one thing to know: *a row is loaded once*. Each load feeds the hash and the arithmetic (or the store) from the
same register, so the bytes that were hashed are the bytes that were used.

A row is cut into chunks of 64 bytes = 16 words of 32 bits. A bf16 pair in a word becomes two float32 by a shift and a
mask, so a chunk of bf16 is two float vectors, its even and its odd elements; queries, sums and results are kept in
that order and never shuffled. NH (see kv/seals.py) adds both 32-bit secrets of each lane in one vector addition and
multiplies the halves.

All addresses are plain integers (bytes). Capital parameters are compile-time constants: WIDTH elements a row, ITEM
bytes an element, GROUP query heads a KV head, HASH 0 or 1. Buffers are float32 and belong to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic as _intrinsic

# Numba's own types describe an intrinsic as the function that emits code, not as the one that kernels call.
intrinsic: Any = _intrinsic
cgutils: Any = _cgutils

LANES = 16  # float32 in one vector
BLOCK = 16  # rows scored at a time: one vector of scores
VECTOR = 4 * LANES  # bytes
AHEAD = 4096  # bytes that a linear scan fetches ahead: hardware prefetchers stop at the end of a 4 KiB page
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_HASH = ir.VectorType(_I64, LANES // 2)


def vectors(width: int, item: int) -> int:
    """Float vectors that one row of `width` elements of `item` bytes becomes."""
    return Row(width, item).vectors


class Row:
    """How one row of a component lies in memory and in registers."""

    def __init__(self, width: int, item: int) -> None:
        self.width, self.item = width, item
        self.bytes = -(-width * item // 8) * 8
        words = self.bytes // 4
        self.chunks = [(at, min(LANES, words - at)) for at in range(0, words, LANES)]  # (first word, words)
        self.per_chunk = 2 if item == 2 else 1
        self.vectors = len(self.chunks) * self.per_chunk

    def load(self, b: ir.IRBuilder, base: ir.Value, chunk: int) -> ir.Value:
        """A chunk of a row in a page, padding included, as 16 words; words past the row are zero."""
        at, words = self.chunks[chunk]
        return _widen(b, _load(b, base, 4 * at, ir.VectorType(_I32, words), 4), LANES)

    def load_tight(self, b: ir.IRBuilder, base: ir.Value, chunk: int) -> ir.Value:
        """The same of a row in a tensor, which has no padding; elements past the row are zero."""
        at, words = self.chunks[chunk]
        items = min(4 * words // self.item, self.width - 4 * at // self.item)
        kind = ir.IntType(8 * self.item)
        part = _load(b, base, 4 * at, ir.VectorType(kind, items), self.item)
        return b.bitcast(_widen(b, part, VECTOR // self.item), _WORDS)

    def store(self, b: ir.IRBuilder, words: ir.Value, base: ir.Value, chunk: int) -> None:
        """Write a chunk into a page, padding included."""
        at, count = self.chunks[chunk]
        _store(b, _narrow(b, words, count), base, 4 * at, 4)

    def store_tight(self, b: ir.IRBuilder, words: ir.Value, base: ir.Value, chunk: int) -> None:
        """Write a chunk into a tensor's row, its own elements only."""
        at, count = self.chunks[chunk]
        items = min(4 * count // self.item, self.width - 4 * at // self.item)
        parts = b.bitcast(words, ir.VectorType(ir.IntType(8 * self.item), VECTOR // self.item))
        _store(b, _narrow(b, parts, items), base, 4 * at, self.item)

    def floats(self, b: ir.IRBuilder, words: ir.Value) -> list[ir.Value]:
        """16 words -> float vectors: the elements, or the even and the odd elements of bf16. Exact."""
        if self.item == 4:
            return [b.bitcast(words, _FLOATS)]
        even = b.shl(words, _splat(_I32, 16))
        odd = b.and_(words, _splat(_I32, 0xFFFF0000))
        return [b.bitcast(even, _FLOATS), b.bitcast(odd, _FLOATS)]

    def words(self, b: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
        """The inverse; bf16 rounds to nearest, ties to even, and keeps NaN a NaN."""
        if self.item == 4:
            return b.bitcast(parts[0], _WORDS)
        even, odd = (_round_bf16(b, p) for p in parts)
        return b.or_(b.lshr(even, _splat(_I32, 16)), odd)


# --- small pieces of IR ---------------------------------------------------------------------------------------------


def _splat(kind: ir.Type, value: float, count: int = LANES) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, count), [value] * count)


def _pointer(b: ir.IRBuilder, base: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    return b.inttoptr(b.add(base, ir.Constant(_I64, offset)), kind.as_pointer())


def _load(b: ir.IRBuilder, base: ir.Value, offset: int, kind: ir.Type, align: int) -> ir.Value:
    return b.load(_pointer(b, base, offset, kind), align=align)


def _store(b: ir.IRBuilder, value: ir.Value, base: ir.Value, offset: int, align: int) -> None:
    b.store(value, _pointer(b, base, offset, value.type), align=align)


def _widen(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """A vector with zeros behind it, `count` elements in all."""
    have = value.type.count
    if have == count:
        return value
    mask = [i if i < have else have for i in range(count)]
    return b.shuffle_vector(
        value, ir.Constant(value.type, None), ir.Constant(ir.VectorType(_I32, count), mask)
    )


def _narrow(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    if value.type.count == count:
        return value
    return b.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, count), list(range(count))))


def _spread(b: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    one = b.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, _splat(_I32, 0))


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def _round_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Float vector -> words whose upper halves are the nearest bf16, lower halves zero (as kernels/bf16.py)."""
    bits = b.bitcast(x, _WORDS)
    odd = b.and_(b.lshr(bits, _splat(_I32, 16)), _splat(_I32, 1))
    rounded = b.add(bits, b.add(odd, _splat(_I32, 0x7FFF)))
    nan = b.icmp_unsigned(">", b.and_(bits, _splat(_I32, 0x7FFFFFFF)), _splat(_I32, 0x7F800000))
    return b.and_(b.select(nan, _splat(_I32, 0x7FC00000), rounded), _splat(_I32, 0xFFFF0000))


def _fold(b: ir.IRBuilder, value: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Reduce a vector to every lane at once: partner lanes 1, 2, 4, ... apart are joined, in this order."""
    count, step = value.type.count, 1
    while step < count:
        mask = ir.Constant(ir.VectorType(_I32, count), [i ^ step for i in range(count)])
        value = join(value, b.shuffle_vector(value, value, mask))
        step *= 2
    return value


def _first(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return b.extract_element(value, ir.Constant(_I32, 0))


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """max; of a NaN and a number it may give either: the NaN still reaches the result through its own weight."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


# 2^r on [-1/2, 1/2]: degree 6, least relative error with the constant term held at 1, so that exp2(0) is exactly 1.
# Fitted by Lawson's reweighted least squares on 4,001 Chebyshev points; the polynomial is off by at most 2.0e-9, its
# float32 evaluation by less than one unit in the last place (7.9e-8 relative), which tests/kernels/test_simd.py checks.
EXP2 = (1.0, 0.693147203, 0.240226479, 0.0555033247, 0.00961843736, 0.00133988745, 0.00015353362)
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits


def _exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 0; below -126 exactly 0 (no denormals). NaN in, NaN out."""
    shifted = b.fadd(x, _splat(_F32, _MAGIC))
    whole = b.fsub(shifted, _splat(_F32, _MAGIC))
    rest = b.fsub(x, whole)
    value: ir.Value = _splat(_F32, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        value = _fma(b, value, rest, _splat(_F32, coefficient))
    exponent = b.shl(b.bitcast(shifted, _WORDS), _splat(_I32, 23))
    value = b.bitcast(b.add(b.bitcast(value, _WORDS), exponent), _FLOATS)
    tiny = b.fcmp_ordered("<", x, _splat(_F32, -126.0))
    value = b.select(tiny, _splat(_F32, 0.0), value)
    # Integer arithmetic on a NaN's bits could leave a number: hand the NaN through.
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


@intrinsic
def exp2_lanes(_context: Any, source: Any, target: Any) -> Any:
    """2^x of the 16 float32 at an address, each x <= 0, to another address."""

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        _store(b, _exp2(b, _load(b, args[0], 0, _FLOATS, 4)), args[1], 0, 4)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.int64), codegen


def _nh(b: ir.IRBuilder, total: ir.Value, row: Row, words: ir.Value, secret: ir.Value, chunk: int) -> None:
    """Add one chunk's NH terms to the running lanes; words past the row are zero on both sides and add nothing."""
    both = b.bitcast(b.add(words, row.load(b, secret, chunk)), _HASH)
    low = b.and_(both, _splat(_I64, 0xFFFFFFFF, LANES // 2))
    high = b.lshr(both, _splat(_I64, 32, LANES // 2))
    b.store(b.add(b.load(total), b.mul(low, high)), total)


def _sum(b: ir.IRBuilder, total: ir.Value) -> ir.Value:
    return _first(b, _fold(b, b.load(total), b.add))


def _zero_hash(b: ir.IRBuilder) -> ir.Value:
    total = cgutils.alloca_once(b, _HASH)
    b.store(ir.Constant(_HASH, None), total)
    return total


def _step(b: ir.IRBuilder, base: ir.Value, index: ir.Value, stride: int) -> ir.Value:
    return b.add(base, b.mul(index, ir.Constant(_I64, stride)))


def _prefetch(b: ir.IRBuilder, base: ir.Value, size: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    hint = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for at in range(0, size, 64):
        flags = [ir.Constant(_I32, n) for n in (0, 3, 1)]  # read, keep close, data
        b.call(hint, [_pointer(b, base, at, _I8), *flags])


def _constants(*values: Any) -> list[int]:
    for value in values:
        if not isinstance(value, types.IntegerLiteral):
            raise TypeError(f"needs a compile-time constant, got {value}")
    return [value.literal_value for value in values]


# --- rows in and out of pages ---------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def hash_rows(_context: Any, address: Any, rows: Any, secrets: Any, WIDTH: Any, ITEM: Any) -> Any:
    """NH of `rows` consecutive rows of a page -> uint64."""
    row = Row(*_constants(WIDTH, ITEM))

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        source, count, secret = args[:3]
        total = _zero_hash(b)
        with cgutils.for_range(b, count) as loop:
            at, key = (_step(b, x, loop.index, row.bytes) for x in (source, secret))
            _prefetch(b, b.add(at, ir.Constant(_I64, AHEAD)), row.bytes)
            for chunk in range(len(row.chunks)):
                _nh(b, total, row, row.load(b, at, chunk), key, chunk)
        return _sum(b, total)

    return types.uint64(types.int64, types.int64, types.int64, WIDTH, ITEM), codegen


@intrinsic(prefer_literal=True)
def pack_row(_context: Any, source: Any, target: Any, secret: Any, WIDTH: Any, ITEM: Any) -> Any:
    """Store a tensor's row as a page row (padding zero) -> its NH, from the registers that were stored."""
    row = Row(*_constants(WIDTH, ITEM))

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        total = _zero_hash(b)
        for chunk in range(len(row.chunks)):
            words = row.load_tight(b, args[0], chunk)
            row.store(b, words, args[1], chunk)
            _nh(b, total, row, words, args[2], chunk)
        return _sum(b, total)

    return types.uint64(types.int64, types.int64, types.int64, WIDTH, ITEM), codegen


@intrinsic(prefer_literal=True)
def unpack_rows(
    _context: Any, source: Any, rows: Any, target: Any, secrets: Any, WIDTH: Any, ITEM: Any, HASH: Any
) -> Any:
    """Copy page rows to consecutive rows of a tensor -> their NH (0 unless HASH), from the registers stored."""
    width, item, hashed = _constants(WIDTH, ITEM, HASH)
    row = Row(width, item)

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        source, count, target, secret = args[:4]
        total = _zero_hash(b)
        with cgutils.for_range(b, count) as loop:
            at, key = (_step(b, x, loop.index, row.bytes) for x in (source, secret))
            to = _step(b, target, loop.index, width * item)
            for chunk in range(len(row.chunks)):
                words = row.load(b, at, chunk)
                row.store_tight(b, words, to, chunk)
                if hashed:
                    _nh(b, total, row, words, key, chunk)
        return _sum(b, total)

    return types.uint64(*[types.int64] * 4, WIDTH, ITEM, HASH), codegen


# --- decode attention, one block of at most 16 rows at a time -----------------------------------------------------------


@intrinsic(prefer_literal=True)
def load_query(_context: Any, source: Any, target: Any, factor: Any, WIDTH: Any, ITEM: Any) -> Any:
    """One query head of a tensor -> float vectors in register order, times `factor` (scale * log2 e)."""
    row = Row(*_constants(WIDTH, ITEM))

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        factor = _spread(b, args[2])
        for chunk in range(len(row.chunks)):
            for part, floats in enumerate(row.floats(b, row.load_tight(b, args[0], chunk))):
                _store(b, b.fmul(floats, factor), args[1], VECTOR * (chunk * row.per_chunk + part), 4)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.int64, types.float32, WIDTH, ITEM), codegen


@intrinsic(prefer_literal=True)
def dot_rows(
    _context: Any,
    keys: Any,
    rows: Any,
    query: Any,
    products: Any,
    secrets: Any,
    ahead: Any,
    WIDTH: Any,
    ITEM: Any,
    GROUP: Any,
    HASH: Any,
) -> Any:
    """Products of `rows` (<= 16) key rows with GROUP queries, summed down to one vector each -> NH (0 unless HASH).

    query     [GROUP][vectors] float vectors
    products  [GROUP][16] float vectors, one a row, still to be summed across its lanes
    ahead     address of rows that will be needed next: fetched meanwhile
    """
    width, item, group, hashed = _constants(WIDTH, ITEM, GROUP, HASH)
    row = Row(width, item)

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        keys, count, query, products, secret, ahead = args[:6]
        total = _zero_hash(b)
        with cgutils.for_range(b, count) as loop:
            at, key, later = (_step(b, x, loop.index, row.bytes) for x in (keys, secret, ahead))
            to = _step(b, products, loop.index, VECTOR)
            _prefetch(b, later, row.bytes)
            sums: list[Any] = [None] * group
            for chunk in range(len(row.chunks)):
                words = row.load(b, at, chunk)
                if hashed:
                    _nh(b, total, row, words, key, chunk)
                for part, floats in enumerate(row.floats(b, words)):
                    for g in range(group):
                        offset = VECTOR * (g * row.vectors + chunk * row.per_chunk + part)
                        q = _load(b, query, offset, _FLOATS, 4)
                        sums[g] = b.fmul(floats, q) if sums[g] is None else _fma(b, floats, q, sums[g])
            for g in range(group):
                _store(b, sums[g], to, VECTOR * BLOCK * g, 4)
        return _sum(b, total)

    return types.uint64(*[types.int64] * 6, WIDTH, ITEM, GROUP, HASH), codegen


def _row_sums(b: ir.IRBuilder, rows: list[ir.Value]) -> ir.Value:
    """16 vectors -> one vector whose lane i is the sum over rows[i]'s lanes: a transposition that adds on its way."""
    for bit in range(4):
        step, merged = 1 << bit, []
        for a, c in zip(rows[::2], rows[1::2], strict=True):
            stay = [LANES + i if i & step else i for i in range(LANES)]
            cross = [LANES + (i ^ step) if i & step else i ^ step for i in range(LANES)]
            # lane i keeps row a where its bit is clear and row c where it is set, and adds the partner lane's share
            merged.append(
                b.fadd(
                    b.shuffle_vector(a, c, ir.Constant(_WORDS, stay)),
                    b.shuffle_vector(a, c, ir.Constant(_WORDS, cross)),
                )
            )
        rows = merged
    return rows[0]


@intrinsic(prefer_literal=True)
def weigh_rows(
    _context: Any, products: Any, rows: Any, weights: Any, state: Any, shrink: Any, ROWS: Any, GROUP: Any
) -> Any:
    """Online softmax over one block: scores -> weights, and the factor by which what came before shrinks.

    products  [GROUP][16] float vectors from dot_rows; rows at or past `rows` are ignored (ROWS: the most there can be)
    weights   [GROUP] float vectors, out: 2^(score - top), 0 for ignored rows
    state     [GROUP][2] float vectors, in/out: the highest score so far in every lane; the sum of weights, by lane
    shrink    [GROUP] float vectors, out: 2^(old top - new top) in every lane
    """
    most, group = _constants(ROWS, GROUP)

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        products, count, weights, state, shrink = args[:5]
        index = ir.Constant(_WORDS, list(range(LANES)))
        limit = b.insert_element(
            ir.Constant(_WORDS, ir.Undefined), b.trunc(count, _I32), ir.Constant(_I32, 0)
        )
        filled = b.icmp_signed("<", index, b.shuffle_vector(limit, limit, _splat(_I32, 0)))
        for g in range(group):
            loaded = [
                _load(b, products, VECTOR * (BLOCK * g + j), _FLOATS, 4) if j < most else _splat(_F32, 0.0)
                for j in range(BLOCK)
            ]
            scores = b.select(filled, _row_sums(b, loaded), _splat(_F32, float("-inf")))
            before = _load(b, state, VECTOR * 2 * g, _FLOATS, 4)
            top = _larger(b, _fold(b, scores, lambda x, y: _larger(b, x, y)), before)
            weight = _exp2(b, b.fsub(scores, top))
            less = _exp2(b, b.fsub(before, top))
            mass = _fma(b, _load(b, state, VECTOR * (2 * g + 1), _FLOATS, 4), less, weight)
            _store(b, weight, weights, VECTOR * g, 4)
            _store(b, less, shrink, VECTOR * g, 4)
            _store(b, top, state, VECTOR * 2 * g, 4)
            _store(b, mass, state, VECTOR * (2 * g + 1), 4)
        return ir.Constant(_I64, 0)

    return types.int64(*[types.int64] * 5, ROWS, GROUP), codegen


_REGISTERS = 24  # float vectors kept in registers while rows go by; of 32 in AVX-512


@intrinsic(prefer_literal=True)
def add_rows(
    _context: Any,
    values: Any,
    rows: Any,
    weights: Any,
    shrink: Any,
    sums: Any,
    secrets: Any,
    ahead: Any,
    WIDTH: Any,
    ITEM: Any,
    GROUP: Any,
    HASH: Any,
) -> Any:
    """sums = sums * shrink + weights x values, for `rows` (<= 16) value rows -> NH (0 unless HASH).

    sums [GROUP][vectors] float vectors, in/out; weights, shrink as weigh_rows left them; ahead as in dot_rows.
    """
    width, item, group, hashed = _constants(WIDTH, ITEM, GROUP, HASH)
    row = Row(width, item)
    at_once = max(
        1, _REGISTERS // (group * row.per_chunk)
    )  # chunks of a row per pass; each chunk is in one pass

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        values, count, weights, shrink, sums, secret, ahead = args[:7]
        total = _zero_hash(b)
        for first in range(0, len(row.chunks), at_once):
            chunks = range(first, min(first + at_once, len(row.chunks)))
            parts = range(first * row.per_chunk, chunks[-1] * row.per_chunk + row.per_chunk)
            held = {(g, p): cgutils.alloca_once(b, _FLOATS) for g in range(group) for p in parts}
            for g in range(group):
                factor = _load(b, shrink, VECTOR * g, _FLOATS, 4)
                for p in parts:
                    old = _load(b, sums, VECTOR * (g * row.vectors + p), _FLOATS, 4)
                    b.store(b.fmul(old, factor), held[g, p])
            with cgutils.for_range(b, count) as loop:
                at, key, later = (_step(b, x, loop.index, row.bytes) for x in (values, secret, ahead))
                if first == 0:
                    _prefetch(b, later, row.bytes)
                scale = [
                    _spread(b, _load(b, _step(b, weights, loop.index, 4), VECTOR * g, _F32, 4))
                    for g in range(group)
                ]
                for chunk in chunks:
                    words = row.load(b, at, chunk)
                    if hashed:
                        _nh(b, total, row, words, key, chunk)
                    for part, floats in enumerate(row.floats(b, words)):
                        for g in range(group):
                            slot = held[g, chunk * row.per_chunk + part]
                            b.store(_fma(b, scale[g], floats, b.load(slot)), slot)
            for (g, p), slot in held.items():
                _store(b, b.load(slot), sums, VECTOR * (g * row.vectors + p), 4)
        return _sum(b, total)

    return types.uint64(*[types.int64] * 7, WIDTH, ITEM, GROUP, HASH), codegen


@intrinsic(prefer_literal=True)
def merge_parts(
    _context: Any,
    parts: Any,
    count: Any,
    stride: Any,
    target: Any,
    step: Any,
    WIDTH: Any,
    ITEM: Any,
    GROUP: Any,
) -> Any:
    """Join the partial results of `count` (>= 1) splits in their order and store GROUP rows of the result.

    parts   [count] blocks `stride` bytes apart: state [GROUP][2], then sums [GROUP][vectors] float vectors
    target  first of GROUP tensor rows, `step` bytes apart
    """
    width, item, group = _constants(WIDTH, ITEM, GROUP)
    row = Row(width, item)

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        parts, count, stride, target, step = args[:5]
        for g in range(group):
            top, mass = cgutils.alloca_once(b, _FLOATS), cgutils.alloca_once(b, _FLOATS)
            sums = [cgutils.alloca_once(b, _FLOATS) for _ in range(row.vectors)]
            b.store(_splat(_F32, float("-inf")), top)
            for slot in (mass, *sums):
                b.store(_splat(_F32, 0.0), slot)
            with cgutils.for_range(b, count) as loop:
                part = b.add(parts, b.mul(loop.index, stride))
                old, new = b.load(top), _load(b, part, VECTOR * 2 * g, _FLOATS, 4)
                best = _larger(b, new, old)
                less, share = _exp2(b, b.fsub(old, best)), _exp2(b, b.fsub(new, best))
                b.store(best, top)
                for i, slot in enumerate((mass, *sums)):
                    offset = 2 * g + 1 if i == 0 else 2 * group + g * row.vectors + i - 1
                    fresh = b.fmul(_load(b, part, VECTOR * offset, _FLOATS, 4), share)
                    b.store(_fma(b, b.load(slot), less, fresh), slot)
            whole = _fold(b, b.load(mass), b.fadd)
            to = b.add(target, b.mul(step, ir.Constant(_I64, g)))
            for chunk in range(len(row.chunks)):
                first = chunk * row.per_chunk
                done = [b.fdiv(b.load(s), whole) for s in sums[first : first + row.per_chunk]]
                row.store_tight(b, row.words(b, done), to, chunk)
        return ir.Constant(_I64, 0)

    return types.int64(*[types.int64] * 5, WIDTH, ITEM, GROUP), codegen


# --- bytes, words and counters by address -----------------------------------------------------------------------------


@intrinsic
def load_word(_context: Any, address: Any) -> Any:
    """The uint64 at an address."""

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return _load(b, args[0], 0, _I64, 8)

    return types.uint64(types.int64), codegen


@intrinsic
def store_word(_context: Any, address: Any, value: Any) -> Any:
    """Write a uint64 to an address."""

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        _store(b, args[1], args[0], 0, 8)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.uint64), codegen


@intrinsic
def next_ticket(_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, atomically -> what was there; orders memory like a lock would."""

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _pointer(b, args[0], 0, _I64), ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def copy_bytes(_context: Any, target: Any, source: Any, size: Any) -> Any:
    """memcpy."""

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        cgutils.raw_memcpy(b, _pointer(b, args[0], 0, _I8), _pointer(b, args[1], 0, _I8), args[2], 1)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_bytes(_context: Any, target: Any, size: Any) -> Any:
    """memset to zero."""

    def codegen(_ctx: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        cgutils.memset(b, _pointer(b, args[0], 0, _I8), args[1], 0)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.int64), codegen
