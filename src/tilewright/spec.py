"""What an op *is*: frozen records that every other room reads and none extends.

`Op` is the single declaration in `ops/<name>/op.py`. Dispatch, torch.library registration, verify,
compile, bench, the CLI and the docs are all generic over it. Facts only: no skip lists, no styles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Args = tuple[Any, ...]
Features = Mapping[str, Mapping[str, Mapping[str, Any]]]  # feature -> its levels -> their dims

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def on_meta(args: Args) -> Args:
    """The same arguments without their data: shapes, strides and dtypes on the meta device."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
        if isinstance(a, torch.Tensor)
        else a
        for a in args
    )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """An op's result as the tuple of its outputs."""
    return value if isinstance(value, tuple) else (value,)


def normal(shape: Sequence[int], rng: torch.Generator | None) -> torch.Tensor:
    """Normal numbers, on the generator's device: a GPU's draws large inputs at once.

    Without a generator only the shape is wanted: on the meta device, torch takes long to draw none.
    """
    if rng is None:
        return torch.empty(shape, device="meta")
    return torch.randn(shape, generator=rng, device=rng.device)


def accept_all(*args: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute an op. `entry` is a string, so that declaring costs no import.

    A "torch" entry is called with the op's arguments. Every other entry is a `prepare`: called with
    (gpu, *args), it decides all that depends on the layout alone, and returns `run(*args, *_)`.
    """

    name: str  # what a user types: "triton", "cuda", "cuda_v1", "torch"
    technology: str  # "triton", "gluon", "cuda" or "torch": which toolkit serves it
    entry: str  # "package.module:function"
    dtypes: tuple[torch.dtype, ...] | None = FLOATS  # of the first tensor; None: any floating dtype
    min_sm: int = 75
    max_sm: int = 999
    accepts: Callable[..., str | None] = accept_all  # (*args) -> None, or why not
    limits: str | None = None
    """As `entry`, a name: (gpu, *args) -> None, or what this GPU's blocks cannot hold."""
    yields: str | None = None
    """As `limits`: (gpu, *args) -> None, or why a backend further down is quicker for this call. It
    is heeded unless the backend is asked for by name."""
    direct: str | None = None
    """Of torch, as `entry`: (*args) -> what runs such calls with no step of ours between, or None.
    The op has a rule for autocast, and torch's result the strides that are declared."""
    max_size: int = 2**31 - 2**16
    """The longest dim and the most rows it takes: kernels number both in 32 bits."""
    flattens: bool = False  # contiguous tensors are one row, whose length is a 64-bit number
    tensor_cores: tuple[str, ...] = ()  # kernels in which `compile` finds the instruction (halves)
    may_spill: int = 0  # bytes of a thread: what lives across a loop may be worth less than a tile
    compiled: tuple[str, ...] = ()  # cases that `compile` takes for it, beside `Op.compiled`
    features: Callable[[bool], Features] | None = None
    """Where it serves few levels of `Op.features`, those: they meet in calls that it serves."""


@dataclass(frozen=True)
class Case:
    """Named dims and options of one call; `group` says who wants it.

    verify takes "edge" and, on a GPU, "plan"; bench takes "model", "sweep", "decode", "prefill" and
    "sparse", windows and sequences of many lengths; the compile matrix takes all, or those that
    `Op.compiled` names. Every op's dims hold "shape", the shape of its layout_argument.
    """

    name: str
    dims: Mapping[str, Any]
    group: str = "edge"


class Traffic(NamedTuple):
    """The fewest bytes one call can move: each input read once, each output written once."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Cost:
    """Arithmetic of one call and the unit it runs on. Bytes are counted from the real tensors."""

    flops: float
    unit: str = "fp32"


@dataclass(frozen=True)
class BadInput:
    """A mistake a user will make, and what it must raise."""

    name: str
    call: Callable[[Callable[..., Any], str], Any]  # (public function, device) -> never returns
    raises: type[Exception]
    says: tuple[str, ...]  # words the message must contain


@dataclass(frozen=True)
class Autograd:
    """How a forward reaches its backward, which is an op of its own."""

    op: Op
    keep: tuple[str, ...]
    """What to save: argument names, or "output", "output 1", ... for the results."""
    saved: Callable[[Args, torch.dtype, Args, Mapping[str, bool]], Args]
    """(kept tensors, dtype of the first argument, the arguments that are no tensors, which ones
    want a gradient) -> the backward's arguments after the incoming gradients."""
    gradients: tuple[tuple[str, ...], ...]
    """For each result of the backward, the forward arguments it is the gradient of."""


@dataclass(frozen=True)
class Op:
    name: str
    summary: str
    schema: str  # torch.library schema without the name: "(Tensor input, ...) -> Tensor"
    reference: Callable[..., Any]  # eager torch, the definition of correct, in the schema's order
    outputs: Callable[..., Any]  # (*args) -> empty outputs: the fake kernel and the stride rule
    check: Callable[..., None]  # (*args) -> raises InputError or DTypeError
    backends: tuple[Backend, ...]  # in order of preference; "torch" comes last
    tolerance: Callable[..., tuple[torch.Tensor, ...]]
    """(Rounding, outputs in float64, *args in float64) -> an absolute bound per output element."""
    public: Callable[..., Any] | None = (
        None  # the function users call; None: only autograd calls it
    )
    inputs: Callable[..., Args] | None = None  # (dims, dtype, device, generator) -> arguments
    cases: tuple[Case, ...] = ()
    compiled: tuple[str, ...] = ()
    """The cases that the compile matrix takes, where all would be too many: the first in every
    dtype, the others in bfloat16 and float32; edge cases aligned and not. None: all."""
    sample: Callable[..., Mapping[str, Any]] | None = None  # (random.Random) -> dims
    cost: Callable[..., Cost] | None = None  # (dims, dtype) -> Cost
    as_called: Callable[..., Any] | None = None
    """(backend, *args) -> the public function called with these arguments, as a user writes it."""
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Rivals beside eager and compiled torch, which are made from the reference. "vendor" is the
    kernel that torch or the GPU's maker ships for this very op: (*args) -> result."""
    vendor_is_eager: bool = False
    """Eager and compiled programs call torch's own function, the vendor's row: nobody writes its
    formula out. A speed-up needs no other rival then."""
    autograd: Autograd | None = None
    backward_flops: float = 2.0  # of a forward's: each of its products has two in its backward
    beside_torch: Callable[..., bool] | None = None
    """(*args) -> whether the results of a call have errors enough for torch's largest one to be a
    measure of ours, and not luck; None: every call's. Gradients have a rule of their own."""
    backward_times_torch: float | None = None
    """How many times torch's own error, in the same dtype, a gradient may have; None: it is held to
    the tolerance alone."""
    returned: int | None = None
    """How many of the outputs its public function returns unless asked for more; None: all."""
    autocast: Callable[..., Args] | None = None  # (*args) -> args; None: keeps the dtype
    in_place: Op | None = None  # the same op written over its input
    features: Callable[[bool], Features] | None = None
    """(large) -> the dims of each level of each feature: `verify` lets every two of them meet."""
    exact_inputs: Callable[..., Args] | None = None  # as inputs; the result is exact in any order
    bit_inputs: Callable[[str], Iterator[tuple[str, Args]]] | None = None
    """(device) -> named calls that must give the bits of the reference in its own dtype."""
    layout_argument: str = "input"  # the argument that verify gives hostile layouts
    ranks: tuple[int, ...] = ()  # the numbers of dims it may have; none: any
    variants: tuple[Mapping[str, Any], ...] = ({},)  # dims beside the shape that change the kernel
    rounds_as_reference: bool = False  # verify holds the kernel to the reference's own roundings
    errors: tuple[BadInput, ...] = ()
    tuning: Tuning | None = None  # what `tilewright tune` may choose between
    namespace: str = "tilewright"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Argument names in the schema's order."""
        inside = self.schema[self.schema.index("(") + 1 : self.schema.index(") ->")]
        return tuple(part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip())

    @property
    def public_name(self) -> str:
        return self.public.__name__ if self.public else ""

    @property
    def tensor_count(self) -> int:
        """How many tensors the arguments begin with; the others follow them."""
        inside = self.schema[self.schema.index("(") + 1 : self.schema.index(") ->")]
        return sum(part.strip().startswith("Tensor") for part in inside.split(","))

    @property
    def optional(self) -> tuple[bool, ...]:
        """For each tensor among the arguments, whether it may be None."""
        inside = self.schema[self.schema.index("(") + 1 : self.schema.index(") ->")]
        kinds = (part.split()[0] for part in inside.split(","))
        return tuple(kind == "Tensor?" for kind in kinds if kind.startswith("Tensor"))

    def backward_call(self, args: Args, outputs: Args, grads: Args, needs: Any = None) -> Args:
        """The arguments that autograd would hand to the backward; all gradients by default."""
        rule = self.autograd
        assert rule is not None
        needs = dict.fromkeys(self.arguments, True) if needs is None else needs
        kept = tuple(args[i] if from_args else outputs[i] for from_args, i in self.kept_places)
        return (*grads, *rule.saved(kept, args[0].dtype, args[self.tensor_count :], needs))

    def in_phase(self, args: Args, phase: str) -> tuple[Op, Args]:
        """The op that runs in a phase, and its arguments, on tensors without data."""
        if phase == "forward":
            return self, args
        assert self.autograd is not None
        meta, backward = on_meta(args), self.autograd.op
        outputs = as_tuple(self.outputs(*meta))
        used = len(outputs) if self.returned is None else self.returned
        may_lack = backward.optional
        grads = (o if i < used or not may_lack[i] else None for i, o in enumerate(outputs))
        return backward, self.backward_call(meta, outputs, tuple(grads))

    def cost_in(self, dims: Mapping[str, Any], dtype: torch.dtype, phase: str) -> Cost:
        """The arithmetic of a phase."""
        cost = self.cost(dims, dtype) if self.cost else Cost(0.0)
        return cost if phase == "forward" else Cost(self.backward_flops * cost.flops, cost.unit)

    @property
    def kept_places(self) -> tuple[tuple[bool, int], ...]:
        """For each tensor to save: (is it an argument, its place there or among the results)."""
        assert self.autograd is not None

        def place(name: str) -> tuple[bool, int]:
            if name in self.arguments:
                return True, self.arguments.index(name)
            return False, int(name.removeprefix("output") or 0)

        return tuple(place(name) for name in self.autograd.keep)

    def traffic(self, args: Args) -> Traffic:
        """Counted from the tensors; an expanded dim is in memory once."""
        return Traffic(_bytes(args), _bytes(as_tuple(self.outputs(*on_meta(args)))))

    def backend(self, name: str) -> Backend | None:
        return next((b for b in self.backends if b.name == name), None)


@dataclass(frozen=True)
class Rounding:
    """Unit roundoffs of one run, for tolerances: u_out of the result, u32 of the arithmetic."""

    u_out: float
    u_in: float
    tiny: float  # the smallest step of the output dtype near zero
    tiny_in: float = 0.0  # and of the input dtype, for what is rounded to it on the way
    u32: float = 2.0**-24

    @staticmethod
    def of(out: torch.dtype, inp: torch.dtype, *, interpreted: bool = False) -> Rounding:
        u_out, u_in = _roundoff(out, interpreted), _roundoff(inp, interpreted)
        return Rounding(u_out, u_in, _tiny(out), _tiny(inp))


def _bytes(values: Sequence[Any]) -> int:
    return sum(
        t.element_size()
        * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or not n)
        for t in values
        if isinstance(t, torch.Tensor)
    )


