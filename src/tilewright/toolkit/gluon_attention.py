"""Elementwise steps of attention in Gluon, in PTX where the compiler does worse: for Hopper.

What a thread holds of a tile of scores: two rows, 8 apart, and of each two columns in 8, from
column 2 (lane % 4) on; its registers go through both columns, both rows, then on by 8 columns.
"""

import struct

from tilewright.toolkit.gluon_compat import gl, gluon


@gluon.jit
def exp2(x):
    """Numbers below 2^-126 are 0: telling them apart would take two more instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


def _in_place(count: int, *others: str) -> str:
    """Constraints of PTX that changes numbers where they are, and of what else it reads. Were they
    other registers, ptxas would copy a whole accumulator in each step, and spill."""
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + [kind for kind in others for _ in range(count)])


def _bits(x: float) -> str:
    """A constant of PTX."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


# tanh(x) / x as polynomials in x^2, highest coefficient first: up to 0.22 with an error of tanh
# below 2^-23, and Cephes' up to 0.62
NEAR, FAR = 0.22, 0.62
TANH_NEAR = (1.297774463891983e-1, -3.332805335521698e-1)
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def _capped(count: int) -> tuple[str, str]:
    """PTX for tanh(k s) / k of numbers s: near 0 a polynomial, 1 - 2 / (exp(2 k s) + 1) elsewhere.

    The quotient is right to 3 units of 2^-23 and no more, which a large cap multiplies. What the
    largest number of a warp does not need is not computed: with caps that seldom act, k is left out
    of the numbers and joins the coefficients.
    """
    pairs = [(count + i, i) for i in range(count)]
    code = "{ .reg .pred p, all; .reg .f32 most, k, kk, a, b, x, y, z, e; "
    code += f"mov.f32 most, 0f00000000; mov.f32 k, ${2 * count}; "
    for s, _ in pairs:
        code += f"abs.f32 x, ${s}; max.f32 most, most, x; "
    code += "mul.f32 most, most, k; abs.f32 most, most; abs.f32 kk, k; "
    code += f"setp.lt.f32 p, kk, {_bits(2.0**30)}; "  # its fourth power is a normal number
    code += f"setp.gt.and.f32 p, kk, {_bits(2.0**-30)}, p; "
    code += f"setp.lt.and.f32 p, most, {_bits(NEAR)}, p; vote.sync.all.pred all, p, 0xffffffff; "
    code += "@!all bra BEYOND; mul.f32 kk, k, k; "
    code += f"mul.f32 b, kk, {_bits(TANH_NEAR[1])}; mul.f32 a, kk, {_bits(TANH_NEAR[0])}; "
    code += "mul.f32 a, a, kk; "
    for s, out in pairs:
        code += f"mul.f32 z, ${s}, ${s}; fma.rn.f32 y, z, a, b; fma.rn.f32 y, y, z, 0f3F800000; "
        code += f"mul.f32 ${out}, y, ${s}; "
    first, second, *others = map(_bits, TANH)
    polynomial = f"mul.f32 z, x, x; fma.rn.f32 y, z, {first}, {second}; "
    polynomial += "".join(f"fma.rn.f32 y, y, z, {c}; " for c in others) + "mul.f32 y, y, z; "
    code += f"bra DONE; BEYOND: setp.lt.f32 p, most, {_bits(FAR)}; "
    code += "vote.sync.all.pred all, p, 0xffffffff; @!all bra FAR; "
    for s, out in pairs:
        code += f"mul.f32 x, ${s}, k; {polynomial} fma.rn.f32 ${out}, y, ${s}, ${s}; "
    code += "bra DONE; FAR: rcp.approx.ftz.f32 kk, k; neg.f32 e, kk; "  # mended: 1 / k
    code += "fma.rn.f32 e, e, k, 0f3F800000; fma.rn.f32 kk, e, kk, kk; "
    for s, out in pairs:
        code += f"mul.f32 x, ${s}, k; {polynomial} fma.rn.f32 y, y, ${s}, ${s}; "
        code += "mul.f32 e, x, 0f4038AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        code += "rcp.approx.ftz.f32 e, e; fma.rn.f32 e, e, 0fC0000000, 0f3F800000; "
        code += "mul.f32 e, e, kk; abs.f32 x, x; "
        code += f"setp.lt.f32 p, x, {_bits(FAR)}; selp.f32 ${out}, y, e, p; "
    return code + "DONE: }", _in_place(count, "f")


_CAPPED, _OF_CAPPED = map(gl.constexpr, _capped(32))


@gluon.jit
def capped(s, k):
    """tanh(k s) / k: scores that a cap bends, in the units they were in; k is a number."""
    _, k = gl.broadcast(s, gl.full([1, 1], 0.0, gl.float32, s.type.layout) + k)
    return gl.inline_asm_elementwise(_CAPPED, _OF_CAPPED, [s, k], gl.float32, is_pure=True, pack=32)


