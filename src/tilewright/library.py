"""torch.library registration made from an `Op`, and the short way around it.

`register(op)` defines `torch.ops.tilewright.<name>` with its fake kernel, its autograd and its
autocast rule, and returns `call(*args)`, which the public function uses. `call` steps around the
dispatcher only when nothing needs it (see `_caller`): then a call is one dictionary look-up, one
allocation and one launch. Everything else (the first call of a layout included) goes through
torch.ops, so torch.compile, export, functional transforms and subclasses see an ordinary operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tilewright import dispatch
from tilewright.errors import CaptureError, UnsupportedError
from tilewright.spec import Args, Op
from tilewright.toolkit import memory
from tilewright.toolkit.launch import Shot

LIBRARY = torch.library.Library("tilewright", "DEF")
MAX_PLANS = 65_536  # layouts remembered per op; beyond it the oldest is forgotten
TURNS = 16  # a ready launch that does not fit gives way at every such turn

_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_autocast = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
_is_compiling = torch.compiler.is_dynamo_compiling  # True while Dynamo traces us, else False
_is_grad_enabled = torch.is_grad_enabled
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)

# every registered op's caller by name: `calls[name](*tensors, rest)`, where rest is a tuple of the
# arguments that are no tensors and, last, the backend asked for
calls: dict[str, Callable[..., Any]] = {}
# explain() listens here, by thread, for (op, arguments, why torch's function serves it instead);
# while anybody does, no call takes the short way
capturing: dict[int, list[tuple[Op, Args, str | None]]] = {}


class Plan(NamedTuple):
    """What a layout's calls run, and what a `ready` call needs, if the kernel is a simple one."""

    run: Callable[..., Any]
    shot: Shot | None = None
    apply: Callable[..., Any] | None = None  # autograd for a result that is there already