def sum_path(n: int) -> float:
    """Roundings that a float32 sum of n terms carries: a tree's depth, and before it the chains.

    A thread adds at most one term in 256 one after another (the fewest threads that share a row too
    long for a tile); a chain of k additions errs like the root of k.
    """
    return math.ceil(math.log2(max(n, 2))) + math.sqrt(n / 256)


def deviations_away(rounding: Rounding, mean: Any, variance: Any, most: float) -> Any:
    """How far from zero the mean is, in deviations, in rows that are summed without taking it out.

    Kernels do so with rows of halves whose squared mean is within `most` variances.
    """
    if rounding.u_in <= rounding.u32:
        return torch.zeros_like(variance)
    squared = (mean.pow(2) / variance).nan_to_num(0.0)  # a row of zeros
    return squared.where(squared <= 1.05 * most, 0.0).sqrt()


def _roundoff(dtype: torch.dtype, interpreted: bool) -> float:
    # Triton's interpreter truncates fp32 -> bf16 where a GPU rounds to nearest: one more bit.
    if dtype == torch.bfloat16:
        return 2.0**-7 if interpreted else 2.0**-8
    return torch.finfo(dtype).eps / 2


def _tiny(dtype: torch.dtype) -> float:
    # fp16 and fp8 keep subnormals. fp32 and bf16 share an exponent range in which GPUs' approximate
    # exp2 and division flush to zero, so there the smallest normal is the honest step.
    kind = torch.finfo(dtype)
    return kind.tiny * kind.eps if kind.bits < 32 and dtype != torch.bfloat16 else kind.tiny


