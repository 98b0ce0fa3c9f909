"""FlashAttention's forward for Hopper, in Gluon: a producer and two or three consumers in a block.

A block computes WORKERS * SHARE rows of a head, then those of another place, until none is left:
  consumers   four warps each, SHARE rows: products on the tensor cores, softmax between them
  producer    one warp: queries, keys and values from memory to shared memory by TMA
Keys and values go through rings of STAGES tiles. A barrier for each place of a ring says that it is
full, another that all consumers are through with it. Tile n is in place n % STAGES, and every
barrier flips its phase once in a round, so (n // STAGES) % 2 is what is waited for.

In a consumer the scores of tile n are computed while the values of tile n - 1 are being added. The
walk goes from the last keys to the first: tiles that the diagonal or the end cuts come first, then
whole ones without a mask, then those that the window's left border cuts.

There are no future annotations here: Triton reads the fields of an aggregate off their classes.
"""

from tilewright.toolkit.gluon_compat import (
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
from tilewright.toolkit.triton_attention import (
    _in_slot,
    keys_seen,
    sequence,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(float("-inf"))
SHARE = gl.constexpr(64)  # rows of a consumer: a product of the tensor cores has 64

Known = gl.tensor | gl.constexpr  # when a kernel runs, or already when it is compiled


@record
class How:
    """What a binary is made for."""

    WORKERS: gl.constexpr
    KEYS: gl.constexpr
    STAGES: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    TAIL: gl.constexpr  # the keys may end inside of a tile
    RAGGED: gl.constexpr  # and other keys may follow there, which may be NaN
    SOFTCAP: gl.constexpr
    SCALED: gl.constexpr
    TURNS: gl.constexpr  # consumers issue their products one after the other
    LAZY: gl.constexpr  # rescale what was summed before only if the maximum grew much
    OWN: gl.constexpr  # results have a place of their own, else that of the queries
    QUEUE: gl.constexpr  # tiles of queries that a consumer may have
    PAIRS: gl.constexpr  # blocks stay and take one tile after the other


@record
class Where:
    """How tiles are dealt out (`attention_call.Places`), and what the rows of a sequence see."""

    rounds: Known
    blocks: Known
    heads: Known
    lines: Known
    together: Known
    sequences: Known
    group: Known
    rows: Known
    keys: Known
    left: Known
    right: Known
    off: Known
    bottom_right: Known
    cu_q_ptr: Known
    cu_k_ptr: Known
    key_counts_ptr: Known


@record
class Rings:
    """Tiles in shared memory, and the barriers that say who may use them."""

    q: gl.shared_memory_descriptor  # [WORKERS, 1, 1, SHARE, columns]
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, columns]
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor  # as q, whose place it takes unless it has its own
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor  # whose products are next
    clean: gl.shared_memory_descriptor  # values of no key are 0


@record
class Results:
    """Where they go; by pointers, which only packed sequences need, and by TMA."""

    o_desc: object
    o_ptr: Known
    o_t: Known
    o_h: Known
    lse_ptr: Known
    lse_h: Known


# --- where a block is ----------------------------------------------------------------------------


@gluon.jit
def _tile(round, where, how):
    """(is there one, head, batch, first row, rows, keys, off, and where the sequence starts) of the
    tile that a block computes in a round.

    PAIRS: a block takes the last rows of a head, then its first, the last but one, then the second
    ...: under a causal mask each such pair is as much work as any other. Else it is as
    `triton_attention.place` has it, what takes longest first, and every second round in the other
    direction; with as many blocks as tiles there is one round, and the hardware deals them out.
    """
    here, count = gl.program_id(0), gl.num_programs(0)
    ROWS: gl.constexpr = how.WORKERS * SHARE
    if how.PAIRS:
        halves = (where.blocks + 1) // 2
        unit = here + round // 2 * count
        line, pair = unit // halves, unit % halves
        block = gl.where(round % 2 == 0, where.blocks - 1 - pair, pair)
        is_there = (line < where.lines) & ((round % 2 == 0) | (block < where.blocks - 1 - pair))
        head, number = line % where.heads, line // where.heads
    else:
        tile = round * count + gl.where(round % 2 == 0, here, count - 1 - here)
        is_there = tile < where.blocks * where.lines
        group = tile // (where.together * where.blocks)
        rest = tile % (where.together * where.blocks)
        size = gl.maximum(gl.minimum(where.together, where.lines - group * where.together), 1)
        slot, line = rest // size, group * where.together + rest % size
        block, head, number = where.blocks - 1 - slot, line % where.heads, line // where.heads
        if where.cu_q_ptr is not None:
            if where.sequences > 0:  # known when a kernel runs, not when it is compiled
                block, number = _in_slot(
                    slot, where.sequences, where.rows, where.cu_q_ptr, ROWS, True
                )
                head = line
    first = block * ROWS
    first_row, first_key, rows, keys, off = 0, 0, where.rows, where.keys, where.off
    if how.RAGGED:
        first_row, first_key, rows, keys, off = sequence(
            gl.where(is_there, number, 0), rows, keys, where.bottom_right, where.cu_q_ptr, where.cu_k_ptr,
            where.key_counts_ptr,
        )  # fmt: skip
    batch = number if where.cu_q_ptr is None else 0
    return is_there & (first < rows), head, batch, first, rows, keys, off, first_row, first_key


@gluon.jit
def _span(first, keys, off, where, how, ROWS: gl.constexpr):
    """(bottom, top, cut_left, cut_right): ROWS rows see tiles `bottom` to `top`, one at least, of
    which so many at either end are to be masked."""
    begin, all_begin, all_end, end = keys_seen(
        first, off, where.left, where.right, keys, ROWS, how.KEYS, how.LEFT, how.RIGHT
    )
    bottom = begin // how.KEYS
    top = gl.maximum((end + how.KEYS - 1) // how.KEYS, bottom + 1)
    cut_right = top - gl.minimum(gl.maximum(all_end // how.KEYS, bottom), top)
    cut_left = gl.maximum(all_begin // how.KEYS - bottom, 0)
    return bottom, top, cut_left, cut_right


# --- the producer --------------------------------------------------------------------------------


@gluon.jit
def _fetch(desc, at, full, empty, ring, place, phase):
    """A tile into a place of a ring, when all are through with what was there."""
    mbarrier.wait(empty.index(place), phase ^ 1)
    mbarrier.expect(full.index(place), desc.block_type.nbytes)
    tma_load(desc, at, full.index(place), ring.index(place))


@gluon.jit
def _produce(q_desc, k_desc, v_desc, where, rings, how):
    n = 0  # tiles of keys so far
    done = 0  # tiles of rows so far
    for round in range(where.rounds):
        is_there, head, batch, first, _, keys, off, first_row, first_key = _tile(round, where, how)
        if is_there:
            bottom, top, _, _ = _span(first, keys, off, where, how, how.WORKERS * SHARE)
            row, key_head = first_row + first, head // where.group
            for step in range(top - bottom):
                slot, parity = n % how.STAGES, n // how.STAGES & 1
                at = [batch, key_head, first_key + (top - 1 - step) * how.KEYS, 0]
                _fetch(k_desc, at, rings.k_full, rings.k_empty, rings.k, slot, parity)
                if step == 0:
                    for w in gl.static_range(how.WORKERS):
                        of_worker = [batch, head, row + w * SHARE, 0]
                        at_q = done % how.QUEUE * how.WORKERS + w
                        _fetch(
                            q_desc, of_worker, rings.q_full, rings.q_empty, rings.q, at_q,
                            done // how.QUEUE & 1,
                        )  # fmt: skip
                _fetch(v_desc, at, rings.v_full, rings.v_empty, rings.v, slot, parity)
                n += 1
            done += 1


# --- a consumer ----------------------------------------------------------------------------------


@gluon.jit
def _exp2(x):
    """Numbers below 2^-126 are 0: telling them apart would take two more instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _tanh(x):
    """`triton_attention.tanh`, with a reciprocal that errs by one bit instead of a division."""
    e = _exp2(x * (2 * LOG2_E)) + 1.0
    far = 1.0 - 2.0 * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e], gl.float32, is_pure=True, pack=1
    )
    z = x * x
    near = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
    near = ((near + 1.33314422036e-1) * z - 3.33332819422e-1) * z * x + x
    return gl.where(z < 0.39, near, far)


@gluon.jit
def _logits(s, scale, softcap, how):
    """In units of log 2, before a mask makes some -inf; plain ones are scaled later."""
    if how.SOFTCAP:
        s = _tanh(s * (scale / softcap)) * (softcap * LOG2_E)
    elif how.SCALED:  # a scale that turns scores round, or makes them 0
        s = s * (scale * LOG2_E)
    return s


@gluon.jit
def _softmax(s, peak, total, scale, how):
    """(weights, peak, total, factor of what was summed before) with the scores s; all in units of
    log 2. With LAZY the peak follows only scores that are 8 above it: weights up to 2^8 do no harm,
    and most factors are 1."""
    PLAIN: gl.constexpr = not (how.SCALED or how.SOFTCAP)
    high = gl.max(s, 1)
    if PLAIN:
        high = high * (scale * LOG2_E)
    if how.LAZY:
        new_peak = gl.where(high > peak + 8.0, high, peak)
    else:
        new_peak = gl.maximum(high, peak)
    shift = gl.where(new_peak == MINUS_INF, 0.0, new_peak)  # a row that has seen no key yet
    if PLAIN:  # scaled while the maximum is taken off: one instruction
        p = _exp2(s * (scale * LOG2_E) - shift[:, None])
    else:
        p = _exp2(s - shift[:, None])
    shrink = _exp2(peak - shift)
    return p, new_peak, total * shrink + gl.sum(p, 1), shrink


def _unless_all_are_one(count: int) -> tuple[str, str]:
    """PTX that multiplies numbers of two rows by factors, unless those of the whole warp are 1."""
    first, factor = count, 2 * count
    code = "{ .reg .pred one, all; "
    code += f"setp.eq.f32 one, ${factor}, 0f3F800000; "
    code += f"setp.eq.and.f32 one, ${factor + 2}, 0f3F800000, one; "
    code += "vote.sync.all.pred all, one, 0xffffffff; "
    code += "".join(f"mov.f32 ${i}, ${first + i}; " for i in range(count))
    code += "@all bra DONE; "
    code += "".join(f"mul.f32 ${i}, ${i}, ${factor + i}; " for i in range(count))
    return code + "DONE: }", ",".join(["=&f"] * count + ["f"] * 2 * count)


_SCALE_32, _REGISTERS_32 = map(gl.constexpr, _unless_all_are_one(32))


@gluon.jit
def _rescale(acc, shrink, how):
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    if how.LAZY:
        acc, factor = gl.broadcast(acc, factor)
        acc = gl.inline_asm_elementwise(
            _SCALE_32, _REGISTERS_32, [acc, factor], gl.float32, is_pure=True, pack=32
        )
    else:
        acc = acc * factor
    return acc


def _within(count: int, left: bool) -> tuple[str, str]:
    """PTX that makes scores of keys beyond a row's bounds -inf, for all that a thread holds.

    It holds elements 0 and 1 of a row, 0 and 1 of the row 8 below, then those 8 columns on, and so
    forth, from column 2 (lane % 4) on: comparisons are with constants. If the bounds did not seem
    to depend on a score, all comparisons would be done before the product is ready, and their
    outcomes packed into registers and out again: three times the instructions. So they are moved by
    one for a score that no product has: a NaN other than the one that tensor cores make.
    """
    inputs = [count * (1 + i) for i in range(3 if left else 2)]
    scores, rest = inputs[0], inputs[1:]
    code = "{ .reg .pred p; .reg .s32 lane, never"
    code += "".join(f", bound{i}{row}" for i in range(len(rest)) for row in (0, 2)) + "; "
    code += "mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 1; "
    code += f"mov.b32 never, ${scores}; setp.eq.s32 p, never, 0x7FABCDEF; "
    code += "selp.s32 never, 1, 0, p; sub.s32 lane, lane, never; "
    for i, first in enumerate(rest):
        code += "".join(f"sub.s32 bound{i}{row}, ${first + row}, lane; " for row in (0, 2))
    for e in range(count):
        column, row = 8 * (e // 4) + e % 2, e & 2
        code += f"setp.ge.s32 p, bound0{row}, {column}; "
        if left:
            code += f"setp.le.and.s32 p, bound1{row}, {column}, p; "
        code += f"selp.f32 ${e}, ${scores + e}, 0fFF800000, p; "
    return code + "}", ",".join(["=f"] * count + ["f"] * count + ["r"] * count * len(rest))


_UP_TO_32, _OF_UP_TO_32 = map(gl.constexpr, _within(32, False))
_UP_TO_64, _OF_UP_TO_64 = map(gl.constexpr, _within(64, False))
_BETWEEN_32, _OF_BETWEEN_32 = map(gl.constexpr, _within(32, True))
_BETWEEN_64, _OF_BETWEEN_64 = map(gl.constexpr, _within(64, True))


@gluon.jit
def _mask(s, i, tile, keys, off, where, how):
    """-inf for keys that a row does not see, or that there are not."""
    COUNT: gl.constexpr = how.KEYS // 2  # elements of a thread: it has two rows
    start = tile * how.KEYS
    last = gl.zeros_like(i) + (keys - 1 - start)
    if how.RIGHT:
        last = gl.minimum(last, i + (off + where.right - start))
    s, last = gl.broadcast(s, last[:, None])
    if how.LEFT:
        s, begin = gl.broadcast(s, (i + (off - where.left - start))[:, None])
        if COUNT == 32:
            s = gl.inline_asm_elementwise(_BETWEEN_32, _OF_BETWEEN_32, [s, last, begin], gl.float32, is_pure=True, pack=32)
        else:
            s = gl.inline_asm_elementwise(_BETWEEN_64, _OF_BETWEEN_64, [s, last, begin], gl.float32, is_pure=True, pack=64)
    else:
        if COUNT == 32:
            s = gl.inline_asm_elementwise(_UP_TO_32, _OF_UP_TO_32, [s, last], gl.float32, is_pure=True, pack=32)
        else:
            s = gl.inline_asm_elementwise(_UP_TO_64, _OF_UP_TO_64, [s, last], gl.float32, is_pure=True, pack=64)
    return s


@gluon.jit
def _scores(q, rings, n, how, S: gl.constexpr):
    """q k^T of tile n, under way."""
    k = rings.k.index(n % how.STAGES).reshape([how.KEYS, rings.k.shape[4]])
    zero = gl.zeros([SHARE, how.KEYS], gl.float32, S)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(p, acc, rings, n, how):
    """acc + p v of tile n, under way."""
    v = rings.v.index(n % how.STAGES).reshape([how.KEYS, rings.v.shape[4]])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _await(full, n, how):
    mbarrier.wait(full.index(n % how.STAGES), n // how.STAGES & 1)


@gluon.jit
def _free(empty, n, how):
    mbarrier.arrive(empty.index(n % how.STAGES), count=1)


@gluon.jit
def _take_turn(turn, rings, how, WHICH: gl.constexpr):
    if how.TURNS:
        mbarrier.wait(rings.turns.index(WHICH), (turn & 1) ^ (1 if WHICH == 0 else 0))


@gluon.jit
def _pass_turn(rings, how, WHICH: gl.constexpr):
    if how.TURNS:
        mbarrier.arrive(rings.turns.index((WHICH + 1) % how.WORKERS), count=1)


@gluon.jit
def _pass_tile(n, turn, rings, how, WHICH: gl.constexpr):
    """Leave tile n to the other consumers."""
    _await(rings.k_full, n, how)
    _take_turn(turn, rings, how, WHICH)
    _pass_turn(rings, how, WHICH)
    _free(rings.k_empty, n, how)
    _await(rings.v_full, n, how)
    _free(rings.v_empty, n, how)


@gluon.jit
def _advance(
    acc, p, peak, total, shrink, q, i, n, turn, tile, keys, off, scale, softcap, where, rings, how,
    WHICH: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Scores of tile n, while the values of tile n - 1 are being added."""
    _await(rings.k_full, n, how)
    _take_turn(turn, rings, how, WHICH)
    scores = _scores(q, rings, n, how, S)
    if how.LAZY:
        acc = _rescale(acc, shrink, how)
    _await(rings.v_full, n - 1, how)
    adding = _add_values(p, acc, rings, n - 1, how)
    _pass_turn(rings, how, WHICH)
    s = warpgroup_mma_wait(1, deps=(scores,))
    _free(rings.k_empty, n, how)
    s = _logits(s, scale, softcap, how)
    if MASKED:
        s = _mask(s, i, tile, keys, off, where, how)
    weights, peak, total, shrink = _softmax(s, peak, total, scale, how)
    acc = warpgroup_mma_wait(0, deps=(adding,))
    _free(rings.v_empty, n - 1, how)
    if not how.LAZY:
        acc = _rescale(acc, shrink, how)
    return acc, gl.convert_layout(weights.to(p.dtype), p.type.layout), peak, total, shrink


@gluon.jit
def _clean(rings, n, done, tile, keys, how, WHICH: gl.constexpr):
    """Zeros for the values of no key in tile n: what stands there may be NaN, and 0 NaN is NaN.

    The first two consumers do half of the tile each, and all wait for them.
    """
    HALF: gl.constexpr = how.KEYS // 2
    FIRST: gl.constexpr = WHICH * HALF
    COLUMNS: gl.constexpr = rings.v.shape[4]
    LANES: gl.constexpr = min(COLUMNS // 8, 32)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    if WHICH < 2:
        _await(rings.v_full, n, how)
        v = rings.v.index(n % how.STAGES).reshape([how.KEYS, COLUMNS]).slice(FIRST, HALF)
        j = tile * how.KEYS + FIRST + gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
        zero = gl.zeros([HALF, COLUMNS], v.dtype, WIDE)
        v.store(gl.where((j < keys)[:, None], v.load(WIDE), zero))
        fence_async_shared()
        mbarrier.arrive(rings.clean.index(0), count=1)
    mbarrier.wait(rings.clean.index(0), done & 1)


@gluon.jit
def _store(
    acc, peak, total, i, head, batch, first, rows, first_row, results, rings, where, how,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Rows and their lse. TMA stops at the end of the tensor; where rows of another sequence
    follow, the last ones are stored one by one."""
    O: gl.constexpr = acc.type.layout
    PACKED: gl.constexpr = where.cu_q_ptr is not None
    nothing = total == 0.0  # no key was seen: the row is 0 and its lse -inf
    lse = gl.where(nothing, MINUS_INF, (peak + gl.log2(total)) * LN_2)
    line = head if PACKED else batch * where.heads + head
    of_line = results.lse_ptr + line.to(gl.int64) * results.lse_h
    gl.store(of_line + (first_row + i), lse, mask=i < rows)
    nothing = gl.convert_layout(nothing, gl.SliceLayout(1, O))[:, None]
    total = gl.convert_layout(total, gl.SliceLayout(1, O))[:, None]
    out = gl.where(nothing, 0.0, acc * (1.0 / total)).to(rings.o.dtype)
    by_tma = True
    if PACKED:
        by_tma = first + SHARE <= rows
    if by_tma:
        tma_store_wait(0)  # what was stored before has been read
        rings.o.index(WHICH).reshape(acc.shape).store(out)
        fence_async_shared()
        tma_store(results.o_desc, [batch, head, first_row + first, 0], rings.o.index(WHICH))
        if not how.OWN:
            tma_store_wait(0)
    if PACKED:
        if first + SHARE > rows:
            row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, O))[:, None]
            column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, O))[None, :]
            o_ptr = results.o_ptr + head.to(gl.int64) * results.o_h
            o_ptr += (first_row + first).to(gl.int64) * results.o_t
            inside = (first + row < rows) & (column < results.o_desc.shape[3])
            gl.store(o_ptr + row * results.o_t + column, out, mask=inside)


@gluon.jit
def _consume(
    WHICH: gl.constexpr, results, sinks_ptr, scale, softcap, where, rings, how,
):  # fmt: skip
    COLUMNS: gl.constexpr = rings.k.shape[4]
    VALUE_COLUMNS: gl.constexpr = rings.v.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_COLUMNS, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)  # as S lies: scores stay in their registers
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    MASKED: gl.constexpr = how.LEFT or how.RIGHT or how.TAIL
    n = 0
    done = 0
    turn = 0
    for round in range(where.rounds):
        is_there, head, batch, first, rows, keys, off, first_row, _ = _tile(round, where, how)
        if is_there:
            all_bottom, all_top, cut_left, cut_right = _span(
                first, keys, off, where, how, how.WORKERS * SHARE
            )
            first += WHICH * SHARE
            i = first + gl.arange(0, SHARE, OF_ROWS)
            bottom, top = all_bottom, all_top
            if MASKED and not how.RAGGED:  # its own rows may see less than the block's
                bottom, top, cut_left, cut_right = _span(first, keys, off, where, how, SHARE)
                bottom = gl.minimum(bottom, all_top - 1)
                top = gl.minimum(top, all_top)
            for _ in range(all_top - top):
                _pass_tile(n, turn, rings, how, WHICH)
                n += 1
                turn += 1

            if sinks_ptr is not None:  # a key without a value, taken first
                sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
                peak = gl.zeros([SHARE], gl.float32, OF_ROWS) + sink
                total = gl.full([SHARE], 1.0, gl.float32, OF_ROWS)
            else:
                peak = gl.full([SHARE], MINUS_INF, gl.float32, OF_ROWS)
                total = gl.zeros([SHARE], gl.float32, OF_ROWS)

            at_q = done % how.QUEUE * how.WORKERS + WHICH
            q = rings.q.index(at_q).reshape([SHARE, COLUMNS])
            mbarrier.wait(rings.q_full.index(at_q), done // how.QUEUE & 1)
            _await(rings.k_full, n, how)
            s = warpgroup_mma_wait(0, deps=(_scores(q, rings, n, how, S),))
            _free(rings.k_empty, n, how)
            s = _logits(s, scale, softcap, how)
            if MASKED:
                s = _mask(s, i, top - 1, keys, off, where, how)
            p, peak, total, shrink = _softmax(s, peak, total, scale, how)
            p = gl.convert_layout(p.to(rings.v.dtype), P)
            if how.RAGGED:
                _clean(rings, n, done, top - 1, keys, how, WHICH)
            acc = gl.zeros([SHARE, VALUE_COLUMNS], gl.float32, O)
            n += 1

            whole = gl.maximum(top - gl.maximum(cut_right, 1), bottom) if MASKED else top - 1
            rest = gl.minimum(bottom + cut_left, whole) if how.LEFT else bottom
            if MASKED:
                for step in range(whole + 1, top):
                    acc, p, peak, total, shrink = _advance(
                        acc, p, peak, total, shrink, q, i, n, turn, top + whole - 1 - step, keys, off, scale,
                        softcap, where, rings, how, WHICH, True, S,
                    )  # fmt: skip
                    n += 1
                    turn += 1
            for step in range(rest, whole):
                acc, p, peak, total, shrink = _advance(
                    acc, p, peak, total, shrink, q, i, n, turn, 0, keys, off, scale, softcap,
                    where, rings, how, WHICH, False, S,
                )  # fmt: skip
                n += 1
                turn += 1
            if how.LEFT:
                for step in range(bottom, rest):
                    acc, p, peak, total, shrink = _advance(
                        acc, p, peak, total, shrink, q, i, n, turn, bottom + rest - 1 - step, keys, off, scale,
                        softcap, where, rings, how, WHICH, True, S,
                    )  # fmt: skip
                    n += 1
                    turn += 1

            if how.OWN:  # the next queries may come
                mbarrier.arrive(rings.q_empty.index(at_q), count=1)
            if how.LAZY:
                acc = _rescale(acc, shrink, how)
            _await(rings.v_full, n - 1, how)
            acc = warpgroup_mma_wait(0, deps=(_add_values(p, acc, rings, n - 1, how),))
            _free(rings.v_empty, n - 1, how)
            if how.LEFT:
                for _ in range(bottom - all_bottom):
                    _pass_tile(n, turn, rings, how, WHICH)
                    n += 1
                    turn += 1
            _store(
                acc, peak, total, i, head, batch, first, rows, first_row, results, rings, where,
                how, WHICH,
            )  # fmt: skip
            if not how.OWN:
                mbarrier.arrive(rings.q_empty.index(at_q), count=1)
            done += 1
    tma_store_wait(0)


# --- the block -----------------------------------------------------------------------------------


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(barriers.index(place), count=ARRIVALS)
    return barriers


SIZES = ["rounds", "blocks", "heads", "lines", "together", "sequences", "group", "rows", "keys"]
SIZES += ["left", "right", "off", "bottom_right", "o_t", "o_h", "lse_h"]


@gluon.jit(do_not_specialize=SIZES)
def _attend_on_hopper(
    o_desc, o_ptr, lse_ptr, q_desc, k_desc, v_desc, sinks_ptr, cu_q_ptr, cu_k_ptr, key_counts_ptr,
    rounds, blocks, heads, lines, together, sequences, group, rows, keys, left, right, off, bottom_right,
    o_t, o_h, lse_h, scale, softcap,
    WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    TAIL: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr, SCALED: gl.constexpr,
    TURNS: gl.constexpr, LAZY: gl.constexpr, OWN: gl.constexpr, QUEUE: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = q_desc.block_type.shape[3]
    VALUE_COLUMNS: gl.constexpr = v_desc.block_type.shape[3]
    PACKED: gl.constexpr = cu_q_ptr is not None
    dtype: gl.constexpr = q_desc.dtype
    how = How(
        WORKERS, KEYS, STAGES, LEFT, RIGHT, TAIL, RAGGED, SOFTCAP, SCALED, TURNS, LAZY,
        OWN, QUEUE, PAIRS,
    )  # fmt: skip
    # what is known already takes no register
    where = Where(
        rounds, blocks, heads, lines, 1 if PAIRS else together,
        sequences if PACKED else 0, group,
        rows, keys, left if LEFT else -1, right if RIGHT else -1,
        off if (LEFT or RIGHT) and not RAGGED else 0,
        bottom_right if (LEFT or RIGHT) and RAGGED else 0, cu_q_ptr, cu_k_ptr, key_counts_ptr,
    )  # fmt: skip
    QUERIES: gl.constexpr = QUEUE * WORKERS
    q = gl.allocate_shared_memory(dtype, [QUERIES, 1, 1, SHARE, COLUMNS], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, COLUMNS], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, VALUE_COLUMNS], v_desc.layout)
    if OWN:
        o = gl.allocate_shared_memory(dtype, [WORKERS, 1, 1, SHARE, VALUE_COLUMNS], o_desc.layout)
    else:
        o = q
    rings = Rings(
        q, k, v, o, _barriers(QUERIES, 1), _barriers(QUERIES, 1), _barriers(STAGES, 1),
        _barriers(STAGES, WORKERS), _barriers(STAGES, 1), _barriers(STAGES, WORKERS),
        _barriers(WORKERS, 1), _barriers(1, 2),
    )  # fmt: skip
    if PACKED:
        results = Results(o_desc, o_ptr, o_t, o_h, lse_ptr, lse_h)
    else:
        results = Results(o_desc, None, 0, 0, lse_ptr, lse_h)
    # constants of the arguments stay constants only in a tuple that has no name
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, results, sinks_ptr, scale, softcap, where, rings, how)),
                (_consume, (1, results, sinks_ptr, scale, softcap, where, rings, how)),
                (_produce, (q_desc, k_desc, v_desc, where, rings, how)),
            ],
            [4, 1],
            [REGISTERS, FEW_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, results, sinks_ptr, scale, softcap, where, rings, how)),
                (_consume, (1, results, sinks_ptr, scale, softcap, where, rings, how)),
                (_consume, (2, results, sinks_ptr, scale, softcap, where, rings, how)),
                (_produce, (q_desc, k_desc, v_desc, where, rings, how)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FEW_REGISTERS],
        )
