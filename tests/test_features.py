"""verify/features.py: every two options meet, every three on a GPU; what fails is named by them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tilewright import dispatch, gpu
from tilewright.dims import meta_inputs
from tilewright.ops import registry
from tilewright.verify import CHECKS, Context, compare, features, plan
from tilewright.verify.compare import Verdict

Factors = Mapping[str, Sequence[str]]

OPS = [name for name, op in registry().items() if op.features is not None]
BACKENDS = [(name, b.name) for name in OPS for b in registry()[name].backends if b.features]
IDS = [" ".join(pair) for pair in BACKENDS]
H200 = gpu.pretend("H200")
SMALL: dict[str, Factors] = {
    "even": {"a": "01", "b": "01", "c": "01", "d": "01"},
    "uneven": {"a": "01234", "b": "0", "c": "012", "d": "01"},
    "just enough": {"a": "012", "b": "012", "c": "01"},
}


def factors_of(op: str, device: str) -> Factors:
    declared = registry()[op].features
    assert declared is not None
    levels = {name: list(levels) for name, levels in declared(device == "cuda").items()}
    return {**levels, features.DTYPE: list(features.DTYPES)}


def missing(factors: Factors, calls: Sequence[Mapping[str, str]], strength: int) -> set[Any]:
    """What never meets, by looking at every call for every choice of factors."""
    never = set()
    for chosen in itertools.combinations(factors, strength):
        wanted = set(itertools.product(*(factors[name] for name in chosen)))
        met = {tuple(call[name] for name in chosen) for call in calls}
        assert met <= wanted  # a level of another factor would be no level
        never |= {(chosen, levels) for levels in wanted - met}
    return never


# --- the cover -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("factors", SMALL.values(), ids=SMALL)
def test_every_few_levels_meet(factors: Factors, strength: int) -> None:
    calls = features.cover(factors, strength)
    assert all(list(call) == list(factors) for call in calls)
    assert not missing(factors, calls, strength)
    without_last = missing(factors, calls[:-1], strength)
    assert without_last, "the last call brings nothing"


def test_a_cover_is_no_larger_than_it_needs_to_be() -> None:
    """Three levels of each of two factors take nine calls, and a third factor comes along."""
    assert len(features.cover(SMALL["just enough"], 2)) == 9
    assert len(features.cover(SMALL["even"], 2)) <= 6  # five would do


def test_a_cover_is_always_the_same() -> None:
    for strength in (2, 3):
        first, again = (features.cover(SMALL["uneven"], strength) for _ in range(2))
        assert first == again


@pytest.mark.parametrize("device", features.STRENGTH)
@pytest.mark.parametrize("op", OPS)
def test_the_options_of_an_op_meet(op: str, device: str) -> None:
    calls = features.calls(op, device)
    levels = [features.from_text(text) for text, *_ in calls]
    factors = factors_of(op, device)
    assert not missing(factors, levels, features.STRENGTH[device])
    assert len({text for text, *_ in calls}) == len(calls)
    declared = registry()[op].features
    assert declared is not None
    for chosen, (_, dims, dtype) in zip(levels, calls, strict=True):
        assert dtype == features.DTYPES[chosen[features.DTYPE]]
        for name, levels_of in declared(device == "cuda").items():
            assert dims.items() >= levels_of[chosen[name]].items()  # none undoes another


def test_strength_is_of_the_device() -> None:
    assert features.STRENGTH == {"cpu": 2, "cuda": 3}
    assert OPS == ["attention"]
    assert not features.calls("relu", "cpu")


@pytest.mark.parametrize("op", OPS)
def test_levels_are_read_back_from_their_text(op: str) -> None:
    for levels in features.cover(factors_of(op, "cpu"), 2):
        assert features.from_text(features.as_text(levels)) == levels


# --- the cover of a backend ----------------------------------------------------------------------


def refusal(op: str, backend: str, dims: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    declared, args = registry()[op], meta_inputs(registry()[op], dims, dtype)
    named = declared.backend(backend)
    assert named is not None
    return dispatch.refusal(named, declared, args, args[0], H200, pretending=True)


def served(op: str, backend: str) -> Factors:
    """The op's levels that the backend takes in an otherwise plain call: it is asked for each."""
    declared = registry()[op].features
    assert declared is not None
    factors: dict[str, Any] = {**declared(False), features.DTYPE: features.DTYPES}
    plain = {name: next(iter(levels)) for name, levels in factors.items()}
    plain[features.DTYPE] = "bfloat16"
    found: dict[str, list[str]] = {name: [] for name in factors}
    for name, level in ((name, level) for name, levels in factors.items() for level in levels):
        dims, chosen = {}, {**plain, name: level}
        for other in declared(False):
            dims |= factors[other][chosen[other]]
        if refusal(op, backend, dims, features.DTYPES[chosen[features.DTYPE]]) is None:
            found[name].append(level)
    return found