def layout_key(t: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What a kernel's binary and launch depend on, for one tensor.

    A negated view (conj().imag) is left to the dispatcher, which resolves it. It is contiguous only
    if it has one element, and such a call gets no plan: asking each tensor would cost 0.1 us.
    """
    if t is None:
        return None
    order = t.is_contiguous() or (t.stride(), t.is_neg())
    return (t.shape, order, t.dtype, t.data_ptr() & 15, t.get_device())


def call(op: Op, args: Sequence[Any], backend: str | None) -> Any:
    """Call a registered op with its own arguments, as its public function would."""
    count = op.tensor_count
    return calls[op.name](*args[:count], (*args[count:], backend))


def register(op: Op) -> Callable[..., Any]:
    """Define the operator and return the function that calls it: `call(*tensors, rest)`."""
    dispatch.declare(op)
    signature, _, result = op.schema.partition(") ->")
    LIBRARY.define(
        f"{op.name}{signature}, str? backend=None) ->{result}",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
    operator = getattr(getattr(torch.ops, op.namespace), op.name).default
    plans: dict[Any, Plan] = {}
    evicting = Lock()
    tensors, mutates = op.tensor_count, signature.count("!")  # its first arguments, so many

    def kernel(*args: Any) -> Any:
        """The CPU and CUDA kernel: find or make the plan, run it."""
        *plain_args, backend = _with_backend(op, args)
        key = _key(args[:tensors], (*plain_args[tensors:], backend))
        index = args[0].get_device()
        with torch.cuda.device(index) if index >= 0 else nullcontext():
            if args[0].numel() <= 1:
                _refuse_cold_capture(op, plain_args)
            if index < 0 or memory.guards or args[0].numel() <= 1:
                # Buffers of a poisoned call must not outlive it in a plan; and a key cannot tell a
                # CPU tensor from a meta tensor, so only CUDA tensors have plans.
                return dispatch.prepare(op, tuple(plain_args), backend)(*plain_args, backend)
            if dispatch.override.get() is not None:
                key = (key, dispatch.override.get())
            plan = plans.get(key)
            if plan is None:
                _refuse_cold_capture(op, plain_args)
                run = dispatch.prepare(op, tuple(plain_args), backend)
                plan = Plan(_on_device(run, index))
                if hasattr(run, "shot") and op.autograd and op.autograd.keep == ("output",):
                    fixed = (args[0].dtype, (*plain_args[tensors:], backend))
                    plan = Plan(plan.run, run.shot, _c_apply(_autograd_function(op, fixed)))
                with evicting:
                    while len(plans) >= MAX_PLANS:
                        plans.pop(next(iter(plans)), None)
                    plans[key] = plan
            return plan.run(*plain_args, backend)

    def fake(*args: Any) -> Any:
        *plain_args, _ = _with_backend(op, args)
        op.check(*plain_args)
        return op.outputs(*plain_args)

    function = _autograd_function(op)

    def autograd(*args: Any) -> Any:
        *plain_args, backend = _with_backend(op, args)

        def below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)

        needs_grad = _is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in plain_args
        )
        if needs_grad and mutates:
            raise RuntimeError(
                f"{op.name}: autograd cannot follow this write. Call "
                f"tilewright.{op.public_name}(..., inplace=True), which it can."
            )
        if needs_grad or forward_ad._current_level >= 0:
            if _transforms() is not None:
                raise RuntimeError(
                    f"{op.name}: torch.func transforms (grad, vjp, jvp, ...) are not implemented. "
                    "Use torch.autograd, or torch's own function."
                )
            if dispatch.override.get() is not None:  # autograd's threads do not see this context
                backend = dispatch.requested(op, backend)[0]
            return function.apply(below, *plain_args[:tensors], (*plain_args[tensors:], backend))
        result = below(*plain_args, backend)
        if mutates:
            _bump_versions(plain_args[:mutates])
        return result

    LIBRARY.impl(op.name, kernel, "CUDA")
    LIBRARY.impl(op.name, kernel, "CPU")
    LIBRARY.impl(op.name, autograd, "Autograd")
    torch.library.register_fake(f"{op.namespace}::{op.name}", fake, lib=LIBRARY)
    if op.autocast is not None:
        _register_autocast(op, operator)

    def slow(*given: Any) -> Any:
        args = (*given[:-1], *given[-1])
        _tell_listener(op, args)
        op.check(*args[:-1])
        if args[-1] is not None:
            dispatch.requested(op, args[-1])  # a backend that is no name at all is refused here
        return operator(*args)

    calls[op.name] = _caller(op, plans, slow, operator, function)
    return calls[op.name]


def leave_to_torch(name: str, op: Op, tensor: torch.Tensor, backend: str | None, why: str) -> None:
    """What the public function `name` says before it calls torch's own function instead of `op`.

    A backend that somebody asked for is refused aloud, and explain() hears the reason.
    """
    wanted, asked_by = backend, "backend="
    if not torch.compiler.is_compiling():  # Dynamo cannot trace a ContextVar
        wanted, asked_by = dispatch.requested(op, backend)
    if wanted not in (None, "torch"):
        raise UnsupportedError(
            f"{name}: backend {wanted!r} ({asked_by}) cannot serve this call: {why}. "
            "What would work: torch."
        )
    _tell_listener(op, (tensor, backend), why)


def _tell_listener(op: Op, args: Args, why: str | None = None) -> None:
    listener = capturing.get(get_ident()) if capturing else None
    if listener is not None:
        listener.append((op, args, why))
        raise Captured


def write_in_place(call: Callable[..., Any], written: Sequence[torch.Tensor], *rest: Any) -> None:
    """Call an op that writes over its first arguments, `written`, and tell autograd of it.

    The dispatcher's way tells it; the short way does not.
    """
    versions = [None if t.is_inference() else t._version for t in written]
    call(*written, *rest)
    for t, version in zip(written, versions, strict=True):
        if version is not None and t._version == version:
            torch.autograd.graph.increment_version(t)


def _bump_versions(tensors: list[Any]) -> None:
    """A kernel writes unseen by torch: tell autograd that the tensors changed."""
    for t in tensors:
        if not t.is_inference():
            torch.autograd.graph.increment_version(t)


class Captured(Exception):
    """Raised through a public function whose registered call `explain` wanted to see."""


def _key(tensors: Sequence[Any], rest: Args) -> tuple[Any, ...]:
    first, *others = [t if t is None else layout_key(t) for t in tensors]
    return (*first, *others, rest)  # type: ignore[misc]


def _on_device(run: Callable[..., Any], index: int) -> Callable[..., Any]:
    """A plan allocates and launches on the current device: with several, make it the tensors'."""
    if index < 0 or torch.cuda.device_count() == 1:
        return run
    current = torch._C._cuda_getDevice

    def guarded(*args: Any) -> Any:
        if current() == index:
            return run(*args)
        with torch.cuda.device(index):
            return run(*args)

    return guarded


def _with_backend(op: Op, args: Args) -> Args:
    """torch.ops drops trailing defaults, and makes lists of tuples; put back the backend, and what
    has a hash."""
    args = tuple(tuple(a) if a.__class__ is list else a for a in args)
    return args if len(args) > len(op.arguments) else (*args, None)


def _refuse_cold_capture(op: Op, args: list[Any]) -> None:
    if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{op.name}: the first call for this layout came inside CUDA-graph capture, where "
            "nothing may compile. Call it once with tensors of these shapes before the capture."
        )


