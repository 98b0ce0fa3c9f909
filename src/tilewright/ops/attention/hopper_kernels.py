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

from tilewright.ops.attention.hopper_math import (
    LOG2_E,
    MINUS_INF,
    OF_LANES,
    SHARE,
    add_values,
    added,
    logits,
    mask,
    no_values,
    rescale,
    scores,
    softmax,
)
from tilewright.toolkit.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from tilewright.toolkit.gluon_lib import _barriers
from tilewright.toolkit.triton_attention import _in_slot, keys_seen, sequence

LN_2 = gl.constexpr(0.6931471805599453)

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
    ORDER: gl.constexpr  # of the tiles: `_tile`
    DTYPE: gl.constexpr
    REST: gl.constexpr  # columns of q and k beyond half a tile, or 0: all are multiplied
    REST_OF_VALUES: gl.constexpr


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

    q: gl.shared_memory_descriptor  # [QUEUE * WORKERS, 1, 1, SHARE, columns]
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, columns]
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor  # [WORKERS, ...], in q's place unless it has its own
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    news: gl.shared_memory_descriptor  # which tile is next: what the producer found out
    news_full: gl.shared_memory_descriptor
    news_empty: gl.shared_memory_descriptor
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
def _tile(step, where, how):
    """(is there one, head, batch, first row, rows, keys, off, and where the sequence starts) of the
    tile that a block computes in a step.

    "pairs": a block takes the last rows of a head, then its first, the last but one, then the
    second ...: under a causal mask each such pair is as much work as any other. Else tiles have
    numbers, as in `triton_attention.place`, what takes longest first. "one": there is a block for
    each, and the hardware deals them out; "queue": blocks stay, and a counter says which is next.
    """
    ROWS: gl.constexpr = how.WORKERS * SHARE
    if how.ORDER == "pairs":
        halves = (where.blocks + 1) // 2
        unit = gl.program_id(0) + step // 2 * gl.num_programs(0)
        line = unit // halves
        pair = (unit + line) % halves  # else the middle one, half a pair, would meet the same SMs
        block = gl.where(step % 2 == 0, where.blocks - 1 - pair, pair)
        is_there = (line < where.lines) & ((step % 2 == 0) | (block < where.blocks - 1 - pair))
        head, number = line % where.heads, line // where.heads
    else:
        is_there = step < where.blocks * where.lines
        group = step // (where.together * where.blocks)
        rest = step % (where.together * where.blocks)
        size = gl.maximum(gl.minimum(where.together, where.lines - group * where.together), 1)
        slot, line = rest // size, group * where.together + rest % size
        block, head, number = where.blocks - 1 - slot, line % where.heads, line // where.heads
        if where.cu_q_ptr is not None:  # noqa: SIM102
            if where.sequences > 0:  # known when a kernel runs, not when it is compiled
                block, number = _in_slot(
                    slot, where.sequences, where.rows, where.cu_q_ptr, ROWS, True
                )
                head = line
        if how.RAGGED:
            number = gl.where(is_there, number, 0)
    first = block * ROWS
    first_row, first_key, rows, keys, off = 0, 0, where.rows, where.keys, where.off
    if how.RAGGED:
        first_row, first_key, rows, keys, off = sequence(
            number, rows, keys, where.bottom_right, where.cu_q_ptr, where.cu_k_ptr,
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


@gluon.jit
def _tell(rings, round, is_there, first, head, batch, rows, keys, off, first_row, how):
    """The consumers what `_tile` found out: its divisions and loads are done once for all."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = round % 2
    mbarrier.wait(rings.news_empty.index(at), (round // 2 & 1) ^ 1)
    news = (gl.where(is_there, first, -1), head, batch, rows, keys, off, first_row)
    for field in gl.static_range(7 if how.RAGGED else 3):
        place = rings.news.index(at * 8 + field)
        place.store(gl.full([1], 0, gl.int32, ONE) + news[field])
    mbarrier.arrive(rings.news_full.index(at), count=1)


@gluon.jit
def _told(rings, round, where, how):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = round % 2
    mbarrier.wait(rings.news_full.index(at), round // 2 & 1)
    first = gl.sum(rings.news.index(at * 8).load(ONE), 0)
    head = gl.sum(rings.news.index(at * 8 + 1).load(ONE), 0)
    batch = gl.sum(rings.news.index(at * 8 + 2).load(ONE), 0)
    rows, keys, off, first_row = where.rows, where.keys, where.off, 0
    if how.RAGGED:
        rows = gl.sum(rings.news.index(at * 8 + 3).load(ONE), 0)
        keys = gl.sum(rings.news.index(at * 8 + 4).load(ONE), 0)
        off = gl.sum(rings.news.index(at * 8 + 5).load(ONE), 0)
        first_row = gl.sum(rings.news.index(at * 8 + 6).load(ONE), 0)
    mbarrier.arrive(rings.news_empty.index(at), count=1)
    return first, head, batch, rows, keys, off, first_row


# --- the producer --------------------------------------------------------------------------------


@gluon.jit
def _fetch(desc, at, full, empty, ring, place, phase):
    """A tile into a place of a ring, when all are through with what was there."""
    mbarrier.wait(empty.index(place), phase ^ 1)
    mbarrier.expect(full.index(place), desc.block_type.nbytes)
    tma_load(desc, at, full.index(place), ring.index(place))


@gluon.jit
def _produce_tile(step, round, n, done, q_desc, k_desc, v_desc, where, rings, how):
    """Tell the consumers, and fetch what they need; n and `done` count tiles of keys and rows."""
    is_there, head, batch, first, rows, keys, off, first_row, first_key = _tile(step, where, how)
    _tell(rings, round, is_there, first, head, batch, rows, keys, off, first_row, how)
    if is_there:
        bottom, top, _, _ = _span(first, keys, off, where, how, how.WORKERS * SHARE)
        row, key_head = first_row + first, head // where.group
        for tile in range(top - bottom):
            slot, parity = n % how.STAGES, n // how.STAGES & 1
            at = [batch, key_head, first_key + (top - 1 - tile) * how.KEYS, 0]
            _fetch(k_desc, at, rings.k_full, rings.k_empty, rings.k, slot, parity)
            if tile == 0:
                for w in gl.static_range(how.WORKERS):
                    of_worker = [batch, head, row + w * SHARE, 0]
                    at_q, round_q = done % how.QUEUE * how.WORKERS + w, done // how.QUEUE & 1
                    _fetch(q_desc, of_worker, rings.q_full, rings.q_empty, rings.q, at_q, round_q)
            _fetch(v_desc, at, rings.v_full, rings.v_empty, rings.v, slot, parity)
            n += 1
        done += 1
    return n, done


@gluon.jit
def _produce(q_desc, k_desc, v_desc, counter_ptr, where, rings, how):
    n = 0
    done = 0
    if how.ORDER == "queue":
        round = 0
        tile = gl.program_id(0)
        while tile < where.blocks * where.lines:
            # before the fetches: the answer takes long. An order of memory would forget the lengths
            # that L1 holds, and take longer
            following = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
            n, done = _produce_tile(tile, round, n, done, q_desc, k_desc, v_desc, where, rings, how)
            tile = following
            round += 1
        _tell(rings, round, False, 0, -1, 0, 0, 0, 0, 0, how)
    else:
        for round in range(where.rounds):
            step = round if how.ORDER == "pairs" else gl.program_id(0)
            n, done = _produce_tile(step, round, n, done, q_desc, k_desc, v_desc, where, rings, how)


# --- a consumer ----------------------------------------------------------------------------------


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
    acc, p, peak, total, shrink, q, i, n, turn, tile, keys, off, scale, bend, where, rings, how,
    WHICH: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Scores of tile n, while the values of tile n - 1 are being added."""
    _await(rings.k_full, n, how)
    _take_turn(turn, rings, how, WHICH)
    of_tile = scores(q, rings, n, how, S)
    if how.LAZY:
        acc = rescale(acc, shrink, how)
    _await(rings.v_full, n - 1, how)
    adding = add_values(p, acc, rings, n - 1, how)
    _pass_turn(rings, how, WHICH)
    UNDER_WAY: gl.constexpr = 1 if how.REST_OF_VALUES == 0 else 2
    s = warpgroup_mma_wait(UNDER_WAY, deps=(of_tile,))
    _free(rings.k_empty, n, how)
    s = logits(s, scale, bend, how)
    if MASKED:
        s = mask(s, i, tile, keys, off, where, how)
    p, peak, total, shrink = softmax(s, peak, total, scale, how)
    acc = added(adding, how)
    _free(rings.v_empty, n - 1, how)
    if not how.LAZY:
        acc = rescale(acc, shrink, how)
    return acc, p, peak, total, shrink


@gluon.jit
def _clean(rings, n, cleaned, tile, keys, how, WHICH: gl.constexpr):
    """Zeros for the values of no key in tile n: what stands there may be NaN, and 0 NaN is NaN.

    Each of the two consumers does half of the tile, and waits for the other.
    """
    HALF: gl.constexpr = how.KEYS // 2
    FIRST: gl.constexpr = WHICH * HALF
    COLUMNS: gl.constexpr = rings.v.shape[4]
    LANES: gl.constexpr = min(COLUMNS // 8, 32)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    gl.static_assert(how.WORKERS == 2)
    _await(rings.v_full, n, how)
    v = rings.v.index(n % how.STAGES).reshape([how.KEYS, COLUMNS]).slice(FIRST, HALF)
    j = tile * how.KEYS + FIRST + gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    zero = gl.zeros([HALF, COLUMNS], v.dtype, WIDE)
    v.store(gl.where((j < keys)[:, None], v.load(WIDE), zero))
    fence_async_shared()
    mbarrier.arrive(rings.clean.index(0), count=1)
    mbarrier.wait(rings.clean.index(0), cleaned & 1)


@gluon.jit
def _store(
    acc, peak, total, i, head, batch, first, rows, first_row, results, rings, where, how,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Rows and their lse. TMA stops at the end of the tensor; where rows of another sequence
    follow, the last ones are stored one by one."""
    PACKED: gl.constexpr = where.cu_q_ptr is not None
    nothing = total == 0.0  # no key was seen: the row is 0 and its lse -inf
    lse = gl.where(nothing, MINUS_INF, (peak + gl.log2(total)) * LN_2)
    line = head if PACKED else batch * where.heads + head
    of_line = results.lse_ptr + line.to(gl.int64) * results.lse_h
    gl.store(of_line + (first_row + i), lse, mask=i < rows)
    factor = gl.where(nothing, 0.0, 1.0 / total)
    tma_store_wait(0)  # what was stored before has been read
    o = rings.o.index(WHICH)
    out = o.reshape([SHARE, o.shape[3]])
    if how.REST_OF_VALUES == 0:
        _keep(acc[0], factor, out)
    else:
        HALF: gl.constexpr = o.shape[3] // 2
        _keep(acc[0], factor, out.slice(0, HALF, 1))
        _keep(acc[1], factor, out.slice(HALF, how.REST_OF_VALUES, 1))
    fence_async_shared()
    if PACKED:
        if first + SHARE <= rows:
            tma_store(results.o_desc, [batch, head, first_row + first, 0], o)
        else:
            _store_rows(o, first, rows, first_row, head, results)
    else:
        tma_store(results.o_desc, [batch, head, first, 0], o)
    if not how.OWN:
        tma_store_wait(0)


@gluon.jit
def _keep(acc, factor, out):
    """Sums, divided, in shared memory."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    out.store((acc * factor).to(out.dtype))


@gluon.jit
def _store_rows(o, first, rows, first_row, head, results):
    """Of a tile, those that a sequence has."""
    COLUMNS: gl.constexpr = o.shape[3]
    PART: gl.constexpr = 16
    LANES: gl.constexpr = min(COLUMNS // 8, 32)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))[None, :]
    # multiples of 8, as TMA wants them, and as the compiler is to know: it stores 16 bytes then
    columns = results.o_desc.shape[3] // 8 * 8
    o_h, o_t = results.o_h // 8 * 8, results.o_t // 8 * 8
    o_ptr = results.o_ptr + head.to(gl.int64) * o_h
    for part in gl.static_range(SHARE // PART):
        row = first + part * PART + gl.arange(0, PART, gl.SliceLayout(1, WIDE))[:, None]
        inside = (row < rows) & (column < columns)
        at = o_ptr + (first_row + row).to(gl.int64) * o_t + column
        tile = o.reshape([SHARE, COLUMNS]).slice(part * PART, PART).load(WIDE)
        gl.store(at, tile, mask=inside)


@gluon.jit
def _consume_tile(
    first, head, batch, rows, keys, off, first_row, n, done, turn, cleaned, results, sinks_ptr,
    scale, bend, where, rings, how, WHICH: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of a tile; n, `done`, `turn` and `cleaned` count tiles of keys, of rows,
    turns, and tiles that were cleaned."""
    COLUMNS: gl.constexpr = rings.k.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.KEYS, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    MASKED: gl.constexpr = how.LEFT or how.RIGHT or how.TAIL
    all_bottom, all_top, cut_left, cut_right = _span(
        first, keys, off, where, how, how.WORKERS * SHARE
    )
    first += WHICH * SHARE
    i = first + gl.arange(0, SHARE, OF_ROWS)
    bottom, top = all_bottom, all_top
    if MASKED:  # its own rows may see less than the block's
        bottom, top, cut_left, cut_right = _span(first, keys, off, where, how, SHARE)
        bottom = gl.minimum(bottom, all_top - 1)
        top = gl.minimum(top, all_top)
    if how.RAGGED:  # noqa: SIM102
        if all_top * how.KEYS > keys:  # known when a kernel runs, not when it is compiled
            _clean(rings, n, cleaned, all_top - 1, keys, how, WHICH)
            cleaned += 1
    for _ in range(all_top - top):
        _pass_tile(n, turn, rings, how, WHICH)
        n += 1
        turn += 1

    if sinks_ptr is not None:  # a key without a value, taken first
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        peak = gl.zeros([SHARE, 4], gl.float32, OF_LANES) + sink
        lane = gl.arange(0, 4, gl.SliceLayout(0, OF_LANES))[None, :]
        total = gl.where(lane + gl.zeros_like(peak) == 0.0, 1.0, 0.0)  # of one lane
    else:
        peak = gl.full([SHARE, 4], MINUS_INF, gl.float32, OF_LANES)
        total = gl.zeros([SHARE, 4], gl.float32, OF_LANES)

    at_q = done % how.QUEUE * how.WORKERS + WHICH
    q = rings.q.index(at_q).reshape([SHARE, COLUMNS])
    mbarrier.wait(rings.q_full.index(at_q), done // how.QUEUE & 1)
    _await(rings.k_full, n, how)
    s = warpgroup_mma_wait(0, deps=(scores(q, rings, n, how, S),))
    _free(rings.k_empty, n, how)
    s = logits(s, scale, bend, how)
    if MASKED:
        s = mask(s, i, top - 1, keys, off, where, how)
    p, peak, total, shrink = softmax(s, peak, total, scale, how)
    acc = no_values(rings, how)
    n += 1

    whole = gl.maximum(top - gl.maximum(cut_right, 1), bottom) if MASKED else top - 1
    rest = gl.minimum(bottom + cut_left, whole) if how.LEFT else bottom
    if MASKED:
        for back in range(top - 1 - whole):
            acc, p, peak, total, shrink = _advance(
                acc, p, peak, total, shrink, q, i, n, turn, top - 2 - back, keys, off, scale,
                bend, where, rings, how, WHICH, True, S,
            )  # fmt: skip
            n += 1
            turn += 1
    for _ in range(whole - rest):
        acc, p, peak, total, shrink = _advance(
            acc, p, peak, total, shrink, q, i, n, turn, 0, keys, off, scale, bend, where, rings,
            how, WHICH, False, S,
        )  # fmt: skip
        n += 1
        turn += 1
    if how.LEFT:
        for back in range(rest - bottom):
            acc, p, peak, total, shrink = _advance(
                acc, p, peak, total, shrink, q, i, n, turn, rest - 1 - back, keys, off, scale,
                bend, where, rings, how, WHICH, True, S,
            )  # fmt: skip
            n += 1
            turn += 1

    if how.OWN:  # the next queries may come
        mbarrier.arrive(rings.q_empty.index(at_q), count=1)
    if how.LAZY:
        acc = rescale(acc, shrink, how)
    _await(rings.v_full, n - 1, how)
    acc = added(add_values(p, acc, rings, n - 1, how), how)
    _free(rings.v_empty, n - 1, how)
    if how.LEFT:
        for _ in range(bottom - all_bottom):
            _pass_tile(n, turn, rings, how, WHICH)
            n += 1
            turn += 1
    peak = gl.convert_layout(gl.max(peak, 1), OF_ROWS)
    total = gl.convert_layout(gl.sum(total, 1), OF_ROWS)
    _store(
        acc, peak, total, i, head, batch, first, rows, first_row, results, rings, where, how, WHICH
    )
    if not how.OWN:
        mbarrier.arrive(rings.q_empty.index(at_q), count=1)
    return n, turn, cleaned


@gluon.jit
def _consume(WHICH: gl.constexpr, results, sinks_ptr, scale, bend, where, rings, how):
    n = 0
    done = 0
    turn = 0
    cleaned = 0
    if how.ORDER == "queue":
        round = 0
        first, head, batch, rows, keys, off, first_row = _told(rings, 0, where, how)
        while head >= 0:
            if first >= 0:
                n, turn, cleaned = _consume_tile(
                    first, head, batch, rows, keys, off, first_row, n, done, turn, cleaned,
                    results, sinks_ptr, scale, bend, where, rings, how, WHICH,
                )  # fmt: skip
                done += 1
            round += 1
            first, head, batch, rows, keys, off, first_row = _told(rings, round, where, how)
    else:
        for round in range(where.rounds):
            first, head, batch, rows, keys, off, first_row = _told(rings, round, where, how)
            if first >= 0:
                n, turn, cleaned = _consume_tile(
                    first, head, batch, rows, keys, off, first_row, n, done, turn, cleaned,
                    results, sinks_ptr, scale, bend, where, rings, how, WHICH,
                )  # fmt: skip
                done += 1
    tma_store_wait(0)


# --- the block -----------------------------------------------------------------------------------


SIZES = ["rounds", "blocks", "heads", "lines", "together", "sequences", "group", "rows", "keys"]
SIZES += ["left", "right", "off", "bottom_right", "o_t", "o_h", "lse_h"]


@gluon.jit(do_not_specialize=SIZES)
def _attend_on_hopper(
    o_desc, o_ptr, lse_ptr, q_desc, k_desc, v_desc, sinks_ptr, cu_q_ptr, cu_k_ptr, key_counts_ptr,
    counter_ptr, rounds, blocks, heads, lines, together, sequences, group, rows, keys, left, right,
    off, bottom_right, o_t, o_h, lse_h, scale, bend,
    WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    TAIL: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr, SCALED: gl.constexpr,
    TURNS: gl.constexpr, LAZY: gl.constexpr, OWN: gl.constexpr, QUEUE: gl.constexpr,
    ORDER: gl.constexpr, REST: gl.constexpr, REST_OF_VALUES: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = q_desc.block_type.shape[3]
    VALUE_COLUMNS: gl.constexpr = v_desc.block_type.shape[3]
    PACKED: gl.constexpr = cu_q_ptr is not None
    DTYPE: gl.constexpr = q_desc.dtype
    how = How(
        WORKERS, KEYS, STAGES, LEFT, RIGHT, TAIL, RAGGED, SOFTCAP, SCALED, TURNS, LAZY,
        OWN, QUEUE, ORDER, DTYPE, REST, REST_OF_VALUES,
    )  # fmt: skip
    # what is known already takes no register
    where = Where(
        rounds, blocks, heads, lines, 1 if ORDER == "pairs" else together,
        sequences if PACKED else 0, group,
        rows, keys, left if LEFT else -1, right if RIGHT else -1,
        off if (LEFT or RIGHT) and not RAGGED else 0,
        bottom_right if (LEFT or RIGHT) and RAGGED else 0, cu_q_ptr, cu_k_ptr, key_counts_ptr,
    )  # fmt: skip
    QUERIES: gl.constexpr = QUEUE * WORKERS
    q = gl.allocate_shared_memory(DTYPE, [QUERIES, 1, 1, SHARE, COLUMNS], q_desc.layout)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, COLUMNS], k_desc.layout)
    v = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, VALUE_COLUMNS], v_desc.layout)
    if OWN:
        o = gl.allocate_shared_memory(DTYPE, [WORKERS, 1, 1, SHARE, VALUE_COLUMNS], o_desc.layout)
    else:
        o = q
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    news = gl.allocate_shared_memory(gl.int32, [16, 1], PLAIN)
    rings = Rings(
        q, k, v, o, _barriers(QUERIES, 1), _barriers(QUERIES, 1), _barriers(STAGES, 1),
        _barriers(STAGES, WORKERS), _barriers(STAGES, 1), _barriers(STAGES, WORKERS), news,
        _barriers(2, 1), _barriers(2, WORKERS), _barriers(WORKERS, 1), _barriers(1, 2),
    )  # fmt: skip
    if PACKED:
        results = Results(o_desc, o_ptr, o_t, o_h, lse_ptr, lse_h)
    else:
        results = Results(o_desc, None, 0, 0, lse_ptr, lse_h)
    # constants of the arguments stay constants only in a tuple that has no name
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, results, sinks_ptr, scale, bend, where, rings, how)),
                (_consume, (1, results, sinks_ptr, scale, bend, where, rings, how)),
                (_produce, (q_desc, k_desc, v_desc, counter_ptr, where, rings, how)),
            ],
            [4, 1],
            [REGISTERS, FEW_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, results, sinks_ptr, scale, bend, where, rings, how)),
                (_consume, (1, results, sinks_ptr, scale, bend, where, rings, how)),
                (_consume, (2, results, sinks_ptr, scale, bend, where, rings, how)),
                (_produce, (q_desc, k_desc, v_desc, counter_ptr, where, rings, how)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FEW_REGISTERS],
        )