def test_backends_that_lack_options_have_covers_of_their_own() -> None:
    assert BACKENDS == [("attention", "naive"), ("attention", "gluon")]
    gluon = served("attention", "gluon")
    assert gluon["ALiBi"] == gluon["bias"] == ["no"]
    assert gluon[features.DTYPE] == ["float16", "bfloat16"]
    assert served("attention", "naive")["sequences"] == ["bhsd", "bshd"]
    for backend in ("triton", "torch"):  # they take all that the op has
        assert served("attention", backend) == factors_of("attention", "cpu")
        for device in features.STRENGTH:
            calls = features.calls("attention", device, backend)
            assert calls == features.calls("attention", device)


@pytest.mark.parametrize("device", features.STRENGTH)
@pytest.mark.parametrize(("op", "backend"), BACKENDS, ids=IDS)
def test_the_options_that_a_backend_serves_meet(op: str, backend: str, device: str) -> None:
    named = registry()[op].backend(backend)
    assert named is not None and named.features is not None
    own = {n: list(of) for n, of in named.features(device == "cuda").items()}
    wanted = {**own, **served(op, backend)}  # what the op does not have is the backend's to say
    calls = features.calls(op, device, backend)
    levels = [features.from_text(text) for text, *_ in calls]
    assert not missing(wanted, levels, features.STRENGTH[device])
    assert len({text for text, *_ in calls}) == len(calls) <= len(features.calls(op, device))


@pytest.mark.parametrize("device", features.STRENGTH)
@pytest.mark.parametrize(("op", "backend"), BACKENDS, ids=IDS)
def test_a_backend_serves_every_call_of_its_cover(op: str, backend: str, device: str) -> None:
    for text, dims, dtype in features.calls(op, device, backend):
        assert refusal(op, backend, dims, dtype) is None, text


def test_heads_are_as_wide_as_their_level_says() -> None:
    widths = set()
    for text, dims, dtype in features.calls("attention", "cuda", "gluon"):
        q, k, v, *_ = meta_inputs(registry()["attention"], dims, dtype)
        levels = features.from_text(text)
        width = int(levels["head dim"])
        assert q.shape[-1] == k.shape[-1] == width
        assert v.shape[-1] == (width if levels["value dim"] == "same" else 40)
        widths.add(width)
    assert widths == {64, 80, 96, 128, 192, 256}


# --- the check -----------------------------------------------------------------------------------


def judged(cases: int, seed: int = 0) -> list[Any]:
    context = Context(registry()["attention"], "torch", "cpu", False, cases, seed)
    return list(CHECKS["features"](context))


def test_a_call_that_is_wrong_is_reported_with_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softcap with packed sequences is wrong, and nothing else."""

    def wrong_together(op: Any, args: Any, *_: Any, **__: Any) -> Any:
        given = dict(zip(op.arguments, args, strict=True))
        return Verdict(2.0 if given["softcap"] and given["layout"] == "thd" else 0.5), ()

    monkeypatch.setattr(compare, "forward", wrong_together)
    monkeypatch.setattr(compare, "backward", lambda *_, **__: (Verdict(), ()))
    results = judged(len(features.calls("attention", "cpu")))
    failed = [r for r in results if not r.passed]
    assert 0 < len(failed) < len(results) // 2
    for result in failed:
        levels = features.from_text(result.case)
        assert (levels["sequences"], levels["softcap"]) == ("packed", "yes")
        assert (result.check, result.dtype) == ("features", levels[features.DTYPE])
        again = [r for r in judged(1, result.seed) if not r.passed]  # as its repro line says
        assert [r.case for r in again] == [result.case]
        assert f"--only features --backend torch --seed {result.seed}" in result.repro("cpu")


def test_a_plan_runs_every_call_once() -> None:
    count = len(features.calls("attention", "cpu"))
    steps = plan(["attention"], only=["features"], backend="triton", cases=10_000)
    assert [s for _, c in steps for s in range(c.seed, c.seed + c.cases)] == list(range(count))
    few = plan(["attention"], only=["features"], backend="triton", cases=3, seed=count - 2)
    assert [s for _, c in few for s in range(c.seed, c.seed + c.cases)] == [count - 2, count - 1]
    assert not plan(["relu"], only=["features"])
    assert not plan(["attention"], only=["features"], backend="gluon")  # no CPU runs it
    steps = plan(["attention"], device="cuda", only=["features"], backend="gluon")
    count = len(features.calls("attention", "cuda", "gluon"))
    assert [s for _, c in steps for s in range(c.seed, c.seed + c.cases)] == list(range(count))


def test_inputs_of_a_call_are_what_its_levels_say() -> None:
    for text, dims, dtype in features.calls("attention", "cpu"):
        context = Context(registry()["attention"], "torch", "cpu", False, 1, 0)
        given = dict(zip(context.op.arguments, context.inputs(dims, dtype, 0), strict=True))
        levels = features.from_text(text)
        assert (given["sinks"] is not None) == (levels["sinks"] == "yes")
        assert (given["alibi_slopes"] is not None) == (levels["ALiBi"] != "no")
        assert (given["bias"] is not None) == (levels["bias"] != "no")
        assert (given["seq_lens_k"] is not None) == (levels["sequences"] == "padded")
        assert (given["cu_seqlens_q"] is not None) == (levels["sequences"] == "packed")
        assert isinstance(given["q"], torch.Tensor) and given["q"].dtype == dtype