def _unless_all_are_one(count: int) -> tuple[str, str]:
    """PTX that multiplies numbers of two rows by factors, unless those of the whole warp are 1."""
    factor = 2 * count
    code = "{ .reg .pred one, all; "
    code += f"setp.eq.f32 one, ${factor}, 0f3F800000; "
    code += f"setp.eq.and.f32 one, ${factor + 2}, 0f3F800000, one; "
    code += "vote.sync.all.pred all, one, 0xffffffff; @all bra DONE; "
    code += "".join(f"mul.f32 ${i}, ${i}, ${factor + i}; " for i in range(count))
    return code + "DONE: }", _in_place(count, "f")


_SCALE, _OF_SCALE = map(gl.constexpr, _unless_all_are_one(32))


@gluon.jit
def scale_unless_one(acc, factor):
    """acc * factor, of which a warp does nothing while all its factors are 1; both as `by_lane` has
    them: a thread's registers are two of a row, two of the other, and so on."""
    acc, factor = gl.broadcast(acc, factor)
    return gl.inline_asm_elementwise(
        _SCALE, _OF_SCALE, [acc, factor], gl.float32, is_pure=True, pack=32
    )


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
    return code + "}", _in_place(count, *["r"] * len(rest))


_UP_TO_32, _UP_TO_64, _BETWEEN_32, _BETWEEN_64 = (
    gl.constexpr(_within(count, left)) for left in (False, True) for count in (32, 64)
)


@gluon.jit
def up_to(s, last):
    """Scores up to column `last` of a row, [ROWS]; -inf beyond."""
    COUNT: gl.constexpr = s.shape[1] // 2
    CODE: gl.constexpr = _UP_TO_32 if COUNT == 32 else _UP_TO_64
    s, last = gl.broadcast(s, last[:, None])
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [s, last], gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def between(s, begin, last):
    """Scores from column `begin` to `last` of a row, [ROWS]; -inf elsewhere."""
    COUNT: gl.constexpr = s.shape[1] // 2
    CODE: gl.constexpr = _BETWEEN_32 if COUNT == 32 else _BETWEEN_64
    s, last = gl.broadcast(s, last[:, None])
    s, begin = gl.broadcast(s, begin[:, None])
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [s, last, begin], gl.float32, is_pure=True, pack=COUNT
    )


def _follow(lazy: bool) -> tuple[str, str]:
    """PTX for the new peaks of two rows, of the old ones and the highest scores of a lane.

    The four lanes of a row must agree. Lazily they ask each other only if one lane of the warp has
    a score that is 8 above its row's peak.
    """
    code = "{ .reg .f32 high, other; "
    if lazy:
        code += ".reg .pred p, any; .reg .f32 limit; mov.f32 $0, $4; mov.f32 $1, $5; "
        code += "add.f32 limit, $4, 0f41000000; setp.gt.f32 p, $2, limit; "
        code += "add.f32 limit, $5, 0f41000000; setp.gt.or.f32 p, $3, limit, p; "
        code += "vote.sync.any.pred any, p, 0xffffffff; @!any bra DONE; "
    for row in range(2):
        code += f"mov.f32 high, ${2 + row}; "
        for lanes in (1, 2):
            code += f"shfl.sync.bfly.b32 other, high, {lanes}, 0x1f, 0xffffffff; "
            code += "max.f32 high, high, other; "
        if lazy:
            code += f"add.f32 limit, ${4 + row}, 0f41000000; setp.gt.f32 p, high, limit; "
            code += f"selp.f32 ${row}, high, ${4 + row}, p; "
        else:
            code += f"max.f32 ${row}, high, ${4 + row}; "
    return code + ("DONE: }" if lazy else "}"), ",".join(["=&f"] * 2 + ["f"] * 4)


_FOLLOW, _FOLLOW_LAZILY = (gl.constexpr(_follow(lazy)) for lazy in (False, True))


@gluon.jit
def follow(peak, high, LAZY: gl.constexpr):
    """The new peaks of rows; all [ROWS, 4], as `by_lane` has them."""
    CODE: gl.constexpr = _FOLLOW_LAZILY if LAZY else _FOLLOW
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [high, peak], gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def by_lane(x):
    """[ROWS, COLUMNS] as [ROWS, COLUMNS // 8, 4, 2], the third dim the four lanes of a row: what is
    summed over the others stays in a thread."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def to_pairs(x, DTYPE: gl.constexpr):
    """Halves of [..., 2] float32, two in an int32: halves that go round several loops would be
    taken apart and put together again in each."""
    low, high = gl.split(x)
    CODE: gl.constexpr = "cvt.rn.bf16x2.f32" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        CODE + " $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def from_pairs(x, DTYPE: gl.constexpr):
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).to(DTYPE, bitcast=True)
