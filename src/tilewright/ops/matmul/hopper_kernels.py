"""Matmul for Hopper, in Gluon: blocks that stay, a producer and two consumers in each.

A block computes tiles of WORKERS * SHARE rows and COLUMNS + REST columns, one after another:
  producer    one warp: tiles of both operands from memory to shared memory by TMA, STAGES ahead
  consumers   four warps each, SHARE rows: products on the tensor cores, sums in registers
Consumers wait for the producer and never for each other, so one stores its rows while the other
multiplies: the tensor cores see no end of a tile. Results leave through shared memory by TMA, PART
columns at a time.

Tiles that are left over when all blocks have had equally many would keep few blocks busy. They are
cut along K into `splits` parts, the first parts of all such tiles before the second ones. Each part
leaves its sums in memory, and whoever comes last adds those of a tile in the order of K: the same
call gives the same bits, and nobody waits for anybody. Parts that run at a time read the same rows
and columns at the same time, as whole tiles do. To cut the work into equal pieces instead, wherever
that cuts a tile, read matrices several times from memory (notes.md).

There are no future annotations here: Triton reads the fields of a record off their classes.
"""

from tilewright.toolkit.gluon_compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewright.toolkit.gluon_lib import _barriers

Known = gl.tensor | gl.constexpr  # when a kernel runs, or already when it is compiled


@record
class How:
    """What a binary is made for."""

    WORKERS: gl.constexpr
    SHARE: gl.constexpr  # rows of a consumer
    COLUMNS: gl.constexpr
    REST: gl.constexpr  # more of them, or 0: tensors have powers of two
    DEPTH: gl.constexpr  # elements along K of a step
    STAGES: gl.constexpr
    PART: gl.constexpr  # columns that are stored at a time
    A_BY_ROWS: gl.constexpr
    B_BY_ROWS: gl.constexpr
    SPLIT: gl.constexpr  # there are tiles that blocks share


@record
class Where:
    """How tiles are dealt out."""

    rows: Known  # of a matrix
    m_tiles: Known
    n_tiles: Known
    whole: Known  # tiles that are not cut, the first ones
    cut: Known  # tiles that are
    splits: Known  # parts of those
    steps: Known  # of a tile, along K
    group: Known  # tiles of rows that are computed side by side, so that they meet in L2
    a_stacked: Known  # 1: every product has an `a` of its own; 0: all have the same
    b_stacked: Known


@record
class Rings:
    """Tiles in shared memory, and the barriers that say who may use them."""

    a: gl.shared_memory_descriptor  # [STAGES * WORKERS, 1, SHARE, DEPTH], or columns first
    b: gl.shared_memory_descriptor  # [STAGES, 1, DEPTH, COLUMNS], or columns first
    rest: gl.shared_memory_descriptor  # the same of REST columns
    c: gl.shared_memory_descriptor  # [2 * WORKERS, 1, SHARE, PART]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


# --- which work is whose -------------------------------------------------------------------------


