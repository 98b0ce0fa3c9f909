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


def _tanh_of(count: int) -> tuple[str, str]:
    """PTX for tanh of numbers: Cephes' polynomial near 0, 1 - 2 / (exp(2x) + 1) elsewhere.

    The quotient is right to 2^-23 and no more, which a large cap multiplies. If no number of the
    warp is beyond 0.62, as with caps that seldom act, the polynomial is all there is to compute.
    """
    inputs = range(count, 2 * count)
    odd = [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1]
    bits = [struct.unpack("<I", struct.pack("<f", c))[0] for c in (*odd, -3.33332819422e-1)]
    first, *rest = (f"0f{b:08X}" for b in bits)
    code = "{ .reg .pred p, near; .reg .f32 most, x, z, y, e; mov.f32 most, 0f00000000; "
    for i in inputs:
        code += f"abs.f32 x, ${i}; max.f32 most, most, x; "
    code += "setp.lt.f32 p, most, 0f3F1EB852; vote.sync.all.pred near, p, 0xffffffff; "
    for i in inputs:
        code += f"mul.f32 z, ${i}, ${i}; fma.rn.f32 y, z, {first}, {rest[0]}; "
        code += "".join(f"fma.rn.f32 y, y, z, {c}; " for c in rest[1:])
        code += f"mul.f32 y, y, z; fma.rn.f32 ${i - count}, y, ${i}, ${i}; "
    code += "@near bra DONE; "
    for i in inputs:
        code += f"mul.f32 e, ${i}, 0f4038AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        code += "rcp.approx.ftz.f32 e, e; fma.rn.f32 e, e, 0fC0000000, 0f3F800000; "
        code += f"abs.f32 x, ${i}; setp.lt.f32 p, x, 0f3F1EB852; "
        code += f"selp.f32 ${i - count}, ${i - count}, e, p; "
    return code + "DONE: }", ",".join(["=&f"] * count + ["f"] * count)


_TANH, _OF_TANH = map(gl.constexpr, _tanh_of(32))


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise(_TANH, _OF_TANH, [x], gl.float32, is_pure=True, pack=32)


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


_SCALE, _OF_SCALE = map(gl.constexpr, _unless_all_are_one(32))


@gluon.jit
def scale_unless_one(acc, factor):
    """acc * factor, [ROWS, COLUMNS] and [ROWS, 1]; nothing is done while all factors are 1."""
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
    return code + "}", ",".join(["=&f"] * count + ["f"] * count + ["r"] * count * len(rest))


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