class Choice(NamedTuple):
    """One way to serve a call, as `tune` measures it: a backend, and its launch in its own words.

    >>> str(Choice("triton", (128, 64))), Choice.of("torch")
    ('triton:128x64', Choice(backend='torch', launch=()))
    """

    backend: str
    launch: tuple[int, ...] = ()  # (): as the backend itself decides

    def __str__(self) -> str:
        return f"{self.backend}:{'x'.join(map(str, self.launch))}" if self.launch else self.backend

    @staticmethod
    def of(text: str) -> Choice:
        backend, _, launch = text.partition(":")
        return Choice(backend, tuple(int(n) for n in launch.split("x")) if launch else ())


@dataclass(frozen=True)
class Tuning:
    """What `tilewright tune` may choose between for an op. Functions are named, as entries are."""

    cases: tuple[Case, ...]  # the grid: a bucket for each, in each dtype
    dtypes: tuple[torch.dtype, ...]
    choices: str
    """(gpu, *args) -> the Choices that can serve this call; among equals the first is taken."""
    expected: str
    """(gpu, choice, *args) -> microseconds by a model. It carries a time that was measured at a
    bucket over to another shape, so only its ratios matter."""
    place: str
    """(*args) -> (kind, coordinates). Calls of one kind, layouts and dtype, may share a bucket;
    coordinates, such as the log2 of m, n and k, say which is near."""
    part: str | None = None
    """(generator, *args) -> (a smaller call, cut), where `cut(result)` is the smaller call's part
    of a result: a call too large for float64 is checked so. None: all of it is."""