@gluon.jit
def _pieces(where, how):
    """How many tiles, or parts of one, a block computes."""
    count = where.whole
    if how.SPLIT:
        count += where.cut * where.splits
    return (count - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _piece(i, where, how):
    """(tile, part, first step, the one after the last) of a block's piece i."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    part, first, last = 0, 0, where.steps
    if how.SPLIT:
        beyond = tile - where.whole
        is_cut = beyond >= 0
        part = gl.where(is_cut, beyond // where.cut, 0)
        tile = gl.where(is_cut, where.whole + beyond % where.cut, tile)
        first = part * where.steps // where.splits
        last = gl.where(is_cut, (part + 1) * where.steps // where.splits, where.steps)
    return tile, part, first, last


@gluon.jit
def _place(tile, where, how):
    """(matrix, first row, first column): columns of `group` tiles, one column after the other."""
    of_matrix = where.m_tiles * where.n_tiles
    matrix, rest = tile // of_matrix, tile % of_matrix
    wide = where.group * where.n_tiles
    above = rest // wide * where.group
    size = gl.minimum(where.m_tiles - above, where.group)
    row, column = above + rest % wide % size, rest % wide // size
    return matrix, row * (how.WORKERS * how.SHARE), column * (how.COLUMNS + how.REST)


@gluon.jit
def _next(slot, phase, how):
    """The place in the rings after this one; each round the barriers flip their phase."""
    last = slot == how.STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _before(slot, how):
    return gl.where(slot == 0, how.STAGES - 1, slot - 1)


# --- the producer --------------------------------------------------------------------------------


@gluon.jit
def _produce(a_desc, b_desc, rest_desc, where, rings, how):
    WIDE: gl.constexpr = how.WORKERS * how.SHARE + how.COLUMNS + how.REST
    BYTES: gl.constexpr = WIDE * how.DEPTH * a_desc.dtype.primitive_bitwidth // 8
    slot, phase = 0, 1  # at first all places are empty
    for i in range(_pieces(where, how)):
        tile, _, first, last = _piece(i, where, how)
        matrix, row, column = _place(tile, where, how)
        of_a, of_b = matrix * where.a_stacked, matrix * where.b_stacked
        for step in range(first, last):
            k = step * how.DEPTH
            full = rings.full.index(slot)
            mbarrier.wait(rings.empty.index(slot), phase)
            mbarrier.expect(full, BYTES)
            for w in gl.static_range(how.WORKERS):
                at = row + w * how.SHARE
                place = rings.a.index(slot * how.WORKERS + w)
                tma_load(a_desc, [of_a, at, k] if how.A_BY_ROWS else [of_a, k, at], full, place)
            at_b = [of_b, k, column] if how.B_BY_ROWS else [of_b, column, k]
            tma_load(b_desc, at_b, full, rings.b.index(slot))
            if how.REST > 0:
                beyond = column + how.COLUMNS
                at_b = [of_b, k, beyond] if how.B_BY_ROWS else [of_b, beyond, k]
                tma_load(rest_desc, at_b, full, rings.rest.index(slot))
            slot, phase = _next(slot, phase, how)


# --- a consumer ----------------------------------------------------------------------------------


@gluon.jit
def _matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BY_ROWS: gl.constexpr):
    """A tile of shared memory as [ROWS, COLUMNS], whichever of them lie side by side."""
    if BY_ROWS:
        return tile.reshape([ROWS, COLUMNS])
    else:
        return tile.reshape([COLUMNS, ROWS]).permute((1, 0))


@gluon.jit
def _nothing(how, COLUMNS: gl.constexpr):
    # a step is four instructions: 16 halves or 8 floats along K each
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, how.DEPTH // 4])
    return gl.zeros([how.SHARE, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def _issue(acc, slot, is_added, rings, how, WHICH: gl.constexpr):
    """The products of a step, of all columns."""
    a = rings.a.index(slot * how.WORKERS + WHICH)
    a = _matrix(a, how.SHARE, how.DEPTH, how.A_BY_ROWS)
    b = _matrix(rings.b.index(slot), how.DEPTH, how.COLUMNS, how.B_BY_ROWS)
    under_way = warpgroup_mma(a, b, acc[0], use_acc=is_added, is_async=True)
    if how.REST == 0:
        return (under_way,)
    else:
        b = _matrix(rings.rest.index(slot), how.DEPTH, how.REST, how.B_BY_ROWS)
        return under_way, warpgroup_mma(a, b, acc[1], use_acc=is_added, is_async=True)


@gluon.jit
def _settled(under_way, how, STEPS: gl.constexpr):
    """The sums, with the products of so many steps still under way."""
    if how.REST == 0:
        return (warpgroup_mma_wait(STEPS, deps=(under_way[0],)),)
    else:
        return warpgroup_mma_wait(2 * STEPS, deps=(under_way[0], under_way[1]))


@gluon.jit
def _multiply(first, last, slot, phase, rings, how, WHICH: gl.constexpr):
    """The sums of a tile's steps, one product under way while the next is issued."""
    if how.REST == 0:
        acc = (_nothing(how, how.COLUMNS),)
    else:
        acc = _nothing(how, how.COLUMNS), _nothing(how, how.REST)
    for step in range(first, last):
        mbarrier.wait(rings.full.index(slot), phase)
        acc = _settled(_issue(acc, slot, step > first, rings, how, WHICH), how, 1)
        mbarrier.arrive(rings.empty.index(_before(slot, how)), count=1, pred=step > first)
        slot, phase = _next(slot, phase, how)
    acc = _settled(acc, how, 0)
    mbarrier.arrive(rings.empty.index(_before(slot, how)), count=1)
    return acc, slot, phase


@gluon.jit
def _halves(x):
    """Left and right columns. A thread has both: nothing moves."""
    HALF: gl.constexpr = x.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)))
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _parts(x, PART: gl.constexpr):
    """The columns, PART at a time."""
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS == PART:
        return (x,)
    else:
        left, right = _halves(x)
        if COLUMNS == 2 * PART:
            return left, right
        else:
            a, b = _halves(left)
            c, d = _halves(right)
            if COLUMNS == 4 * PART:
                return a, b, c, d
            else:
                gl.static_assert(COLUMNS == 8 * PART)
                a, a2 = _halves(a)
                b, b2 = _halves(b)
                c, c2 = _halves(c)
                d, d2 = _halves(d)
                return a, a2, b, b2, c, c2, d, d2


