"""explain(): which backend would serve a call, why, and why not the others.

Works on any tensors, meta ones included, and for a GPU that is not there: the public function runs
up to its registered op, where `library` hands the call over instead of running it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from tilewright import dispatch, functional, library
from tilewright import gpu as gpus
from tilewright.errors import InputError
from tilewright.gpu import Gpu
from tilewright.ops import registry
from tilewright.spec import Args, Choice, Op, on_meta
from tilewright.toolkit import recording


@dataclass(frozen=True)
class Explanation:
    op: str
    backend: str
    asked_by: str
    gpu: str | None
    refused: dict[str, str]
    kernels: tuple[str, ...] = ()
    bytes_moved: int = 0
    floor_us: float | None = None  # bytes over the datasheet's bandwidth; None where unknown
    predicted_us: float | None = None  # by a table of times measured near this shape; None: no such
    predicted_by: str = ""  # which table and bucket, and what it says of each backend
    backward: str | None = None
    backward_refused: dict[str, str] = field(default_factory=dict)  # of backends before that one

    def __str__(self) -> str:
        where = f"on {self.gpu}" if self.gpu else "on the CPU"
        lines = [f"{self.op} {where}: {self.backend} ({self.asked_by})"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        if self.kernels:
            lines.append(f"  launches {', '.join(self.kernels)}")
        if self.floor_us is not None:
            lines.append(
                f"  moves {self.bytes_moved:,} bytes: at least {_short(self.floor_us)} us at the "
                "datasheet's bandwidth"
            )
        if self.predicted_us is not None:
            lines.append(f"  predicted: {_short(self.predicted_us)} us by {self.predicted_by}")
        if self.backward:
            lines.append(f"  backward: {self.backward}")
        if self.backward != self.backend:  # else the reasons are those above
            refused = self.backward_refused.items()
            lines += [f"    not {name}: {reason}" for name, reason in refused]
        return "\n".join(lines)


def _short(us: float) -> str:
    return f"{us:.1f}" if us >= 1 else f"{us:.2g}"


def explain(
    op: str,
    *args: Any,
    gpu: str | int | Gpu | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain a call: `explain("rms_norm", x, (4096,), weight, gpu="h100")`.

    `args` and `kwargs` are the public function's: an op's, or one of tilewright.functional, which
    may end at an op of another name, or at torch. `gpu` pretends that the tensors lie on that GPU:
    a product's name, or an SM version such as "sm_86" or 86.

    >>> import torch, tilewright
    >>> x = torch.empty(8, 4096, device="meta", dtype=torch.bfloat16)
    >>> tilewright.explain("softmax", x, gpu="h100").backend
    'cuda_v2'
    """
    target = _target(gpu)
    given = (*args, *kwargs.values())
    if target is None and any(isinstance(a, torch.Tensor) and a.is_meta for a in given):
        target = gpus.detect()
    found, call, why = _registered_call(op, args, {**kwargs, "backend": backend})
    if why is not None:
        return _left_to_torch(op, found, call, why, target)
    return explain_call(found, call[:-1], gpu=target, backend=call[-1])


def explain_call(
    op: Op, args: Args, *, gpu: str | int | Gpu | None = None, backend: str | None = None
) -> Explanation:
    """The same for a registered op and its own arguments."""
    target = _target(gpu)
    op.check(*args)
    choice = dispatch.choose(op, args, backend=backend, gpu=target)
    moved = op.traffic(args).total
    bandwidth = choice.gpu.bandwidth if choice.gpu else None
    return Explanation(
        op=op.name,
        backend=choice.backend.name,
        asked_by=choice.asked_by,
        gpu=choice.gpu.name if choice.gpu else None,
        refused=dict(choice.refused),
        kernels=kernels(choice, args),
        bytes_moved=moved,
        floor_us=moved / bandwidth * 1e6 if bandwidth else None,
        **_predicted(op, args, choice),
        **_backward(op, args, choice),
    )