def _caller(
    op: Op,
    plans: dict[Any, Plan],
    slow: Callable[..., Any],
    operator: Any,
    function: type[torch.autograd.Function],
) -> Callable[..., Any]:
    """`call(*tensors, rest)` for ops whose first one, two, three or more arguments are tensors.

    The short way is taken when nothing stands between the call and its kernel: no tensor subclass,
    no function or dispatch mode, no use_backend, no autocast (where the op has a rule for it), no
    functional transform (a wrapped tensor has no address, or address 0), no forward AD, no tracing,
    nobody explaining or poisoning. The tests and the key are written out: a Python call costs
    0.2 us on the host of an H200 (2026-11), and torch's own softmax takes seven in all.

    `one` has a shorter way yet. A call that has gone the short way leaves a `ready` launch behind,
    with torch's own guard, which answers most of these questions about a later call at once; such a
    call allocates and launches by itself. The last one used is tried first: a model calls an op
    with one shape, layer after layer. `two` leaves what its plan runs, with such a guard.
    """
    apply = _c_apply(function)
    ordinary, guards, find = _ORDINARY, memory.guards, plans.get
    ordinary_or_none = ordinary | {type(None)}
    overriding = dispatch.override.get
    has_rule = op.autocast is not None
    ready: dict[Any, tuple[Any, ...]] = {}
    last: tuple[Any, ...] = (None,)
    misses = 0

    def one(x: torch.Tensor, rest: Args) -> Any:
        nonlocal last, misses
        if _is_compiling():
            return operator(x, *rest)
        if (
            _function_modes()
            or forward_ad._current_level >= 0
            or overriding() is not None
            or capturing
            or guards
        ):
            return slow(x, rest)
        try:
            found: Any = last
            fits = found[0] == rest and found[1](x)
            if not fits:
                found = ready.get((x.shape, x.requires_grad, rest))
                fits = found is not None and found[1](x)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, or no dense one; a list
            return slow(x, rest)
        if fits:
            last = found
            (_, _, grad_mode, alignment, device, alone, apply_done, makes, launch, on_stream,
             before, tail, entering, leaving, assigned) = found  # fmt: skip
            address = x.data_ptr()
            if (
                address & 15 == alignment
                and (grad_mode is None or _is_grad_enabled() is grad_mode)
                and (alone or _current_device() == device)
                and not (entering or leaving or assigned)
            ):
                y = makes()
                pointers = (y.data_ptr(), address)
                launch(*((on_stream(_stream(device)) or before()) + pointers + tail))
                return y if apply_done is None else apply_done((y,), x)
        if x.__class__ in ordinary and not (_dispatch_modes() or (has_rule and _autocast())):
            try:
                address, device = x.data_ptr(), x.get_device()
                order = x.is_contiguous() or (x.stride(), x.is_neg())
                plan = find((x.shape, order, x.dtype, address & 15, device, rest))
            except RuntimeError:  # no storage: sparse, or wrapped by a functional transform
                plan = None
            if plan is not None and address:
                grad_mode = _is_grad_enabled() if x.requires_grad else None
                differentiated = grad_mode is True
                if differentiated and _transforms() is not None:
                    return slow(x, rest)
                misses += 1
                if plan.shot is not None and (found is None or misses % TURNS == 0):
                    if len(ready) >= MAX_PLANS:
                        ready.clear()
                    alone = torch.cuda.device_count() == 1
                    apply_done = plan.apply if differentiated else None
                    state = (rest, _guard(x), grad_mode, address & 15, device, alone)
                    ready[x.shape, x.requires_grad, rest] = (*state, apply_done, *plan.shot)
                return apply(plan.run, x, rest) if differentiated else plan.run(x, *rest)
        return slow(x, rest)

    def two(x: torch.Tensor, y: torch.Tensor | None, rest: Args) -> Any:
        nonlocal misses
        if _is_compiling():
            return operator(x, y, *rest)
        if (
            _function_modes()
            or forward_ad._current_level >= 0
            or overriding() is not None
            or capturing
            or guards
        ):
            return slow(x, y, rest)
        found: Any = None
        if y is not None and y is not x:  # the guard holds for different tensors alone
            try:
                found = ready.get((x.shape, y.shape, rest))
                fits = found is not None and found[0](x, y)
            except (AttributeError, TypeError, RuntimeError):  # as in `one`
                fits = False
            if fits:
                _, grad_mode, x_alignment, y_alignment, run = found
                if (
                    x.data_ptr() & 15 == x_alignment
                    and y.data_ptr() & 15 == y_alignment
                    and (grad_mode is None or _is_grad_enabled() is grad_mode)
                ):
                    return apply(run, x, y, rest) if grad_mode else run(x, y, *rest)
        if (
            x.__class__ in ordinary
            and (y is None or y.__class__ in ordinary)
            and not (_dispatch_modes() or (has_rule and _autocast()) or _transforms() is not None)
        ):
            try:
                address = x.data_ptr()
                order = x.is_contiguous() or (x.stride(), x.is_neg())
                layout = (x.shape, order, x.dtype, address & 15, x.get_device())
                plan = find((*layout, layout_key(y), rest))
            except (RuntimeError, TypeError):
                plan = None
            if plan is not None and address:
                wanted = x.requires_grad or (y is not None and y.requires_grad)
                grad_mode = _is_grad_enabled() if wanted else None
                misses += 1
                if y is not None and y is not x and (found is None or misses % TURNS == 0):
                    if len(ready) >= MAX_PLANS:
                        ready.clear()
                    state = (_guard(x, y), grad_mode, address & 15, y.data_ptr() & 15)
                    ready[x.shape, y.shape, rest] = (*state, plan.run)
                return apply(plan.run, x, y, rest) if grad_mode else plan.run(x, y, *rest)
        return slow(x, y, rest)

    def three(x: torch.Tensor, y: torch.Tensor | None, z: torch.Tensor | None, rest: Args) -> Any:
        if _is_compiling():
            return operator(x, y, z, *rest)
        if (
            x.__class__ in ordinary
            and (y is None or y.__class__ in ordinary)
            and (z is None or z.__class__ in ordinary)
            and not (
                _function_modes()
                or _dispatch_modes()
                or (has_rule and _autocast())
                or forward_ad._current_level >= 0
                or overriding() is not None
                or capturing
                or guards
                or _transforms() is not None
            )
        ):
            try:
                address = x.data_ptr()
                order = x.is_contiguous() or (x.stride(), x.is_neg())
                layout = (x.shape, order, x.dtype, address & 15, x.get_device())
                plan = find((*layout, layout_key(y), layout_key(z), rest))
            except (RuntimeError, TypeError):
                plan = None
            if plan is not None and address:
                if _is_grad_enabled() and (
                    x.requires_grad
                    or (y is not None and y.requires_grad)
                    or (z is not None and z.requires_grad)
                ):
                    return apply(plan.run, x, y, z, rest)
                return plan.run(x, y, z, *rest)
        return slow(x, y, z, rest)

    def many(*args: Any) -> Any:
        *leading, rest = args
        if _is_compiling():
            return operator(*leading, *rest)
        if ordinary_or_none.issuperset(map(type, leading)) and not (
            _function_modes()
            or _dispatch_modes()
            or (has_rule and _autocast())
            or forward_ad._current_level >= 0
            or overriding() is not None
            or capturing
            or guards
            or _transforms() is not None
        ):
            try:
                plan = find(_key(leading, rest))
            except (RuntimeError, TypeError):
                plan = None
            if plan is not None:
                if _is_grad_enabled() and any(t is not None and t.requires_grad for t in leading):
                    return apply(plan.run, *args)
                return plan.run(*leading, *rest)
        return slow(*args)

    by_tensors: dict[int, Callable[..., Any]] = {1: one, 2: two, 3: three}
    return by_tensors.get(op.tensor_count, many)