@gluon.jit
def _flat(x):
    """[SHARE, PART] in an order in which a thread has four neighbours, and a warp 128 of them. The
    dims are 16 rows, the row 8 below, rows, then 8 columns, four lanes, two columns."""
    ROWS: gl.constexpr = x.shape[0] // 16
    COLUMNS: gl.constexpr = x.shape[1] // 8
    x = x.reshape([ROWS, 2, 8, COLUMNS, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    return x.reshape([ROWS * COLUMNS * 128])


@gluon.jit
def _unflat(x, like):
    """What `_flat` was made of, which looked `like` that."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    x = x.reshape([ROWS // 16, COLUMNS // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return gl.convert_layout(x.reshape([ROWS, COLUMNS]), like.type.layout)


@gluon.jit
def _sums_at(sums_ptr, tile, part, j, where, how, WHICH: gl.constexpr):
    """Where a consumer leaves its sums of a part of a cut tile, PART columns of them."""
    PARTS: gl.constexpr = (how.COLUMNS + how.REST) // how.PART
    number = ((tile - where.whole) * where.splits + part) * how.WORKERS + WHICH
    return sums_ptr + (number * PARTS + j) * (how.SHARE * how.PART)


@gluon.jit
def _leave(parts, tile, part, where, sums_ptr, flags_ptr, how, WHICH: gl.constexpr):
    """Sums for whoever comes last; returns whether that is now."""
    for j in gl.static_range((how.COLUMNS + how.REST) // how.PART):
        sums = _flat(parts[j])
        place = gl.arange(0, how.SHARE * how.PART, sums.type.layout)
        gl.store(_sums_at(sums_ptr, tile, part, j, where, how, WHICH) + place, sums)
    barrier()  # all threads have stored, and the one that tells it knows
    flag = flags_ptr + (tile - where.whole) * how.WORKERS + WHICH
    arrived = gl.atomic_add(flag, 1, sem="acq_rel")
    if arrived == where.splits - 1:
        gl.atomic_xchg(flag, 0, sem="relaxed")  # as it was
    return arrived == where.splits - 1


@gluon.jit
def _gather(parts, tile, where, sums_ptr, how, WHICH: gl.constexpr):
    """The sums of all parts, in the order of K."""
    PARTS: gl.constexpr = (how.COLUMNS + how.REST) // how.PART
    total = ()
    for j in gl.static_range(PARTS):
        total = total + (gl.zeros_like(_flat(parts[j])),)  # noqa: RUF005 - as Triton wants it
    for part in range(where.splits):
        added = ()
        for j in gl.static_range(PARTS):
            place = gl.arange(0, how.SHARE * how.PART, total[j].type.layout)
            at = _sums_at(sums_ptr, tile, part, j, where, how, WHICH) + place
            added = added + (total[j] + gl.load(at, cache_modifier=".cg"),)  # noqa: RUF005
        total = added
    gathered = ()
    for j in gl.static_range(PARTS):
        gathered = gathered + (_unflat(total[j], parts[j]),)  # noqa: RUF005
    return gathered


@gluon.constexpr_function
def under_way(j):
    """Stores that may still read shared memory when part j of a tile is put there, in place j % 2.

    The first part may have the place of the last one of the tile before. Those are long gone.
    """
    return 0 if j == 0 else 1


@gluon.jit
def _store(parts, matrix, row, column, c_desc, rings, how, WHICH: gl.constexpr):
    """By TMA, which stops at the matrix's edges."""
    for j in gl.static_range((how.COLUMNS + how.REST) // how.PART):
        place = rings.c.index(WHICH * 2 + j % 2)
        top, left = row + WHICH * how.SHARE, column + j * how.PART
        tma_store_wait(under_way(j))
        place.reshape([how.SHARE, how.PART]).store(parts[j].to(place.dtype))
        fence_async_shared()
        tma_store(c_desc, [matrix, top, left], place)


@gluon.jit
def _consume(WHICH: gl.constexpr, c_desc, sums_ptr, flags_ptr, where, rings, how):
    slot, phase = 0, 0
    for i in range(_pieces(where, how)):
        tile, part, first, last = _piece(i, where, how)
        matrix, row, column = _place(tile, where, how)
        acc, slot, phase = _multiply(first, last, slot, phase, rings, how, WHICH)
        parts = _parts(acc[0], how.PART)
        if how.REST > 0:
            parts = parts + _parts(acc[1], how.PART)
        is_done = row + WHICH * how.SHARE < where.rows  # else nobody wants these rows
        if how.SPLIT:  # noqa: SIM102
            if is_done & (tile >= where.whole):
                is_done = _leave(parts, tile, part, where, sums_ptr, flags_ptr, how, WHICH)
                if is_done:
                    parts = _gather(parts, tile, where, sums_ptr, how, WHICH)
        if is_done:
            _store(parts, matrix, row, column, c_desc, rings, how, WHICH)
    tma_store_wait(0)


# --- the block -----------------------------------------------------------------------------------


@gluon.jit
def _ring(desc, COUNT: gl.constexpr):
    """Shared memory for so many tiles of a matrix."""
    TILE: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, TILE[1], TILE[2]], desc.layout)


SIZES = [
    "rows", "m_tiles", "n_tiles", "whole", "cut", "splits", "steps", "group", "a_stacked",
    "b_stacked",
]  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def _matmul_on_hopper(
    c_desc, a_desc, b_desc, rest_desc, sums_ptr, flags_ptr,
    rows, m_tiles, n_tiles, whole, cut, splits, steps, group, a_stacked, b_stacked,
    WORKERS: gl.constexpr, SHARE: gl.constexpr, COLUMNS: gl.constexpr, REST: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, A_BY_ROWS: gl.constexpr,
    B_BY_ROWS: gl.constexpr, SPLIT: gl.constexpr, REGISTERS: gl.constexpr,
    FEW_REGISTERS: gl.constexpr,
):  # fmt: skip
    how = How(WORKERS, SHARE, COLUMNS, REST, DEPTH, STAGES, PART, A_BY_ROWS, B_BY_ROWS, SPLIT)
    where = Where(rows, m_tiles, n_tiles, whole, cut, splits, steps, group, a_stacked, b_stacked)
    a, b, c = _ring(a_desc, STAGES * WORKERS), _ring(b_desc, STAGES), _ring(c_desc, 2 * WORKERS)
    rest = _ring(rest_desc, STAGES) if REST > 0 else b
    rings = Rings(a, b, rest, c, _barriers(STAGES, 1), _barriers(STAGES, WORKERS))
    # constants of the arguments stay constants only in a tuple that has no name
    gl.warp_specialize(
        [
            (_consume, (0, c_desc, sums_ptr, flags_ptr, where, rings, how)),
            (_consume, (1, c_desc, sums_ptr, flags_ptr, where, rings, how)),
            (_produce, (a_desc, b_desc, rest_desc, where, rings, how)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
