"""Bugs that were planted on purpose: each must make `tilewright verify` fail on a CPU.

A harness that passes everything passes bugs too. Each entry is one mistake that somebody could make
(most of them somebody has made, in another library), as a replacement in one file of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

RELU = "ops/relu/triton_impl.py"
SOFTMAX = "ops/softmax/triton_impl.py"
RMS_NORM = "ops/rms_norm/triton_impl.py"
LAYER_NORM = "ops/layer_norm/triton_impl.py"
RMS_NORM_FP8 = "ops/rms_norm_fp8/triton_impl.py"
RMS_NORM_SWIGLU = "ops/rms_norm_swiglu/triton_impl.py"
ROPE = "ops/rope/triton_impl.py"
LAYER_NORM_FP8 = "ops/layer_norm_fp8/triton_impl.py"
FP8 = "toolkit/triton_fp8.py"
PARTIALS = "toolkit/partials.py"
TRITON_LIB = "toolkit/triton_lib.py"
ROWS = "toolkit/rows.py"
STATISTICS = "toolkit/statistics.py"
GATED = "toolkit/triton_gated.py"
GATED_ROWS = "toolkit/gated_rows.py"
ROTARY = "toolkit/rotary.py"
ATTENTION = "ops/attention/triton_impl.py"
ATTENTION_BACKWARD = "ops/attention/backward_kernels.py"
ATTENTION_NAIVE = "ops/attention/naive_impl.py"
ATTENTION_TILES = "toolkit/triton_attention.py"
MATMUL = "ops/matmul/triton_impl.py"
MATMUL_CALL = "toolkit/matmul_call.py"
MATMUL_SKINNY = "ops/matmul/skinny_impl.py"


@dataclass(frozen=True)
class Checks:
    """What `verify` is asked to run."""

    op: str
    only: tuple[str, ...]
    cases: int = 1  # of the seeded checks
    seed: int = 0
    case: str = ""  # the edge case that shows the bug, so that the others need not run

    @property
    def words(self) -> list[str]:
        only = [word for name in self.only for word in ("--only", name)]
        only += ["--case", self.case] if self.case else []
        return [self.op, *only, "--cases", str(self.cases), "--seed", str(self.seed)]

    def __str__(self) -> str:
        return " ".join(self.words).replace("--", "")


@dataclass(frozen=True)
class Planted:
    name: str
    checks: Checks
    file: str  # under src/tilewright
    find: str
    replace: str
    times: int = 1  # how often `find` occurs; all are replaced


def edge(op: str, case: str) -> Checks:
    return Checks(op, ("cases",), case=case)


RELU_RANDOM = Checks("relu", ("random",), 8)
SOFTMAX_RANDOM = Checks("softmax", ("random",), 20)
NORM_RANDOM = Checks("rms_norm", ("random",), 12)
NORM_CASTS = Checks("rms_norm", ("random",), 40)  # float16 with casting="llama" among them
ADD_RANDOM = Checks("add_rms_norm", ("random",), 8)
LAYER_RANDOM = Checks("layer_norm", ("random",), 24)  # far means among them, also in the loop
NORM_SWIGLU_RANDOM = Checks("rms_norm_swiglu", ("random",), 12)
FP8_RANDOM = Checks("rms_norm_fp8", ("random",), 24)
FP8_BITS = Checks("rms_norm_fp8", ("bits",))
LAYER_FP8_RANDOM = Checks("layer_norm_fp8", ("random",), 24)
ROPE_RANDOM = Checks("rope", ("random",), 12)
SWIGLU_RANDOM = Checks("swiglu", ("random",), 12)
SWIGLU_PACKED_RANDOM = Checks("swiglu_packed", ("random",), 12)
GEGLU_RANDOM = Checks("geglu", ("random",), 12)
GEGLU_PACKED_RANDOM = Checks("geglu_packed", ("random",), 12)
ATTENTION_RANDOM = Checks("attention", ("random",), 2)
MATMUL_RANDOM = Checks("matmul", ("random",), 6)

PLANTED = (
    # --- relu -----------------------------------------------------------------------------------
    Planted(
        "a tile stores one column too many", RELU_RANDOM, TRITON_LIB,
        "(row < row_count) & (column < n)", "(row < row_count) & (column <= n)",
    ),
    Planted(
        "a tile stores one row too many", RELU_RANDOM, TRITON_LIB,
        "(row < row_count) & (column < n)", "(row <= row_count) & (column < n)",
    ),
    Planted(
        "the last column of a tile is left out", RELU_RANDOM, TRITON_LIB,
        "(row < row_count) & (column < n)", "(row < row_count) & (column < n - 1)",
    ),
    Planted(
        "the gradient passes where the output is zero", RELU_RANDOM, RELU,
        "dx = tl.where(y <= 0.0, 0.0, g)", "dx = tl.where(y < 0.0, 0.0, g)",
    ),
    Planted(
        "the input is modified", RELU_RANDOM, RELU,
        "    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)",
        "    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)\n"
        "    tl.store(x_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)",
    ),
    Planted(
        "a NaN is cleaned", Checks("relu", ("nan",)), RELU,
        "y = tl.where(x <= 0.0, 0.0, x)", "y = tl.where(x > 0.0, x, 0.0)",
    ),
    Planted(
        "infinity is clamped", Checks("relu", ("nan",)), RELU,
        "y = tl.where(x <= 0.0, 0.0, x)", "y = tl.where(x <= 0.0, 0.0, tl.where(x > 1e5, 1e5, x))",
    ),
    Planted(
        "a write in place reaches past its row", Checks("relu", ("in place",)), TRITON_LIB,
        "(row < row_count) & (column < n)", "(row < row_count) & (column <= n)",
    ),
    Planted(
        "the gradient is read with the output's strides", Checks("relu", ("layouts",)), RELU,
        "start_of(row, g_inner, g_outer_stride, g_inner_stride, VEC, LEVELS)",
        "start_of(row, inner, outer_stride, inner_stride, VEC, LEVELS)",
    ),
    Planted(
        "an overlapping tensor is written in place", Checks("relu", ("errors",)),
        "ops/relu/op.py",
        'checks.no_overlap("relu", "input", input)', "pass",
    ),
    Planted(
        "an error message lost its fix", Checks("relu", ("errors",)), "checks.py",
        'f"Convert it: {name}.float()."', '""',
    ),
    # --- softmax --------------------------------------------------------------------------------
    Planted(
        "a row reads and writes one column too many", SOFTMAX_RANDOM, SOFTMAX,
        "inside = (row < row_count)[:, None] & (column < n)",
        "inside = (row < row_count)[:, None] & (column <= n)", times=2,
    ),
    Planted(
        "no maximum is subtracted", SOFTMAX_RANDOM, SOFTMAX,
        "e = tl.exp(x - tl.max(x, 1)[:, None])", "e = tl.exp(x)",
    ),
    Planted(
        "the running sum is not rescaled", edge("softmax", "wide"), SOFTMAX,
        "s = s * tl.exp(m - shift) + ", "s = s + ",
    ),
    Planted(
        "a chunk of -inf makes a NaN", edge("softmax", "masked-columns"), SOFTMAX,
        'tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new",
    ),
    Planted(
        "the last chunk of a wide row is skipped", SOFTMAX_RANDOM, SOFTMAX,
        "y_row = y_ptr + row.to(tl.int64) * n\n    for start in range(0, n, BLOCK):",
        "y_row = y_ptr + row.to(tl.int64) * n\n    for start in range(0, n - BLOCK, BLOCK):",
    ),
    Planted(
        "the masked tail counts as zeros", SOFTMAX_RANDOM, SOFTMAX,
        'x = tl.load(x_ptr + at[:, None] + column, mask=inside, other=float("-inf"))',
        "x = tl.load(x_ptr + at[:, None] + column, mask=inside, other=0.0)",
    ),
    Planted(
        "the backward leaves out the dot product", SOFTMAX_RANDOM, SOFTMAX,
        "dx = y * (g - tl.sum(g * y, 1)[:, None])", "dx = y * g",
    ),
    Planted(
        "the gradient of a column kernel is read with the output's strides",
        Checks("softmax", ("layouts",)), SOFTMAX,
        "at * g_n_stride", "at * n_stride", times=2,
    ),
    Planted(
        "the gradient of a row kernel is read with the output's strides",
        Checks("softmax", ("layouts",)), SOFTMAX,
        "g_at = row_start(row, g_inner, g_outer_stride, g_inner_stride, VEC)",
        "g_at = row_start(row, inner, outer_stride, inner_stride, VEC)",
    ),
    Planted(
        "row offsets are 32-bit", Checks("softmax", ("offsets",)), TRITON_LIB,
        "inner).to(tl.int64)", "inner)", times=2,
    ),
    Planted(
        "column offsets are 32-bit", Checks("softmax", ("offsets",)), SOFTMAX,
        "x_slice + at.to(tl.int64) * n_stride", "x_slice + at * n_stride", times=2,
    ),
    Planted(
        "dim out of range is not refused", Checks("softmax", ("errors",)), "ops/softmax/op.py",
        "if not -input.dim() <= dim < input.dim():", "if False:",
    ),
    # --- layer_norm -----------------------------------------------------------------------------
    Planted(
        "the squares are summed before the mean is taken out", LAYER_RANDOM, STATISTICS,
        "x = tl.where(inside, x - mean_of(tl.sum(x, 1), n)[:, None], 0.0)",
        "x = tl.where(inside, x, 0.0)",
    ),
    Planted(
        "masked elements enter the variance", LAYER_RANDOM, STATISTICS,
        "x = tl.where(inside, x - mean_of(tl.sum(x, 1), n)[:, None], 0.0)",
        "x = x - mean_of(tl.sum(x, 1), n)[:, None]",
    ),
    Planted(
        "the rounding of a far mean stays in the row", LAYER_RANDOM, STATISTICS,
        "left = mean_of(tl.sum(x, 1), n)", "left = 0.0 * mean_of(tl.sum(x, 1), n)",
    ),
    Planted(
        "eps stands outside the deviation's root", LAYER_RANDOM, STATISTICS,
        "tl.rsqrt(variance + eps)", "1 / (tl.sqrt(variance) + eps)",
    ),
    Planted(
        "the first chunk's mean divides by its width", LAYER_RANDOM, STATISTICS,
        "mean_of(tl.sum(x, 0), tl.minimum(n, BLOCK))", "mean_of(tl.sum(x, 0), BLOCK)",
    ),
    Planted(
        "masked elements enter Welford's sums", edge("layer_norm", "far-mean-loop"), STATISTICS,
        "step = tl.where(inside, x - mean, 0.0)", "step = x - mean",
    ),
    Planted(
        "Welford counts one element too many", LAYER_RANDOM, STATISTICS,
        "(1.0 / seen)", "(1.0 / (seen + 1))",
    ),
    Planted(
        "lanes that end in the last chunk weigh as much as the others",
        edge("layer_norm", "far-mean-loop"), STATISTICS,
        "tl.cdiv(n - column, BLOCK)", "tl.cdiv(n - 0 * column, BLOCK)",
    ),
    Planted(
        "lanes are merged without what sets them apart", LAYER_RANDOM, STATISTICS,
        "squares + seen * apart * apart", "squares",
    ),
    Planted(
        "a bias without a weight is ignored", LAYER_RANDOM, LAYER_NORM,
        "    if b_ptr is not None:", "    if b_ptr is not None and w_ptr is not None:", times=2,
    ),
    Planted(
        "the backward leaves out the gradient's mean", LAYER_RANDOM, LAYER_NORM,
        "g - (tl.sum(g, 1) / n)[:, None] - x", "g - x",
    ),
    Planted(
        "a wide row's products are not centred", edge("layer_norm", "far-mean-loop"), LAYER_NORM,
        "(tl.sum(products, 0) / n - left * aside)", "(tl.sum(products, 0) / n)",
    ),
    Planted(
        "dB is weighed", LAYER_RANDOM, LAYER_NORM,
        "            db += g\n        if w_ptr is not None:\n"
        "            g *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)\n",
        "            pass\n        if w_ptr is not None:\n"
        "            g *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)\n"
        "        db += g\n",
    ),
    Planted(
        "a program keeps its last rows' part of dB only",
        edge("layer_norm", "many-rows"), LAYER_NORM,
        "db += g\n", "db = g\n",
    ),
    Planted(
        "a wide program keeps its last row's part of dB only",
        edge("layer_norm", "wide-walk"), LAYER_NORM,
        "db = tl.load(own, mask=at < n * later, other=0.0) + g", "db = g",
    ),
    Planted(
        "dB's partials are written over dW's", LAYER_RANDOM, LAYER_NORM,
        "own += tl.num_programs(0).to(tl.int64) * n", "own += 0", times=2,
    ),
    Planted(
        "both gradients are summed from the first's partials", LAYER_RANDOM, PARTIALS,
        "(which * count + line)", "line",
    ),
    Planted(
        "the last partial is left out", LAYER_RANDOM, PARTIALS,
        "(line < count)", "(line < count - 1)",
    ),
    Planted(
        "a row past the end brings its NaN into dW and dB",
        edge("layer_norm", "eps-zero"), LAYER_NORM,
        "rstd = tl.where(row < row_count, rstd, 0.0)[:, None]", "rstd = rstd[:, None]",
    ),
    Planted(
        "the input is read with the gradient's strides", Checks("layer_norm", ("layouts",)),
        LAYER_NORM,
        "x_at = row_start(row, x_inner, x_outer, x_step, VEC)",
        "x_at = row_start(row, g_inner, g_outer, g_step, VEC)",
    ),
    Planted(
        "dB of no rows is not zero", Checks("layer_norm", ("empty",)), LAYER_NORM,
        "torch.zeros_like(b)", "torch.empty_like(b)",
    ),
    Planted(
        "a weight and a bias of two dtypes are not refused", Checks("layer_norm", ("errors",)),
        "norms.py",
        'checks.same_dtype(op, "bias", bias, "weight", weight)', "pass",
    ),
    # --- rms_norm -------------------------------------------------------------------------------
    Planted(
        "the weight's offset is ignored", NORM_RANDOM, RMS_NORM,
        "        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32) + offset",
        "        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)",
    ),
    Planted(
        "eps stands outside the square root", NORM_RANDOM, RMS_NORM,
        "rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)  # [ROWS]",
        "rstd = 1 / (tl.sqrt(mean_of(tl.sum(x * x, 1), n)) + eps)  # [ROWS]",
    ),
    Planted(
        "every casting rounds before the weight", NORM_RANDOM, RMS_NORM,
        "if ROUND_FIRST:", "if True:", times=2,
    ),
    Planted(
        "llama's casting does not round before the weight", NORM_CASTS, RMS_NORM,
        "if ROUND_FIRST:", "if False:", times=2,
    ),
    Planted(
        "llama's casting forgets the weight's dtype", NORM_RANDOM, RMS_NORM,
        'if casting == "llama" and weight is not None:', "if False:",
    ),
    Planted(
        "the mean divides by the tile's width", NORM_RANDOM, RMS_NORM,
        "mean_of(tl.sum(x * x, 1), n)", "mean_of(tl.sum(x * x, 1), BLOCK)", times=2,
    ),
    Planted(
        "the backward leaves out the mean", NORM_RANDOM, RMS_NORM,
        "dx = rstd * (g - x * (tl.sum(g * x, 1) / n)[:, None])", "dx = rstd * g",
    ),
    Planted(
        "the backward overwrites the input it was given", NORM_RANDOM, RMS_NORM,
        "        x *= rstd\n",
        "        x *= rstd\n"
        "        tl.store(x_ptr + x_at[:, None] + column, x.to(x_ptr.dtype.element_ty), inside)\n",
    ),
    Planted(
        "only the first partial of dW is summed", NORM_RANDOM, PARTIALS,
        "(line < count)", "(line < 1)",
    ),
    Planted(
        "only the first 32 partials of dW are summed", edge("rms_norm", "many-rows"), PARTIALS,
        "for start in range(0, count, COUNT):", "for start in range(0, COUNT, COUNT):",
    ),
    Planted(
        "one partial too many is summed", NORM_RANDOM, PARTIALS,
        "(line < count)", "(line <= count)",
    ),
    Planted(
        "a program keeps its last rows' part of dW only", edge("rms_norm", "many-rows"), RMS_NORM,
        "dw += g * x", "dw = g * x",
    ),
    Planted(
        "a wide program keeps its last row's part of dW only",
        edge("rms_norm", "wide-walk"), RMS_NORM,
        "tl.load(own, mask=later, other=0.0) + g * x", "g * x",
    ),
    Planted(
        "the partials of wide rows do not start at zero", NORM_RANDOM, RMS_NORM,
        "later = at < n * tl.minimum(row - tl.program_id(0), 1)", "later = at < n",
    ),
    Planted(
        "a row past the end brings its NaN into dW", edge("rms_norm", "eps-zero"), RMS_NORM,
        "rstd = tl.where(row < row_count, rstd, 0.0)[:, None]", "rstd = rstd[:, None]",
    ),
    Planted(
        "dW of no rows is not zero", Checks("rms_norm", ("empty",)), RMS_NORM,
        "torch.zeros_like(w)", "torch.empty_like(w)",
    ),
    Planted(
        "two levels of rows are swapped", Checks("rms_norm", ("layouts",)), "toolkit/rows.py",
        "return Rows(count, n, inner_size, outer, inner)",
        "return Rows(count, n, inner_size, inner, outer)",
    ),
    Planted(
        "three levels of rows are taken for two", Checks("rms_norm", ("layouts",)),
        "toolkit/rows.py",
        "if len(levels) > 2:\n        return None", "levels = levels[-2:]",
    ),
    Planted(
        "a weight on another device is not refused", Checks("rms_norm", ("errors",)),
        "norms.py",
        'checks.same_device(op, name, value, "input", input)', "pass",
    ),
    # --- add_rms_norm ---------------------------------------------------------------------------
    Planted(
        "the new residual is not stored", ADD_RANDOM, RMS_NORM,
        "        tl.store(s_ptr + to, total, mask=inside)\n", "",
    ),
    Planted(
        "the sum is not rounded before it is normed", ADD_RANDOM, RMS_NORM,
        "x = total.to(tl.float32)", "x = x + r", times=2,
    ),
    Planted(
        "the residual is read with the input's strides", ADD_RANDOM, RMS_NORM,
        "row_start(row, r_inner, r_outer, r_step, VEC)\n        r = tl.load",
        "row_start(row, x_inner, x_outer, x_step, VEC)\n        r = tl.load",
    ),
    Planted(
        "the residual's gradient is dropped", ADD_RANDOM, RMS_NORM,
        "            dx += tl.load(r_ptr + r_at[:, None] + column, mask=inside, other=0.0)"
        ".to(tl.float32)\n", "",
    ),
    # --- rms_norm_swiglu ------------------------------------------------------------------------
    Planted(
        "the weight of a gated norm is ignored", NORM_SWIGLU_RANDOM, RMS_NORM_SWIGLU,
        "        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)\n",
        "        pass\n",
    ),
    Planted(
        "the mean of a gated row divides by the tile's width", NORM_SWIGLU_RANDOM, RMS_NORM_SWIGLU,
        "mean_of(tl.sum(x * x, 1), n)", "mean_of(tl.sum(x * x, 1), BLOCK)", times=2,
    ),
    Planted(
        "a norm with a large gate makes a NaN", edge("rms_norm_swiglu", "large-gates"),
        RMS_NORM_SWIGLU,
        "    y *= g * sigmoid(g, g_ptr.dtype.element_ty == tl.float32)\n\n",
        "    y *= g * (tl.exp(g) / (1 + tl.exp(g)))\n\n",
    ),
    Planted(
        "the gate is read with x's strides", Checks("rms_norm_swiglu", ("layouts",)),
        RMS_NORM_SWIGLU,
        "load_rows(g_ptr, row, column, row_count, n, g_inner, g_outer, g_step, VEC)",
        "load_rows(g_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC)", times=2,
    ),
    Planted(
        "silu's slope leaves out the sigmoid's", NORM_SWIGLU_RANDOM, RMS_NORM_SWIGLU,
        "slope = sigma + silu * (1 - sigma)", "slope = sigma", times=2,
    ),
    Planted(
        "dW of a gated norm leaves out the gate", NORM_SWIGLU_RANDOM, RMS_NORM_SWIGLU,
        "dw += dy * silu * x", "dw += dy * x",
    ),
    Planted(
        "the norm's mean is taken of what passes the gate", NORM_SWIGLU_RANDOM, RMS_NORM_SWIGLU,
        "tl.sum(h * x, 1)", "tl.sum(dy * x, 1)",
    ),
    Planted(
        "a row past the end brings its NaN into a gated norm's dW",
        edge("rms_norm_swiglu", "eps-zero"), RMS_NORM_SWIGLU,
        "rstd = tl.where(row < row_count, rstd, 0.0)[:, None]", "rstd = rstd[:, None]",
    ),
    Planted(
        "a wide program keeps its last gated row's part of dW only",
        edge("rms_norm_swiglu", "wide-walk"), RMS_NORM_SWIGLU,
        "tl.load(own, mask=later, other=0.0) + dy * silu * x", "dy * silu * x",
    ),
    Planted(
        "a gate of another dtype is not refused", Checks("rms_norm_swiglu", ("errors",)),
        "ops/rms_norm_swiglu/op.py",
        'checks.same_dtype(NAME, "gate", gate, "x", x)', "pass",
    ),
    # --- rms_norm_fp8 ---------------------------------------------------------------------------
    Planted(
        "a row of zeros is divided by zero", edge("rms_norm_fp8", "zero-row-row"), FP8,
        "(amax < INFINITY) & (scale >= SMALLEST)", "amax < INFINITY",
    ),
    Planted(
        "the maximum drops a NaN", FP8_BITS, RMS_NORM_FP8,
        "amax = tl.max(magnitude(y), 2)", "amax = tl.max(tl.where(y == y, magnitude(y), 0), 2)",
    ),
    Planted(
        "the scale of an infinite row is infinite", FP8_BITS, FP8,
        "(amax < INFINITY) & (scale >= SMALLEST)", "scale >= SMALLEST",
    ),
    Planted(
        "the scale comes from the rounded result", FP8_RANDOM, RMS_NORM_FP8,
        "tl.max(magnitude(y), 2)",
        "tl.max(magnitude(y.to(x_ptr.dtype.element_ty).to(tl.float32)), 2)",
    ),
    Planted(
        "a quotient is not saturated", FP8_BITS, FP8,
        "    q = tl.clamp(q, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)\n", "",
    ),
    Planted(
        "a product with the reciprocal stands for the quotient", FP8_BITS, FP8,
        "q = tl.div_rn(y, scale + tl.zeros_like(y))", "q = y * tl.div_rn(scale * 0 + 1.0, scale)",
    ),
    Planted(
        "every format saturates at e4m3's largest number", FP8_RANDOM, RMS_NORM_FP8,
        '"MAX": fp8.max', '"MAX": 448.0', times=2,
    ),
    Planted(
        "a program's last rows alone make the scale of the tensor",
        edge("rms_norm_fp8", "walk-tensor"), RMS_NORM_FP8,
        "tl.maximum(largest, tl.where(there, amax, 0))", "tl.where(there, amax, 0)",
    ),
    Planted(
        "the scale of the tensor starts from what was there", FP8_RANDOM, RMS_NORM_FP8,
        "new_amax().zero_()", "new_amax()",
    ),
    Planted(
        "rows past the end count for the scale of the tensor",
        edge("rms_norm_fp8", "eps-zero-tensor"), RMS_NORM_FP8,
        "tl.where(there, amax, 0)", "amax",
    ),
    Planted(
        "a scale is stored for a group past the end", FP8_RANDOM, RMS_NORM_FP8,
        "mask=there & (group < groups)", "mask=there",
    ),
    Planted(
        "each chunk of a wide row writes the first groups' scales",
        edge("rms_norm_fp8", "packs-16392"), RMS_NORM_FP8,
        "group = start // GROUP + tl.arange", "group = tl.arange",
    ),
    Planted(
        "the offset of the weight is ignored", FP8_RANDOM, RMS_NORM_FP8,
        "w + offset if OFFSET else w", "w",
    ),
    Planted(
        "a message about a format lost its fix", Checks("rms_norm_fp8", ("errors",)), "fp8.py",
        'fix = f"Pass {name}={next(iter(known))!r}, or leave it out."', 'fix = ""',
    ),
    # --- layer_norm_fp8 -------------------------------------------------------------------------
    Planted(
        "the masked tail of the bias counts for the maximum", LAYER_FP8_RANDOM, LAYER_NORM_FP8,
        "y += tl.load(b_ptr + column, mask=column < n, other=0.0)",
        "y += tl.load(b_ptr + column, mask=column < n, other=100.0)",
    ),
    Planted(
        "the masked tail counts for the variance", LAYER_FP8_RANDOM, LAYER_NORM_FP8,
        "x = tl.where(column < n, x - left, 0.0)", "x = x - left",
    ),
    Planted(
        "a mean far away comes out in one step",
        edge("layer_norm_fp8", "far-mean-row"), LAYER_NORM_FP8,
        "x = tl.where(column < n, x - near, 0.0)", "x, near = x, near * 0",
    ),
    Planted(
        "the second pass forgets what the mean left",
        edge("layer_norm_fp8", "far-mean-tensor"), LAYER_NORM_FP8,
        "_affine((x - near - left) * rstd", "_affine((x - near) * rstd",
    ),
    # --- rope -----------------------------------------------------------------------------------
    Planted(
        "the second element of a pair is turned the other way", edge("rope", "head-2"), ROPE,
        "turned_b = b * cos_b + a * sin_b", "turned_b = b * cos_b - a * sin_b",
    ),
    Planted(
        "the backward turns as the forward does", edge("rope", "half-table"), ROPE,
        "back = direction < 0", "back = direction < -1",
    ),
    Planted(
        "the backward takes one angle for both elements of a pair",
        edge("rope", "unequal-halves"), ROPE,
        "tl.where(back, -sin_b, sin_a), tl.where(back, -sin_a, sin_b)",
        "tl.where(back, -sin_a, sin_a), tl.where(back, -sin_b, sin_b)",
    ),
    Planted(
        "the last head is left out", edge("rope", "head-16"), ROPE,
        "here = number < tl.where(head < heads, count, 0)",
        "here = number < tl.where(head < heads - 1, count, 0)",
    ),
    Planted(
        "every sequence takes the first one's positions", ROPE_RANDOM, ROPE,
        "at = batch * position_b + token * position_t", "at = token * position_t",
    ),
    Planted(
        "a token takes the row of its place, not of its position", edge("rope", "thd"), ROPE,
        "batch * table_b + position * table_t", "batch * table_b + token * table_t",
    ),
    Planted(
        "every sequence takes the first one's table", edge("rope", "batched-table"), ROPE,
        "batch * table_b + position * table_t", "position * table_t",
    ),
    Planted(
        "a table of each element is read as one of pairs", edge("rope", "pairs-full"), ROPE,
        '"FULL_TABLE": call.full_table', '"FULL_TABLE": False',
    ),
    Planted(
        "k is written with q's strides", edge("rope", "more-k-heads"), ROPE,
        "token, k_to_b, k_to_t, k_to_h,", "token, q_to_b, q_to_t, q_to_h,",
    ),
    Planted(
        "what is not turned is not copied", edge("rope", "partial"), ROPE,
        "for start in range(0, rest, 2 * HALF):", "for start in range(rest, rest, 2 * HALF):",
    ),
    Planted(
        "neighbours are read as if they were half a head apart", edge("rope", "pairs-narrow"), ROPE,
        "half, HALF, READS_PAIRS, 0.0)", "half, HALF, False, 0.0)",
    ),
    Planted(
        "halves are written side by side", edge("rope", "to_halves-narrow"), ROPE,
        "here, half, HALF, WRITES_PAIRS)", "here, half, HALF, True)",
    ),
    Planted(
        "a write in place lands where a new result would", Checks("rope", ("in place",)), ROTARY,
        "tuple(x.stride()) if in_place else result_strides(x.shape, x.stride())",
        "result_strides(x.shape, x.stride())",
    ),
    Planted(
        "pairs are turned as halves in place", Checks("rope", ("in place",)), ROPE,
        "position_ids, style, back=False, in_place=True)",
        'position_ids, "halves", back=False, in_place=True)',
    ),
    Planted(
        "token offsets are 32-bit", Checks("rope", ("offsets",)), ROPE,
        "batch, token = (number // tokens).to(tl.int64), (number % tokens).to(tl.int64)",
        "batch, token = number // tokens, number % tokens",
    ),
    Planted(
        "q and k in the same memory are not refused", Checks("rope", ("errors",)),
        "ops/rope/op.py",
        'checks.apart("rope", "q", q, "k", k)', "pass",
    ),
    # --- swiglu ---------------------------------------------------------------------------------
    Planted(
        "a tile of a gated kernel stores one column too many", SWIGLU_RANDOM, TRITON_LIB,
        "(row < row_count) & (column < n)", "(row < row_count) & (column <= n)",
    ),
    Planted(
        "silu is rounded before it meets up", SWIGLU_RANDOM, GATED,
        "y = x * _share(x, ACT, y_ptr.dtype.element_ty != tl.float32) * up",
        "y = (x * _share(x, ACT, True)).to(y_ptr.dtype.element_ty).to(tl.float32) * up",
    ),
    Planted(
        "a large gate makes a NaN", edge("swiglu", "large-gates"), TRITON_LIB,
        "    return 1.0 / (1.0 + power)", "    return (1.0 / power) / (1.0 + 1.0 / power)",
    ),
    Planted(
        "silu's derivative leaves out the gate's part", SWIGLU_RANDOM, GATED,
        "(share + x * _share_slope(x, share, ACT))", "share",
    ),
    Planted(
        "the gradient of a gated kernel is read with the gate's strides",
        Checks("swiglu", ("layouts",)), GATED,
        "start_of(row, g_inner, g_outer, g_step, VEC, LEVELS)",
        "start_of(row, x_inner, x_outer, x_step, VEC, LEVELS)",
    ),
    Planted(
        "an up with strides of its own is read as one long row", SWIGLU_RANDOM, GATED_ROWS,
        "if are_contiguous(*tensors):", "if are_contiguous(gate):",
    ),
    Planted(
        "two levels of a gated kernel's rows are taken for one", Checks("swiglu", ("layouts",)),
        ROWS, "return 1 if all(view.inner == 1 for view in views) else 2", "return 1",
    ),
    # --- swiglu_packed --------------------------------------------------------------------------
    Planted(
        "gate and up are swapped", SWIGLU_PACKED_RANDOM, GATED_ROWS,
        '(0, n) if order == "gate_up" else (n, 0)', '(n, 0) if order == "gate_up" else (0, n)',
    ),
    Planted(
        "up is read from the start of the row", SWIGLU_PACKED_RANDOM, GATED,
        "u_at = start_of(row, u_inner, u_outer, u_step, VEC, LEVELS) + up_at.to(tl.int64) * VEC",
        "u_at = start_of(row, u_inner, u_outer, u_step, VEC, LEVELS)",
    ),
    Planted(
        "rows of a packed gradient lie half as far apart", SWIGLU_PACKED_RANDOM, GATED_ROWS,
        "step=2 * n", "step=n",
    ),
    Planted(
        "row offsets of a gated kernel are 32-bit", Checks("swiglu_packed", ("offsets",)),
        TRITON_LIB, "return row.to(tl.int64) * outer * VEC", "return row * outer * VEC",
    ),
    Planted(
        "an odd last dim is not refused", Checks("swiglu_packed", ("errors",)), "gated.py",
        "if x.shape[-1] % 2:", "if False:",
    ),
    # --- geglu ----------------------------------------------------------------------------------
    Planted(
        "the error function stands for the tanh", GEGLU_RANDOM, "ops/geglu/triton_impl.py",
        '"tanh": "gelu_tanh"', '"tanh": "gelu"',
    ),
    Planted(
        "gelu's derivative leaves out the density", GEGLU_RANDOM, GATED,
        "NORMAL * tl.exp(-0.5 * x * x)", "0.0 * x",
    ),
    Planted(
        "the normal distribution of halves is a little off", GEGLU_RANDOM, GATED,
        "0.45920491218566895", "0.4692",
    ),
    Planted(
        "a huge gate's square makes a NaN", edge("geglu", "huge-gates"), GATED,
        "3.0 * CUBIC * tl.minimum(x * x, SATURATED)", "3.0 * CUBIC * x * x",
    ),
    # --- geglu_packed ---------------------------------------------------------------------------
    Planted(
        "a packed call forgets its approximation", GEGLU_PACKED_RANDOM,
        "ops/geglu/triton_impl.py",
        "triton_gated.prepare_packed(gpu, ACTS[approximate]",
        'triton_gated.prepare_packed(gpu, ACTS["tanh"]',
    ),
    # --- attention ------------------------------------------------------------------------------
    Planted(
        "the diagonal ends at the last key for all", edge("attention", "1-by-65-top-left"),
        ATTENTION_TILES,
        "rows, keys, (keys - rows) * bottom_right", "rows, keys, keys - rows",
    ),
    Planted(
        "the tiles of the diagonal are not masked", edge("attention", "tokens-65"), ATTENTION_TILES,
        "tl.minimum(keys, first + 1 + off + right)",
        "tl.minimum(keys, first + ROWS + off + right)",
    ),
    Planted(
        "the tile in which a window begins is skipped", edge("attention", "window-5-3"),
        ATTENTION_TILES,
        "begin = tl.maximum(first + off - left, 0) // KEYS * KEYS",
        "begin = tl.cdiv(tl.maximum(first + off - left, 0), KEYS) * KEYS",
    ),
    Planted(
        "keys that do not exist count in the last tile", edge("attention", "values-16"),
        ATTENTION_TILES,
        "all_end = tl.maximum(all_end, 0) // KEYS * KEYS",
        "all_end = tl.cdiv(tl.maximum(all_end, 0), KEYS) * KEYS",
    ),
    Planted(
        "what was added before a larger maximum keeps its size", edge("attention", "1-by-65"),
        ATTENTION,
        "acc = acc * shrink[:, None]", "acc = acc",
    ),
    Planted(
        "a row that sees nothing is NaN", edge("attention", "17-by-3"), ATTENTION,
        "shift = tl.where(new_peak == MINUS_INF, 0.0, new_peak)", "shift = new_peak", times=2,
    ),
    Planted(
        "heads side by side share keys that lie apart", edge("attention", "kv-heads-2"), ATTENTION,
        "key_head = head // group", "key_head = head % (heads // group)",
    ),
    Planted(
        "a sink is not in the denominator", edge("attention", "sinks"), ATTENTION,
        "total = tl.full([ROWS], 1.0, tl.float32)", "total = tl.full([ROWS], 0.0, tl.float32)",
    ),
    Planted(
        "distances of ALiBi are counted from the first key", edge("attention", "alibi-true"),
        ATTENTION_TILES,
        "tl.abs(i + off - j)", "tl.abs(i - j)",
    ),
    Planted(
        "a bias is stepped through by heads, not by sequences", edge("attention", "bias-batch"),
        ATTENTION,
        "tl.cast(number, tl.int64) * bias_b + wide_head * bias_h",
        "tl.cast(number, tl.int64) * bias_h + wide_head * bias_b",
    ),
    Planted(
        "every packed sequence reads the first one's keys", edge("attention", "thd"), ATTENTION,
        "start = tl.cast(first_key, tl.int64)", "start = tl.cast(first_key, tl.int64) * 0",
    ),
    Planted(
        "a slot belongs to the sequence after its own", edge("attention", "thd-skewed"),
        ATTENTION_TILES, "middle <= slot", "middle <= slot + 1",
    ),
    Planted(
        "every padded sequence is as long as the first", edge("attention", "seq-lens"),
        ATTENTION_TILES,
        "keys = tl.load(key_counts_ptr + batch)", "keys = tl.load(key_counts_ptr)",
    ),
    Planted(
        "values are taken to fill their tile as queries do",
        Checks("attention", ("features",), seed=5), ATTENTION,
        '"PADDED": columns != call.q.dim or value_columns != call.v.dim',
        '"PADDED": columns != call.q.dim',
    ),
    Planted(
        "packed sequences take the first one's slopes",
        Checks("attention", ("features",), seed=13), ATTENTION,
        "alibi_ptr + number * alibi_b", "alibi_ptr + batch * alibi_b",
    ),
    Planted(
        "the short kernel sees one key too many", edge("attention", "values-16"), ATTENTION_NAIVE,
        "(j < keys)[None, :]", "(j <= keys)[None, :]",
    ),
    Planted(
        "an LSE stays in units of log 2", edge("attention", "head-16"), ATTENTION_NAIVE,
        "peak + tl.log2(total) * LN_2", "peak + tl.log2(total)",
    ),
    Planted(
        "the gradient passes a cap as if it were none", edge("attention", "softcap-2"),
        ATTENTION_TILES,
        "kept = 1.0 - capped * capped", "kept = 1.0",
    ),
    Planted(
        "the gradient of the LSE is added", ATTENTION_RANDOM, ATTENTION_BACKWARD,
        "delta -= tl.load(grad_lse_ptr", "delta += tl.load(grad_lse_ptr",
    ),
    Planted(
        "the gradient of keys is not scaled", ATTENTION_RANDOM, ATTENTION_BACKWARD,
        "tl.where(real, dk * scale, 0.0)", "tl.where(real, dk, 0.0)",
    ),
    Planted(
        "the gradient of a sink has the other sign", edge("attention", "sinks"),
        ATTENTION_BACKWARD,
        "-tl.sum(weight * delta, 0)", "tl.sum(weight * delta, 0)",
    ),
    Planted(
        "a bias that sequences share gets the first one's gradient",
        edge("attention", "bias-heads"), ATTENTION_BACKWARD,
        "for one in range(b_count * h_count):", "for one in range(h_count):",
    ),
    Planted(
        "the backward's rows begin at the wrong diagonal", edge("attention", "1-by-65"),
        ATTENTION_TILES,
        "begin = tl.maximum(first - off - right, 0)", "begin = tl.maximum(first - right, 0)",
    ),
    # --- matmul ---------------------------------------------------------------------------------
    Planted(
        "a tile of a product stores one row too many", MATMUL_RANDOM, MATMUL,
        "inside = (row < m) & (column < n)", "inside = (row <= m) & (column < n)",
    ),
    Planted(
        "the depth is not masked", edge("matmul", "depth-65"), MATMUL,
        "left = end - start", "left = BLOCK_K",
    ),
    Planted(
        "rows and columns of tiles are swapped in a group", edge("matmul", "groups"), MATMUL,
        "first + of_group % size, of_group // size", "first + of_group // size, of_group % size",
    ),
    Planted(
        "the last group of tiles is not cut short", edge("matmul", "groups"), MATMUL,
        "size = tl.minimum(tiles_m - first, GROUP)", "size = GROUP",
    ),
    Planted(
        "offsets of an operand are 32-bit numbers", Checks("matmul", ("offsets",)), MATMUL,
        "row, column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]",
        "row, column = row[:, None], column[None, :]",
    ),
    Planted(
        "the first part of a sum is added again and again", edge("matmul", "deep"), MATMUL,
        "        parts_ptr += total", "        parts_ptr += 0",
    ),
    Planted(
        "every part of a sum begins at its first product", edge("matmul", "deep"), MATMUL,
        "begin = part * steps * BLOCK_K", "begin = part * 0",
    ),
    Planted(
        "a stack steps through one level only", edge("matmul", "broadcast"), MATMUL,
        "(number % inner).to(tl.int64)", "(number // inner).to(tl.int64)",
    ),
    Planted(
        "a strided matrix is read as columns", edge("matmul", "strided"), MATMUL_CALL,
        "return self.row_stride == 1 and not self.by_rows", "return self.column_stride != 1",
    ),
    Planted(
        "a gradient is not summed where a matrix was shared", edge("matmul", "stack-of-b"),
        MATMUL_CALL,
        ".sum_to_size(target)", "[: math.prod(target) // math.prod(target[-2:])].reshape(target)",
    ),
    Planted(
        "the depth of few rows is not masked", edge("matmul", "few-rows-deep-nt"), MATMUL_SKINNY,
        "k_inside = k < k_size", "k_inside = k >= 0",
    ),
    Planted(
        "one of few rows too many is stored", edge("matmul", "few-rows-deep"), MATMUL_SKINNY,
        "is_inside = (row < m)", "is_inside = (row <= m)",
    ),
    Planted(
        "the last split is not added", edge("matmul", "few-rows-deep"), MATMUL_SKINNY,
        "for other in range(splits):", "for other in range(splits - 1):",
    ),
    Planted(
        "every split goes on to the end", edge("matmul", "few-rows-deep"), MATMUL_SKINNY,
        "first, last = part_of(steps, split, splits)",
        "first, last = part_of(steps, split, splits)[0], steps",
    ),
)  # fmt: skip