def _guard(*given: torch.Tensor) -> Callable[..., bool]:
    """torch's guard: holds for tensors like these while this thread's state is as it is now.

    Like them in class, sizes, strides, dtype, device, negation and requires_grad; the state is
    dispatch modes, autocast, transforms and inference. It knows no addresses and no forward AD.
    """
    holds: Callable[..., bool] = lambda *_: False  # noqa: E731
    if _guard_works():
        holds = _TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return holds


@lru_cache(maxsize=1)
def _guard_works() -> bool:
    """Whether this torch has the guard, with this signature, and it tells requires_grad apart."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            plain, leaf = torch.empty(2), torch.empty(2, requires_grad=True)
            guard = _TensorGuards(plain, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            return bool(guard.check(torch.empty(2))) and not guard.check(leaf)
    except (TypeError, RuntimeError, AttributeError):
        return False


def _c_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Function.apply without the Python wrapper that looks for functional transforms."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


def _autograd_function(
    op: Op, fixed: tuple[torch.dtype, Args] | None = None
) -> type[torch.autograd.Function]:
    """One autograd.Function per op: `apply(run, *tensors, rest)`, `run` the forward below it.

    With `fixed`, (the first tensor's dtype, rest), a Function of one plan, whose forward has run
    already: `apply((y,), x)`. It keeps nothing but y, and so costs 0.3 us less.
    """
    rule = op.autograd
    many_outputs = "," in op.schema.partition("->")[2]
    arguments, tensors = op.arguments, op.tensor_count
    places = op.kept_places if rule is not None else ()

    def forward_done(ctx: Any, made: Args, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(made[0])
        y: torch.Tensor = made[0]
        return y

    def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
        *given, rest = args
        outputs = run(*given, *rest)
        if rule is not None:
            results = outputs if many_outputs else (outputs,)
            ctx.save_for_backward(*[given[i] if ours else results[i] for ours, i in places])
        ctx.rest = (given[0].dtype, rest)
        if many_outputs:
            ctx.set_materialize_grads(False)
            ctx.like = [(o.shape, o.dtype, o.device) for o in outputs]
        return outputs

    def backward(ctx: Any, *grads: Any) -> Any:
        if rule is None and op.public is not None:
            raise RuntimeError(
                f"{op.name}: it is forward only, and backward was called through its result. Call "
                "it under torch.no_grad(), or norm and quantise in ops that have a gradient."
            )
        if rule is None:
            raise RuntimeError(
                f"{op.name}: double backward is not implemented. "
                "Differentiate twice through torch's own function."
            )
        if many_outputs and any(grad is None for grad in grads):
            grads = tuple(map(_or_zeros, grads, ctx.like, rule.op.optional))
        dtype, (*rest, wanted) = fixed or ctx.rest
        needs = dict(zip(arguments[:tensors], ctx.needs_input_grad[1:], strict=False))
        saved = rule.saved(ctx.saved_tensors, dtype, tuple(rest), needs)
        twin = wanted if wanted and rule.op.backend(wanted) else None
        results = call(rule.op, (*grads, *saved), twin)
        results = results if isinstance(results, tuple) else (results,)
        by_name = {n: r for names, r in zip(rule.gradients, results, strict=True) for n in names}
        wanted_grads = (by_name.get(n) if need else None for n, need in needs.items())
        return (None, *wanted_grads) if fixed else (None, *wanted_grads, None)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            f"{op.name}: forward-mode AD is not implemented. Use reverse mode, or torch's function."
        )

    body = {
        "forward": staticmethod(forward_done if fixed else forward),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
    }
    return type(f"{op.name}_autograd", (torch.autograd.Function,), body)


def _or_zeros(grad: torch.Tensor | None, like: Args, optional: bool) -> torch.Tensor | None:
    """The gradient of a result that nobody used: none, if the backward knows what to do with it."""
    if grad is not None or optional:
        return grad
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def register_with_backward(op: Op) -> Callable[..., Any]:
    """Register an op and, once, the backward it names."""
    if op.autograd is not None and op.autograd.op.name not in calls:
        register(op.autograd.op)
    return register(op)


def _register_autocast(op: Op, operator: Any) -> None:
    keys = {"AutocastCUDA": torch._C.DispatchKey.AutocastCUDA}
    keys["AutocastCPU"] = torch._C.DispatchKey.AutocastCPU
    rule = op.autocast
    assert rule is not None
    for name, key in keys.items():
        excluded = torch._C.DispatchKeySet(key)

        def autocast(*args: Any, excluded: Any = excluded) -> Any:
            *plain_args, backend = _with_backend(op, args)
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return operator(*rule(*plain_args), backend)

        LIBRARY.impl(op.name, autocast, name)
