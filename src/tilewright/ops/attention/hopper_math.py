"""What a consumer of `hopper_kernels` computes of a tile: scores, masks, softmax, sums of values.

Heads whose width is little more than half of a tile's are multiplied in two parts, half a tile and
REST columns: their sums are a tuple of two, those of others a tuple of one.
"""

from tilewright.toolkit.gluon_attention import (
    between,
    by_lane,
    capped,
    exp2,
    follow,
    from_pairs,
    scale_unless_one,
    to_pairs,
    up_to,
)
from tilewright.toolkit.gluon_compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait

LOG2_E = gl.constexpr(1.4426950408889634)
MINUS_INF = gl.constexpr(float("-inf"))
SHARE = gl.constexpr(64)  # rows of a consumer: a product of the tensor cores has 64
# of [SHARE, 4]: a thread has two rows, 8 apart, of one of the four lanes that hold them
OF_LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)


# --- scores and weights --------------------------------------------------------------------------


@gluon.jit
def logits(s, scale, bend, how):
    """Before a mask makes some -inf; where the scale is a plain one, it is left to `softmax`.

    `bend` is scale / softcap.
    """
    if how.SOFTCAP:
        s = capped(s, bend)
    if how.SCALED:  # a scale that turns scores round, or makes them 0
        s = s * (scale * LOG2_E)
    return s


@gluon.jit
def mask(s, i, tile, keys, off, where, how):
    """-inf for keys that a row does not see, or that there are not."""
    start = tile * how.KEYS
    last = gl.zeros_like(i) + (keys - 1 - start)
    if how.RIGHT:
        last = gl.minimum(last, i + (off + where.right - start))
    return between(s, i + (off - where.left - start), last) if how.LEFT else up_to(s, last)


@gluon.jit
def softmax(s, peak, total, scale, how):
    """(weights in pairs, peak, total, factor of what was summed before) with the scores s.

    All but s is in units of log 2. Four lanes hold a row: `total` is a lane's own, `peak` the same
    in all, both [SHARE, 4]. With LAZY the peak follows only scores that are 8 above it: weights up
    to 2^8 do no harm, and most factors are 1.
    """
    of_lanes = by_lane(s)
    high = gl.convert_layout(gl.max(gl.max(of_lanes, 3), 1), OF_LANES, assert_trivial=True)
    if not how.SCALED:
        high = high * (scale * LOG2_E)
    new_peak = follow(peak, high, how.LAZY)
    shift = gl.where(new_peak == MINUS_INF, 0.0, new_peak)  # a row that has seen no key yet
    base = _to_lanes(shift, of_lanes)
    scaled = of_lanes if how.SCALED else of_lanes * (scale * LOG2_E)
    p = exp2(scaled - base)  # product and difference are one instruction
    shrink = exp2(peak - shift)
    of_tile = gl.convert_layout(gl.sum(gl.sum(p, 3), 1), OF_LANES, assert_trivial=True)
    return to_pairs(p, how.DTYPE), new_peak, total * shrink + of_tile, shrink


@gluon.jit
def _to_lanes(x, like):
    """[SHARE, 4] as [SHARE, 1, 4, 1] beside `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None, :, None]


# --- products ------------------------------------------------------------------------------------


@gluon.jit
def scores(q, rings, n, how, S: gl.constexpr):
    """q k^T of tile n, under way."""
    k = rings.k.index(n % how.STAGES).reshape([how.KEYS, rings.k.shape[4]])
    s = gl.zeros([SHARE, how.KEYS], gl.float32, S)
    if how.REST == 0:
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = q.shape[1] // 2
        of_half = k.slice(0, HALF, 1).permute((1, 0))
        s = warpgroup_mma(q.slice(0, HALF, 1), of_half, s, use_acc=False, is_async=True)
        of_rest = k.slice(HALF, how.REST, 1).permute((1, 0))
        s = warpgroup_mma(q.slice(HALF, how.REST, 1), of_rest, s, is_async=True)
    return s


@gluon.jit
def no_values(rings, how):
    """Sums of nothing: a tile, or those of half of the columns and of the rest."""
    COLUMNS: gl.constexpr = rings.v.shape[4]
    if how.REST_OF_VALUES == 0:
        acc = (_no_values_of(COLUMNS),)
    else:
        acc = (_no_values_of(COLUMNS // 2), _no_values_of(how.REST_OF_VALUES))
    return acc


@gluon.jit
def _no_values_of(COLUMNS: gl.constexpr):
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([SHARE, COLUMNS], gl.float32, OUT)


@gluon.jit
def add_values(p, acc, rings, n, how):
    """acc + p v of tile n, under way."""
    v = rings.v.index(n % how.STAGES).reshape([how.KEYS, rings.v.shape[4]])
    if how.REST_OF_VALUES == 0:
        adding = (_add_values_of(p, v, acc[0], how),)
    else:
        HALF: gl.constexpr = v.shape[1] // 2
        of_rest = v.slice(HALF, how.REST_OF_VALUES, 1)
        adding = (
            _add_values_of(p, v.slice(0, HALF, 1), acc[0], how),
            _add_values_of(p, of_rest, acc[1], how),
        )
    return adding


@gluon.jit
def _add_values_of(p, v, acc, how):
    P: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    p = from_pairs(p, how.DTYPE).reshape([SHARE, how.KEYS])
    p = gl.convert_layout(p, P, assert_trivial=True)  # as scores lie
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def added(adding, how):
    """The sums, when they are ready."""
    if how.REST_OF_VALUES == 0:
        acc = (warpgroup_mma_wait(0, deps=adding),)
    else:
        acc = warpgroup_mma_wait(0, deps=adding)
    return acc


@gluon.jit
def rescale(acc, shrink, how):
    """All sums of a row by the same factor."""
    if how.REST_OF_VALUES == 0:
        scaled = (_rescale_part(acc[0], shrink, how),)
    else:
        scaled = (_rescale_part(acc[0], shrink, how), _rescale_part(acc[1], shrink, how))
    return scaled


@gluon.jit
def _rescale_part(acc, shrink, how):
    of_lanes = by_lane(acc)
    factor = _to_lanes(shrink, of_lanes)
    scaled = scale_unless_one(of_lanes, factor) if how.LAZY else of_lanes * factor
    return gl.convert_layout(scaled.reshape(acc.shape), acc.type.layout, assert_trivial=True)
