"""@gluon.jit helpers that more than one op's kernels use."""

from tilewright.toolkit.gluon_compat import gl, gluon, mbarrier


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(barriers.index(place), count=ARRIVALS)
    return barriers