def _left_to_torch(name: str, op: Op, args: Args, why: str, gpu: Gpu | None) -> Explanation:
    """For a call that the public function gives to torch's own function, not to `op`."""
    asked_by = dispatch.requested(op, args[-1])[1]
    choice = dispatch.choose(op, args[:-1], backend="torch", gpu=gpu)
    return Explanation(
        op=name,
        backend="torch",
        asked_by=asked_by,
        gpu=choice.gpu.name if choice.gpu else None,
        refused=dict.fromkeys((backend for backend, _ in choice.refused), why),
    )


def _target(gpu: str | int | Gpu | None) -> Gpu | None:
    return gpu if gpu is None or isinstance(gpu, Gpu) else gpus.pretend(str(gpu))


def _registered_call(name: str, args: Args, kwargs: dict[str, Any]) -> tuple[Op, Args, str | None]:
    """The op and arguments that the public function `name` would run, or why it would not."""
    op = registry().get(name)
    public = op.public if op is not None else _faces().get(name)
    if public is None:
        known = ", ".join((*registry(), *_faces()))
        raise InputError(f"explain: op is {name!r}; it must be one of {known}.")
    thread, listener = get_ident(), []  # type: ignore[var-annotated]
    library.capturing[thread] = listener
    try:
        public(*args, **kwargs)
    except library.Captured:
        found: tuple[Op, Args, str | None] = listener[0]
    else:
        raise AssertionError(f"{name} returned without reaching its op")
    finally:
        del library.capturing[thread]
    if op is not None and found[0].name != name != op.public_name:
        raise InputError(
            f"explain: op is {name!r}, and with these arguments {op.public_name} runs "
            f"{found[0].name!r}. Ask for {op.public_name!r}, with the arguments of your call."
        )
    return found


def _faces() -> dict[str, Callable[..., Any]]:
    """torch's functions that stand on an op of another name."""
    names = (name for name in functional.__all__ if name not in registry())
    return {name: getattr(functional, name) for name in names}


def kernels(choice: dispatch.Choice, args: Args) -> tuple[str, ...]:
    """Names of the kernels that this choice launches, as a profiler shows them."""
    if choice.backend.technology == "torch" or choice.gpu is None:
        return ()
    try:
        entry = dispatch.load(choice.backend.entry)
    except ImportError:
        return ()
    with recording.recording() as requests:
        entry(choice.gpu, *on_meta(args))
    return tuple(recording.kernel_name(r) for r in requests)


def expected(op: Op, gpu: Gpu, args: Args) -> dict[Choice, float]:
    """What may serve a call, in the order of ties, and the model's word on each."""
    assert op.tuning is not None
    model = dispatch.load(op.tuning.expected)
    choices = dispatch.load(op.tuning.choices)(gpu, *args)
    return {choice: model(gpu, choice, *args) for choice in choices}


def _predicted(op: Op, args: Args, choice: dispatch.Choice) -> dict[str, Any]:
    """What the table of this GPU says of the chosen backend, beside the others."""
    if op.tuning is None or choice.gpu is None:
        return {}
    from tilewright import tuned  # tables are nothing that an import should wait for

    place = dispatch.load(op.tuning.place)(*args)
    found = tuned.decide(choice.gpu, op.name, place, expected(op, choice.gpu, args))
    if found is None or choice.backend.name not in found.best:
        return {}
    times = ", ".join(f"{name} {_short(us)}" for name, (_, us) in found.best.items())
    bucket = f"bucket {found.bucket.dims}, {found.bucket.dtype}"
    by = f"the table of {found.device} ({bucket}): {times}"
    return {"predicted_us": found.best[choice.backend.name][1], "predicted_by": by}


def _backward(op: Op, args: Args, choice: dispatch.Choice) -> dict[str, Any]:
    if op.autograd is None:
        return {}
    backward, call = op.in_phase(args, "backward")
    twin = backward.backend(choice.backend.name) if choice.asked_by != "automatic" else None
    wanted = twin.name if twin else None
    found = dispatch.choose(backward, call, backend=wanted, gpu=choice.gpu)
    before = itertools.takewhile(lambda b: b is not found.backend, backward.backends)
    earlier = {b.name for b in before}
    refused = {name: reason for name, reason in found.refused if name in earlier}
    return {"backward": found.backend.name, "backward_refused": refused}
