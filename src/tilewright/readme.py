"""python -m tilewright.readme: tables and pictures of the documents, from declarations and records.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. What it says comes from the
registry or from a file under results/, never from a hand; a record that is missing makes a table
that says so. A picture carries a digest of the data that it draws. `--check` changes nothing and
exits 1 if a document or a picture differs from what the records say.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewright import compat as aliases
from tilewright.attending import HEADS
from tilewright.bench import tables
from tilewright.bench.contest import (
    NO_NUMBER,
    SHORT,
    Contest,
    contests,
    count,
    has_number,
    micros,
    time_of,
)
from tilewright.bench.record import Record, Row, read
from tilewright.bench.rivals import NAMES
from tilewright.bench.standings import standings
from tilewright.dims import meta_inputs, parse
from tilewright.gpu import Gpu, known, pretend
from tilewright.matrix import Ledger
from tilewright.ops import registry
from tilewright.ops.matmul import routes
from tilewright.profiling.example import worked_example
from tilewright.spec import Backend, Op
from tilewright.tuned import file as tuned_file
from tilewright.verify import features

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tilewright.bench.canvas import Picture

NOT_MEASURED = "not measured yet"


def _folder(op: Op) -> str:
    """The folder of ops/ that holds it."""
    return op.reference.__module__.split(".")[-2]


OP_FOLDERS = tuple(dict.fromkeys(map(_folder, registry().values())))
REGION = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def ops(root: Path) -> str:
    """Every op and its backends, from the declarations."""
    rows = []
    for op in registry().values():
        name = f"`{op.name}`"
        if op.public_name != op.name:
            name += f" (through `{op.public_name}`)"
        backward = op.autograd.op.backends if op.autograd else ()
        kernels = [b for b in op.backends if b.technology != "torch"]
        dtypes = dict.fromkeys(
            str(d).removeprefix("torch.") for b in kernels for d in b.dtypes or ("any float",)
        )
        sms = sorted({b.min_sm for b in kernels})
        rows.append(
            (name, op.summary, _names(op.backends), _names(backward), ", ".join(dtypes),
             ", ".join(map(str, sms)))
        )  # fmt: skip
    heads = ("op", "what", "forward", "backward", "dtypes of the kernels", "minimum SM")
    return _table(heads, rows)


def host_cost(root: Path) -> str:
    """CPU time per call beside torch's, from results/h200/host.json."""
    record = _record(root, "h200/host.json")
    if record is None:
        return NOT_MEASURED
    found: dict[tuple[str, str], dict[bool, Any]] = defaultdict(dict)
    for row in record["rows"]:
        found[row["op"], row["contender"]][row["grad"]] = row
    rows = []
    for (op, contender), by_grad in found.items():
        cells = [f"`{op}`", contender]
        for grad in (False, True):
            facts = by_grad.get(grad)
            cells.append(f"{facts['median_us']:.1f}" if facts else "")
            cells.append(f"{facts['over_torch']:.2f}" if facts else "")
        rows.append(cells)
    heads = ("op", "contender", "no grad, µs", "over torch", "with grad, µs", "over torch")
    case = record["case"]
    what = f"{case['rows']} x {case['columns']}, {case['dtype']}; medians"
    return f"{_table(heads, rows)}\n\n{what}; {_environment(record)}."


def verified(root: Path) -> str:
    """What `verify` ran on a GPU, from results/h200/verify-*.json; full runs stand before quick."""
    paths = sorted((root / "results" / "h200").glob("verify-*.json"))
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    if not records:
        return NOT_MEASURED
    chosen: dict[tuple[str, str], str] = {}  # the record of a kernel, by name
    for name in sorted(records, key=lambda name: not records[name]["full"]):
        full = records[name]["full"]
        for kernel in sorted({(row["op"], row["backend"]) for row in records[name]["checks"]}):
            other = chosen.setdefault(kernel, name)
            if other != name and records[other]["full"] == full:
                raise ValueError(f"{other} and {name} both hold {' '.join(kernel)}; keep one")
    rows = []
    for (op, backend), name in sorted(chosen.items()):
        mine = [r for r in records[name]["checks"] if (r["op"], r["backend"]) == (op, backend)]
        run = (sum(row["run"] for row in mine if row["phase"] == phase) for phase in PHASES)
        failed = sum(row["failed"] for row in mine)
        worst = max(row["worst_error_over_tolerance"] for row in mine)
        kind = "full" if records[name]["full"] else "quick"
        counts = (f"{count:,}" for count in run)
        rows.append((f"`{op}`", backend, kind, *counts, f"{failed:,}", f"{worst:.2f}"))
    heads = ("op", "backend", "run", "forward cases", "backward cases", "other checks", "failures",
             "worst error / tolerance")  # fmt: skip
    used = sorted(set(chosen.values()))
    where = "; ".join(dict.fromkeys(_environment(records[name]) for name in used))
    return f"{_table(heads, rows)}\n\n{where}; records {', '.join(f'`{name}`' for name in used)}."


PHASES = ("forward", "backward", "")


def attention_features(root: Path) -> str:
    """Which options of attention met on a GPU, from the newest record of each backend."""
    names = ("verify-attention", "verify-attention-gluon")
    records = {name: found for name in names if (found := _record(root, f"h200/{name}.json"))}
    rows: dict[str, list[Any]] = {}
    for record in records.values():
        there = [row for row in record.get("features", ()) if row["op"] == "attention"]
        for backend in dict.fromkeys(row["backend"] for row in there):
            rows[backend] = [row for row in there if row["backend"] == backend]
    if not rows:
        return NOT_MEASURED
    tables = [_meetings(backend, some) for backend, some in rows.items()]
    words = ("record" if len(records) == 1 else "records") + " "
    words += ", ".join(f"`{name}.json`" for name in records)
    return "\n\n".join([*tables, f"{_environment(next(iter(records.values())))}; {words}."])


def _meetings(backend: str, rows: Sequence[Any]) -> str:
    """A line for each level of each factor, a column for each factor it has met."""
    passed: dict[str, bool] = {}  # a call's levels -> whether all its phases did
    for row in rows:
        passed[row["levels"]] = passed.get(row["levels"], True) and row["passed"]
    calls = {text: features.from_text(text) for text in passed}
    factors = _factors(backend, calls.values())
    lines = []
    for factor, level in ((f, level) for f, levels in factors.items() for level in levels):
        mine = [text for text, levels in calls.items() if levels.get(factor) == level]
        good = [calls[text] for text in mine if passed[text]]
        cells = [f"{factor}: {level}"]
        for other, levels in factors.items():
            met = Counter(call.get(other) for call in good)
            shown = f"{sum(map(bool, map(met.get, levels)))}/{len(levels)}"
            shown += f" · {min(met[one] for one in levels)}"
            if len(good) < len(mine):
                shown = f"FAILED {len(mine) - len(good)}"
            cells.append(NO_NUMBER if other == factor else shown)
        lines.append((*cells, *_phases([row for row in rows if row["levels"] in mine])))
    good = [calls[text] for text in calls if passed[text]]
    pairs, triples = (_of_all(good, factors, strength) for strength in (2, 3))
    words = (
        f"`{backend}`: {len(calls):,} calls, {_counted(rows)}. Of the levels of different factors "
        f"{pairs} pairs and {triples} triples met in calls that passed."
    )
    return f"{_table(('', *factors, 'forward', 'backward'), lines)}\n\n{words}"


def _factors(backend: str, calls: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Every factor and its levels: those that are declared, and any other that was run."""
    declared = features.declared("attention", "cuda", backend)
    found = {factor: dict.fromkeys(levels) for factor, levels in declared.items()}
    for call in calls:
        for factor, level in call.items():
            found.setdefault(factor, {})[level] = None
    return {factor: list(levels) for factor, levels in found.items()}


def _phases(rows: Sequence[Any]) -> Iterator[str]:
    """Checks of each phase that passed, or that did not."""
    for phase in ("forward", "backward"):
        passed = [row["passed"] for row in rows if row["phase"] == phase]
        yield f"{len(passed):,}" if all(passed) else f"FAILED {passed.count(False)}"


def _counted(rows: Sequence[Any]) -> str:
    phases = Counter(row["phase"] for row in rows)
    failures = sum(not row["passed"] for row in rows)
    checks = " and ".join(f"{phases[phase]:,} {phase}" for phase in ("forward", "backward"))
    return f"{checks} checks, {count(failures, 'failure')}"


def _of_all(
    calls: Sequence[Mapping[str, str]], factors: Mapping[str, Sequence[str]], strength: int
) -> str:
    """How many combinations of so many levels the calls have, of all that there are."""
    met, all_ = 0, 0
    for chosen in itertools.combinations(factors, strength):
        found = {tuple(call.get(name) for name in chosen) for call in calls}
        wanted = set(itertools.product(*(factors[name] for name in chosen)))
        met, all_ = met + len(found & wanted), all_ + len(wanted)
    return f"{met:,} of {all_:,}"


def attention_floors(found: Record) -> str:
    """What the products of attention take at the roof of the tensor cores."""
    roof = next((r.value for r in found.roofs if r.name == "mma bf16"), None)
    if roof is None:
        return NOT_MEASURED
    op, rows = registry()["attention"], []
    for case in (case for case in op.cases if case.group in ("sweep", "sparse")):
        forward, backward = (
            op.cost_in(case.dims, torch.bfloat16, phase).flops for phase in ("forward", "backward")
        )
        times = (forward, backward, 1.4 * backward)  # seven products instead of five
        flops = (f"{n / 1e9:,.0f}" for n in (forward, backward))
        rows.append((case.name, *flops, *(micros(n / (roof * 1e6)) for n in times)))
    heads = ("case, bf16", "forward, GFLOP", "backward, GFLOP", "forward, µs", "backward, µs",
             "seven products, µs")  # fmt: skip
    return f"{_table(heads, rows)}\n\nAt {roof:,.0f} TFLOP/s, the roof `mma bf16`."


def attention_speed(found: Record) -> str:
    """torch's two kernels beside ours, by head dim and tokens."""
    there = [
        c
        for c in contests(found.rows)
        if c.first.op == "attention" and c.entered and not c.first.dims.get("softcap")
    ]
    sizes = sorted({c.first.dims["shape"][2] for c in there})
    lines: dict[tuple[str, ...], dict[tuple[int, bool], float]] = defaultdict(dict)
    for contest, rival in itertools.product(there, ("sdpa-flash", "sdpa-cudnn")):
        dims, faster = contest.first.dims, contest.speedup(rival)
        if faster is not None:
            line = (contest.first.phase, _of_heads(dims), rival)
            lines[line][dims["shape"][2], dims["causal"]] = faster
    places = list(itertools.product(sizes, (False, True)))
    rows = [
        (*line, *(f"{at[place]:.2f}" if place in at else NO_NUMBER for place in places))
        for line, at in lines.items()
    ]
    if not rows:
        return NOT_MEASURED
    heads = ["", "head dim", "rival / ours"]
    heads += [f"{tokens:,} {'causal' if causal else 'full'}" for tokens, causal in places]
    words = []
    for phase, least in (("forward", 2048), ("backward", 0)):
        means = []
        for rival in ("sdpa-flash", "sdpa-cudnn"):
            some = [x for (p, _, r), at in lines.items() if (p, r) == (phase, rival)
                    for (tokens, _), x in at.items() if tokens >= least]  # fmt: skip
            means.append(f"{rival} {geometric_mean(some):.2f}" if some else NO_NUMBER)
        of = f" of {least:,} tokens and more" if least else ""
        words.append(f"{phase}{of}, {' and '.join(means)}")
    return f"{_table(heads, rows)}\n\nGeometric means: {'; '.join(words)}."


def _of_heads(dims: Mapping[str, Any]) -> str:
    """Their dim; and how many there are, unless they are 2048 columns."""
    _, heads, _, dim = dims["shape"]
    kv_heads = dims.get("kv_heads", heads)
    if kv_heads != heads:
        return f"{dim}, {kv_heads} of {heads} key heads"
    return f"{dim}" if heads * dim == 2048 else f"{dim}, {heads} heads"


def attention_sparse(found: Record) -> str:
    """Time over that of as much dense work: what is masked or not there should cost nothing."""
    ours = {  # what serves the call: the later, the better
        (r.case, r.phase): r
        for backend in ("triton", "gluon")
        for r in found.rows
        if r.contender == backend and has_number(r)
    }
    phases = [p for p in ("forward", "backward") if any(phase == p for _, phase in ours)]
    rows = []
    for case in (case for case in registry()["attention"].cases if case.group == "sparse"):
        dense_name = f"T16384 {'causal' if case.dims.get('causal') else 'full'}"
        cells: list[str] = []
        for phase in phases:
            row, dense = ours.get((case.name, phase)), ours.get((dense_name, phase))
            if row is None or dense is None or case.name == dense_name:
                continue
            work = row.flops / dense.flops
            cells += [f"{work:.0%}"] if not cells else []
            cells.append(f"{time_of(row) / time_of(dense) / work:.2f}")
            cells.append(NO_NUMBER)
            if row.host is not None and dense.host is not None:
                cells[-1] = f"{row.host.median / dense.host.median / work:.2f}"
        rows += [(case.name, *cells)] if cells else []
    heads = ["case", "of the work", *(x for p in phases for x in (p, "in a queue of calls"))]
    return _table(heads, rows) if rows else NOT_MEASURED


RIVALS_OF_ATTENTION = ("fa4", "sdpa-cudnn", "sdpa-flash")


def attention_hopper(found: Record) -> str:
    """The forward beside its rivals: their times over ours, and our rate."""
    rows: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    beside_the_best: list[float] = []
    rates: dict[tuple[Any, ...], float] = {}
    for contest in (c for c in contests(found.rows) if c.first.op == "attention"):
        dims, ours, rival = contest.first.dims, contest.best, contest.best_rival
        if ours is None:
            continue
        _, heads, tokens, dim = dims["shape"]
        kv_heads, mask = dims.get("kv_heads", heads), "causal" if dims["causal"] else "full"
        softcap, name = bool(dims.get("softcap")), _of_heads(dims)
        rate = ours.flops / time_of(ours) / 1e6
        rates[dim, heads, kv_heads, tokens, mask, softcap] = rate
        if softcap:
            continue
        rows[name, mask, "TFLOP/s"][tokens] = f"{rate:.0f}{'*' if ours.flags else ''}"
        for row in map(contest.rows.get, RIVALS_OF_ATTENTION):
            if row is not None and has_number(row):
                faster, star = time_of(row) / time_of(ours), "*" if ours.flags or row.flags else ""
                rows[name, mask, f"{row.contender} / ours"][tokens] = f"{faster:.2f}{star}"
        if rival is not None and name == f"{dim}":
            beside_the_best.append(time_of(rival) / time_of(ours))
    if not rows:
        return NOT_MEASURED
    sizes = sorted({tokens for cells in rows.values() for tokens in cells})
    heads_ = ("head dim", "mask", "", *(f"{tokens:,} tokens" for tokens in sizes))
    lines = [(*line, *(at.get(n, NO_NUMBER) for n in sizes)) for line, at in rows.items()]
    words = []
    if beside_the_best:
        words.append(
            f"Beside the quickest rival of each cell with 2,048 columns: geometric mean "
            f"{geometric_mean(beside_the_best):.2f}, least {min(beside_the_best):.2f}."
        )
    for many, other in ((None, "as many"), (16, "16")):
        shared = [
            rate / own
            for (dim, heads, kv_heads, *rest), rate in rates.items()
            if kv_heads != heads and (own := rates.get((dim, many or heads, many or heads, *rest)))
        ]
        if shared:
            words.append(
                f"Heads that share keys over {other} with their own: {min(shared):.2f} to "
                f"{max(shared):.2f}, geometric mean {geometric_mean(shared):.2f}."
            )
    bent = [
        f"D{dim} T{tokens:,} {mask} {rate / plain:.2f}"
        for (dim, heads, kv_heads, tokens, mask, capped), rate in rates.items()
        if capped and (plain := rates.get((dim, heads, kv_heads, tokens, mask, False)))
    ]
    if bent:
        words.append(f"With a softcap over without: {', '.join(bent)}.")
    return f"{_table(heads_, lines)}\n\n{' '.join(words)}"


STEPS = {  # of docs/flash_attention.md: turns, lazy, order
    "a producer and consumers, overlap inside": (False, False, "one"),
    "consumers take turns": (True, False, "one"),
    "rescale lazily": (False, True, "one"),
    "blocks stay, tiles in pairs": (False, False, "pairs"),
}
SHOWN = ((64, 8192), (128, 8192), (256, 8192), (64, 1024), (128, 1024), (256, 1024))


def flash_attention_steps(root: Path) -> str:
    """cuDNN's time over that of each step, which is the first Gluon kernel with one thing more."""
    tuned, swept = _record(root, "h200/tune-attention.json"), _bench(root, "bench-sweep-attention")
    if tuned is None or swept is None:
        return NOT_MEASURED
    places = [(dim, tokens, causal) for dim, tokens in SHOWN for causal in (False, True)]
    there = {}
    for contest in contests(swept.rows):
        first = contest.first
        if (first.op, first.phase) == ("attention", "forward") and contest.entered:
            _, _, tokens, dim = first.dims["shape"]
            if _of_heads(first.dims) == f"{dim}" and not first.dims.get("softcap"):
                there[dim, tokens, first.dims["causal"]] = contest.speedup("sdpa-cudnn")
    rows = [("tiles, in Triton", *(_two(there.get(place)) for place in places))]
    cells = {(c["dim"], c["tokens"], c["causal"]): c for c in tuned["cells"]}
    widest = {64: 3, 128: 2, 256: 2}
    for name, flags in STEPS.items():
        found = []
        for place in places:
            us = next(
                c["us"]
                for c in cells[place]["candidates"]
                if (c["launch"]["turns"], c["launch"]["lazy"], c["launch"]["order"]) == flags
                and c["launch"]["workers"] == widest[place[0]]
            )
            found.append(_two(cells[place]["cudnn_us"] / us))
        rows.append((name, *found))
    best = (min(c["us"] for c in cells[place]["candidates"]) for place in places)
    ratios = (_two(cells[place]["cudnn_us"] / us) for place, us in zip(places, best, strict=True))
    rows.append(("the best of all candidates", *ratios))
    heads = [f"D{d} T{t:,} {'causal' if causal else 'full'}" for d, t, causal in places]
    words = (
        "cuDNN's time over ours. The first row is of `bench-sweep-attention.jsonl`, the others of "
        "`tune-attention.json`; each step is the second row with one thing more."
    )
    return f"{_table(('step', *heads), rows)}\n\n{words}\n\n{_environment(tuned)}."


def _two(ratio: float | None) -> str:
    return NO_NUMBER if ratio is None else f"{ratio:.2f}"


# --- trade-offs of a matrix product --------------------------------------------------------------

TUNED = Path("src", "tilewright", "tuned", "h200.json")
HALF = 2  # bytes
LAYERS = {  # (columns, depth) of b, as the tuned grid has them: layers of models in shapes.py
    "Llama-3-8B qkv": (6144, 4096),
    "Llama-3-70B down": (8192, 28_672),
}
SOME_ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
TICKS = (1, 16, 128, 1024, 8192)  # of a picture: further apart than their words are wide
ROUTES = {name: name for name in ("skinny", "gluon", "cuda", "triton")} | {"torch": "cuBLAS"}
FEW, MANY = 64, 512  # rows: those that `skinny` takes, and those of prefill
OURS = "ours"  # whichever kernel of ours the table names
MATMUL_RECORDS = tuple(f"bench-{suite}-matmul" for suite in ("model", "prefill", "decode", "sweep"))


def _intensity(m: int, n: int, k: int) -> float:
    """Flops per byte of a product of halves whose operands and result are moved once."""
    return 2 * m * n * k / (HALF * (m * k + k * n + m * n))


def _floors(gpu: Gpu, m: int, n: int, k: int) -> tuple[float, float]:
    """Microseconds at the datasheet's bandwidth, and at the rate of its tensor cores."""
    assert gpu.bandwidth is not None
    moved = HALF * (m * k + k * n + m * n)
    return moved / gpu.bandwidth * 1e6, 2 * m * n * k / gpu.peaks["fp16"] * 1e6


def matmul_ridges(root: Path) -> str:
    """Where bytes and flops of a product of halves take equally long, from datasheets."""
    rows = []
    for gpu in map(pretend, known()):
        if gpu.bandwidth is None or "fp16" not in gpu.peaks:
            continue
        ridge = gpu.peaks["fp16"] / gpu.bandwidth
        cells = [gpu.name, f"{gpu.peaks['fp16'] / 1e12:,.0f}", f"{gpu.bandwidth / 1e12:.2f}"]
        rows.append([*cells, f"{ridge:.0f}", *(_rows_at(ridge, *nk) for nk in LAYERS.values())])
    heads = ("GPU", "halves, TFLOP/s", "TB/s", "ridge, flops per byte")
    return _table([*heads, *(f"rows of {name}" for name in LAYERS)], rows)


def _rows_at(ridge: float, n: int, k: int) -> str:
    """The rows at which a layer reaches the ridge: those of `_intensity` that equal it."""
    left = n * k - ridge * (n + k)
    return f"{ridge * n * k / left:,.0f}" if left > 0 else NO_NUMBER


def matmul_intensity(root: Path) -> str:
    """Both floors of a layer, by rows, from the H200's datasheet."""
    gpu, rows = pretend("h200"), []
    for name, (n, k) in LAYERS.items():
        for m in SOME_ROWS:
            floors = _floors(gpu, m, n, k)
            bound = "bytes" if floors[0] > floors[1] else "flops"
            cells = (f"{m:,}", f"{_intensity(m, n, k):,.1f}", *map(micros, floors), bound)
            rows.append((f"{name}, {n:,} x {k:,}", *cells))
    heads = ("layer", "rows", "flops per byte", "bytes, µs", "flops, µs", "bound by")
    return f"{_table(heads, rows)}\n\nHalves on {gpu.name}, by its datasheet: floors, not times."


def _tuned(root: Path) -> tuned_file.Table | None:
    """What `tune` measured of matmul on an H200. A file that is there must be whole."""
    path = root / TUNED
    if not path.exists():
        return None
    device = tuned_file.Device.of(pretend("h200"))
    return tuned_file.read(path.read_text(encoding="utf-8"), device).get("matmul")


def _quickest(bucket: tuned_file.Bucket) -> dict[str, float]:
    """Microseconds of each route, by its quickest launch, in the order of ROUTES."""
    found: dict[str, float] = {}
    for choice, timed in bucket.times.items():
        found[choice.backend] = min(timed.us, found.get(choice.backend, timed.us))
    return {route: found[route] for route in ROUTES if route in found}


def _sizes(bucket: tuned_file.Bucket) -> tuple[int, int, int]:
    """(m, n, k), by its dims: coordinates are rounded."""
    found = re.match(r"(\d+)x(\d+),n=(\d+)", bucket.dims)
    assert found, bucket.dims
    m, k, n = map(int, found.groups())
    return m, n, k


def _tuned_words(table: tuned_file.Table) -> str:
    versions = (f"{name} {table.versions[name]}" for name in ("torch", "triton"))
    return f"{', '.join((table.device, *versions))}; table `tuned/{TUNED.name}`."


def matmul_routes(root: Path) -> str:
    """Who serves each bucket of the tuned grid, and cuBLAS's time over that of our best kernel."""
    table = _tuned(root)
    if table is None:
        return NOT_MEASURED
    lines: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    taken, ratios = Counter[str](), {False: list[float](), True: list[float]()}
    for bucket in table.buckets:
        us, (m, n, k) = _quickest(bucket), _sizes(bucket)
        ours = [time for route, time in us.items() if route != "torch"]
        if bucket.choice is None or "torch" not in us or not ours:
            continue
        ratio = us["torch"] / min(ours)
        taken[bucket.choice.backend] += 1
        ratios[m > FEW].append(ratio)
        line = f"{n:,} x {k:,}", "columns" if bucket.kind.endswith("T") else "rows"
        lines[line][m] = f"{ROUTES[bucket.choice.backend]} {ratio:.2f}"
    if not lines:
        return NOT_MEASURED
    sizes = sorted({m for cells in lines.values() for m in cells})
    rows = [(*line, *(at.get(m, NO_NUMBER) for m in sizes)) for line, at in lines.items()]
    heads = ("b", "lies by", *(count(m, "row") for m in sizes))
    won = ", ".join(f"{name} {taken[route]}" for route, name in ROUTES.items())
    words = [f"Of {taken.total()} products each route serves: {won}."]
    for many, some in ratios.items():
        where = f"Above {FEW} rows" if many else f"Up to {FEW} rows"
        if some:
            span = f"{min(some):.2f} to {max(some):.2f}"
            words.append(f"{where}: {span}, geometric mean {geometric_mean(some):.2f}.")
    return f"{_table(heads, rows)}\n\n{' '.join(words)}\n\n{_tuned_words(table)}"


class Bar(NamedTuple):
    """A kind of products, and the ratio below which one of them is counted."""

    kind: str
    low: float


def matmul_beside_cublas(root: Path) -> str:
    """cuBLAS's time over that of our kernels, by kernel and kind of product, in the records of
    bench and check_prefill.py, and over that of whichever the table names where cuBLAS is no route;
    and of check_routes.py's the quickest choice's over that of the one that was taken."""
    cells: dict[Bar, list[tuple[float, str]]] = defaultdict(list)

    def beside(kernel: str, dims: Mapping[str, Any], dtype: str, ratio: float) -> None:
        bar = _bar(kernel, dims, dtype)
        if bar is not None:
            cells[bar].append((ratio, f"{_of_matmul(dims)}, {SHORT[dtype]}"))

    records = [found for name in MATMUL_RECORDS if (found := _bench(root, name))]
    for contest in _distinct([each for found in records for each in contests(found.rows)]):
        theirs, first = contest.rows.get("vendor"), contest.first
        if first.phase != "forward":
            continue
        named = _named(first.dims, first.dtype) if first.dims["shape"][0] <= FEW else ""
        for kernel in ROUTES.keys() - {"torch"}:
            ours = contest.rows.get(kernel)
            if ours and theirs and has_number(ours) and has_number(theirs):
                ratio = time_of(theirs) / time_of(ours)
                beside(kernel, first.dims, first.dtype, ratio)
                if kernel == named:
                    beside(OURS, first.dims, first.dtype, ratio)
    for facts in _cells_of(root, "routes-prefill-matmul"):
        dims, times = parse(registry()["matmul"], facts["dims"], "readme"), facts["times"]
        named = _named(dims, facts["dtype"])
        best = {OURS: times[named]} if named in times else {}
        for kernel, us in (times | best).items() if "torch" in times else ():
            beside(kernel, dims, facts["dtype"], times["torch"] / us)
    for facts in _cells_of(root, "routes-matmul"):
        bar = Bar("routes, rows and layers that are in no table", 0.93)
        cells[bar].append((facts["part_of_best"], facts["dims"]))
    if not cells:
        return NOT_MEASURED
    rows = []
    for bar, some in cells.items():
        ratios = [ratio for ratio, _ in some]
        mean = f"{geometric_mean(ratios):.3f}" if all(ratios) else NO_NUMBER
        least, where = min(some)
        low = sum(ratio < bar.low for ratio in ratios)
        slow = f"{low} below {bar.low:g}"
        rows.append((bar.kind, str(len(some)), mean, f"{least:.2f} at {where}", slow))
    heads = ("kernel and products", "cells", "geometric mean", "least", "slow ones")
    return _table(heads, sorted(rows))


def _named(dims: Mapping[str, Any], dtype: str) -> str:
    """Which kernel of ours an H200's table names for a product, if cuBLAS is no route."""
    args = meta_inputs(registry()["matmul"], dims, getattr(torch, dtype))
    found = routes.ours(pretend("h200"), args)
    return found.choice.backend if found else ""


def _cells_of(root: Path, record: str) -> list[dict[str, Any]]:
    """Of a script's record: all lines but the first, which tells of the machine."""
    path = root / "results" / "h200" / f"{record}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines[1:]]


def _bar(kernel: str, dims: Mapping[str, Any], dtype: str) -> Bar | None:
    """None: it is not of interest."""
    (m, k), n = dims["shape"], dims["n"]
    is_square, lie = m == n == k, "NT" if dims.get("b") == "column" else "NN"
    shown = "ours, by the table" if kernel == OURS else f"`{kernel}`"
    on_hopper = kernel in (OURS, "cuda", "gluon")
    if dtype not in ("bfloat16", "float16"):
        tf32 = kernel == "gluon" and dims.get("precision") == "tf32" and is_square
        return Bar(f"{shown}, squares in tf32, {lie}", 0.9) if tf32 else None
    if on_hopper and m >= MANY:
        return Bar(f"{shown}, squares and prefill", 0.92)
    if kernel == "triton" and is_square and m in (4096, 8192):
        return Bar(f"{shown}, squares of 4096 and 8192, {lie}", 0.85)
    if kernel in (OURS, "cuda", "skinny") and m <= FEW:
        size = HALF * n * k / 1e6
        which = "of 100 MB and more" if size >= 100 else "of 32 to 100 MB" if size >= 32 else ""
        return Bar(f"{shown}, layers {which or 'under 32 MB'}", 1.0)
    return None


def matmul_curves(root: Path) -> str:
    """The picture of docs/tradeoffs.md, with what it says in words."""
    drawn = _drawn_routes(root)
    links = [f"![{_alt(svg)}]({PICTURES.name}/{name})" for name, svg in drawn.items()]
    return "\n\n".join(links) or NOT_MEASURED


class Point(NamedTuple):
    """A layer at some rows: who serves it, and the time of each route."""

    taken: str
    us: Mapping[str, float]


Curve = Mapping[int, Point]  # by rows


def _curves(table: tuned_file.Table) -> dict[str, Curve]:
    """By layer; b by columns, as a linear layer has it."""
    names = {sizes: name for name, sizes in LAYERS.items()}
    found: dict[str, dict[int, Point]] = {}
    for bucket in sorted(table.buckets, key=_sizes):
        m, n, k = _sizes(bucket)
        name = names.get((n, k))
        if name and bucket.kind == "half T" and bucket.choice:
            point = Point(bucket.choice.backend, _quickest(bucket))
            found.setdefault(name, {})[m] = point
    return {name: found[name] for name in LAYERS if name in found}


def _drawn_routes(root: Path) -> dict[str, str]:
    """File name -> SVG: time over rows, a line for each route."""
    from tilewright.bench.svg import svg

    table = _tuned(root)
    curves = _curves(table) if table else {}
    if table is None or not curves:
        return {}
    picture = _route_picture(table.device.removeprefix("NVIDIA "), curves)
    return {f"{picture.name}.svg": svg(picture, f"tw-{picture.name}", standalone=True)}


def _route_picture(gpu: str, curves: Mapping[str, Curve]) -> Picture:
    from tilewright.bench import canvas

    title = f"matmul on {gpu}, bfloat16: time by rows of a, a line for each route"
    with canvas.style():
        figure = canvas.figure(title, 4.4)
        grid = figure.subplots(2, len(curves), squeeze=False, sharex=True, height_ratios=[1.7, 1])
        for (name, curve), times, ratios in zip(curves.items(), grid[0], grid[1], strict=True):
            times.set_title(name)
            _draw_routes(times, ratios, curve, LAYERS[name])
        grid[0][0].set_ylabel("µs")
        grid[1][0].set_ylabel("µs / quickest")
        there = {
            route for curve in curves.values() for point in curve.values() for route in point.us
        }
        entries = [(ROUTES[route], _look(route)) for route in ROUTES if route in there]
        canvas.legend(figure, [*entries, canvas.roof_entry("floor by the datasheet")])
    digest = hashlib.sha256(json.dumps(curves).encode()).hexdigest()
    return canvas.Picture("routes", title, _route_words(curves), digest, figure)


def _draw_routes(times: Axes, ratios: Axes, curve: Curve, layer: tuple[int, int]) -> None:
    """Times above; below how many times as long as the quickest each takes, up to twice."""
    from tilewright.bench import canvas

    gpu, sizes = pretend("h200"), list(curve)
    floors = [max(_floors(gpu, m, *layer)) for m in sizes]
    times.plot(sizes, floors, color=canvas.light("ink"), ls=canvas.DASHED, lw=1)
    for route in reversed(ROUTES):  # ours on top
        mine = {m: point.us[route] for m, point in curve.items() if route in point.us}
        times.plot(list(mine), list(mine.values()), **_look(route))
        slower = [us / min(curve[m].us.values()) for m, us in mine.items()]
        ratios.plot(list(mine), slower, **_look(route))
    everything = (us for point in curve.values() for us in point.us.values())
    canvas.log_axis(times, [*floors, *everything], "y")
    ratios.set_xscale("log", base=2)
    told = [m for m in sizes if m in TICKS]
    ratios.set_xticks(told, [f"{m:,}" for m in told])
    ratios.set_xticks([], minor=True)
    ratios.set(xlabel="rows", ylim=(0.95, 2.0))


def _look(route: str) -> dict[str, Any]:
    from tilewright.bench import canvas

    contender = ("vendor", False) if route == "torch" else (route, True)
    look = {**canvas.entry(contender)[1], "markersize": 3.5, "linewidth": 1.2}
    return {**look, "color": canvas.light("cute")} if route == "skinny" else look


def _route_words(curves: Mapping[str, Curve]) -> str:
    """Who serves a layer, from how many rows on."""
    words = []
    for name, curve in curves.items():
        runs: list[str] = []
        before = ""
        for m, point in curve.items():
            if point.taken != before:
                runs.append(f"{ROUTES[point.taken]} from {m:,}")
            before = point.taken
        words.append(f"{name} is served, by rows of a, by {', '.join(runs)}.")
    return " ".join(words)


def compat(root: Path) -> str:
    """The names of other systems, from the docstring of compat.py."""
    lines = (aliases.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def compiled(root: Path) -> str:
    """The compile ledger, from results/compile/*.jsonl."""
    by_compiler: dict[str, list[Any]] = defaultdict(list)
    for built in Ledger(root / "results" / "compile").known.values():
        by_compiler[built.compiler].append(built)
    if not by_compiler:
        return NOT_MEASURED
    rows = []
    for compiler, binaries in sorted(by_compiler.items()):
        sms = ", ".join(map(str, sorted({b.sm for b in binaries})))
        spilling = sum(b.spills > 0 for b in binaries)
        violations = sum(bool(b.violation) for b in binaries)
        rows.append((compiler, sms, f"{len(binaries):,}", f"{spilling:,}", f"{violations:,}"))
    return _table(("compiler", "SMs", "binaries", "spilling", "violations"), rows)


def performance(found: Record) -> str:
    """What a plain call runs, beside every rival."""
    judged = _distinct([c for c in contests(found.rows) if c.entered])
    rivals = _rivals(judged)
    rows = []
    for contest in judged:
        best = contest.best
        cells = [f"`{contest.first.op}` {contest.first.phase}", contest.first.case]
        if best is None:
            rows.append([*cells, *[NO_NUMBER] * (3 + len(rivals))])
            continue
        cells += [best.contender, micros(best.us or 0), f"{best.of_roof or 0:.0%}"]
        rows.append([*cells, *_ratios(contest, best, rivals)])
    heads = ("op", "case", "backend", "µs", "of roof", *(f"{n} / ours" for n in rivals))
    return _table(heads, rows)


def families(root: Path) -> str:
    """How each family of ops fares against the fastest rival of each case, over all suites."""
    found = [r for name in MEASURED if (r := _bench(root, name))]
    rows = []
    for one in standings(_distinct([c for r in found for c in contests(r.rows)])):
        first, rival = one.worst.first, one.worst.best_rival
        dtype = SHORT.get(first.dtype, first.dtype)
        what = f"`{first.op}` {first.phase}, {_shape(first.dims)}, {dtype}"
        worst = f"{one.least:.2f} of {rival.contender if rival else NO_NUMBER}: {what}"
        counts = (len(one.ratios), one.faster, one.level, one.slower)
        rows.append((one.family, *map(str, counts), f"{one.mean:.2f}", worst))
    if not rows:
        return NOT_MEASURED
    heads = ("family", "cases", "faster", "level", "slower", "geometric mean", "worst case")
    return f"{_table(heads, rows)}\n\n{_environment(found[0].run)}."


def pictures(root: Path) -> str:
    """The pictures of results/h200/bench-model.jsonl, with what they say in words."""
    return "\n\n".join(_shown(root, PICTURES.name)) or NOT_MEASURED


def picture(root: Path) -> str:
    """The README's picture: ours against every rival."""
    shown = _shown(root, PICTURES.as_posix())
    return shown[0] if shown else NOT_MEASURED


def _shown(root: Path, folder: str) -> list[str]:
    return [f"![{_alt(svg)}]({folder}/{name})" for name, svg in _drawn_bench(root).items()]


def machines(root: Path) -> str:
    """Which SMs have records of runs, and how many binaries were compiled for each."""
    folder = root / "results" / "h200"
    run: dict[int, dict[str, None]] = defaultdict(dict)
    for path in sorted(folder.glob("verify-*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))["environment"]
        run[facts.get("sm") or 0][facts["gpu"]] = None
    ledger = Ledger(root / "results" / "compile")
    compiled = Counter(b.sm for b in ledger.known.values())
    if not compiled:
        return NOT_MEASURED
    rows = [
        (f"SM {sm}", f"run on {', '.join(run[sm])}" if run[sm] else "compiled only, never run",
         f"{count:,}")
        for sm, count in sorted(compiled.items())
    ]  # fmt: skip
    return _table(("", "state", "binaries compiled"), rows)


def run_on(root: Path) -> str:
    """The same in a sentence."""
    lines = [line.split(" | ") for line in machines(root).splitlines() if "SM " in line]
    if not lines:
        return NOT_MEASURED
    ran = [f"{sm[2:]} ({state[7:]})" for sm, state, _ in lines if state.startswith("run on")]
    only = [sm[5:] for sm, state, _ in lines if state.startswith("compiled only")]
    return (
        f"The kernels were run on {', '.join(ran)}. For SM {', '.join(only)} they were compiled "
        "and never run."
    )


def printed(found: Record) -> str:
    """What `tilewright bench` prints of one case."""
    from rich.console import Console

    shown = tables.case_tables(found.rows[: len(contests(found.rows)[0].rows)])
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(shown)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    text = "\n".join(line for line in lines if "unavailable" not in line).strip()
    return f"```text\n{text}\n```"


def _rivals(judged: Sequence[Contest]) -> list[str]:
    """Those who have a number anywhere."""
    return [n for n in NAMES if any(has_number(c.rows[n]) for c in judged if n in c.rows)]


def _ratios(contest: Contest, ours: Row, rivals: Sequence[str]) -> Iterator[str]:
    """Each rival's time over that of one row of ours, starred if either is flagged."""
    for name in rivals:
        rival = contest.rows.get(name)
        if contest.barred or rival is None or not has_number(rival):
            yield NO_NUMBER
        else:
            star = "*" if ours.flags or rival.flags else ""
            yield f"{time_of(rival) / time_of(ours):.2f}{star}"


def _alt(svg: str) -> str:
    """What a picture says of itself."""
    found = re.search(r"<desc[^>]*>(.*?)</desc>", svg, re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _distinct(contests_: Sequence[Contest]) -> list[Contest]:
    """Cases of one shape once: models share layers."""
    seen: dict[tuple[str, ...], Contest] = {}
    for contest in contests_:
        row = contest.first
        dims = dict(row.dims)
        if "causal" in dims and dims.get("kv_heads") == dims["shape"][HEADS[_layout(dims)]]:
            del dims["kv_heads"]  # what it is without
        sizes = json.dumps(dims, sort_keys=True)
        seen.setdefault((row.op, sizes, row.dtype, row.phase), contest)
    return list(seen.values())


# records of suites; of two that hold the same case the first counts
MEASURED = (
    *(f"bench-{suite}-gated-norm" for suite in ("model", "prefill", "decode", "sweep")),
    *("bench-model", "bench-prefill-gated", "bench-prefill", "bench-decode-gated", "bench-decode"),
    *("bench-sweep-gated", "bench-sweep", "bench-sweep-fp8"),
    *("bench-forward-attention", "bench-sweep-attention"),
    *("bench-sparse-forward-attention", "bench-sparse-attention"),
    *MATMUL_RECORDS,
)


def measured(folder: str, root: Path) -> str:
    """Every kernel of one op's folder, for its notes: from all suites but the quick one."""
    names = [op.name for op in registry().values() if _folder(op) == folder]
    found = [r for name in MEASURED if (r := _bench(root, name))]
    there = _distinct([c for r in found for c in contests(r.rows)])
    judged = [c for c in there if c.first.op in names and c.entered]
    judged = [c for c in judged if c.first.dtype == "bfloat16"]
    rivals = _rivals(judged)
    rates = any(row.bound == "compute" for c in judged for row in c.rows.values())
    rows = []
    for contest in judged:
        dims = contest.first.dims
        what = (f"`{contest.first.op}` {contest.first.phase}", _shape(dims))
        for row in contest.rows.values():
            if row.ours and has_number(row):
                reached = [row.contender, micros(time_of(row)), f"{row.of_roof or 0:.0%}"]
                reached += [f"{row.tflops or 0:,.0f}"] if rates else []
                rows.append((*what, *reached, *_ratios(contest, row, rivals)))
    if not rows:
        return NOT_MEASURED
    heads = ["op", "shape, bf16", "backend", "µs", "of roof", *(["TFLOP/s"] if rates else [])]
    heads += [f"{n} / ours" for n in rivals]
    return f"{_table(heads, rows)}\n\n{_environment(found[0].run)}."


def _shape(dims: Mapping[str, Any]) -> str:
    """Sizes, and what else tells one case of an op from another."""
    words = [str(dims[name]) for name in ("scaling", "layout", "style") if name in dims]
    words += [
        word for name, word in (("erf", "erf"), ("from_bshd", "transposed")) if dims.get(name)
    ]
    words += _of_attention(dims) if "causal" in dims else []
    if "n" in dims and len(dims["shape"]) == 2:
        return _of_matmul(dims)
    return ", ".join([" x ".join(map(str, dims["shape"])), *words])


def _of_attention(dims: Mapping[str, Any]) -> Iterator[str]:
    kv_heads = dims.get("kv_heads")
    if kv_heads not in (None, dims["shape"][HEADS[_layout(dims)]]):
        yield f"{kv_heads} key heads"
    if lengths := dims.get("lengths"):
        yield f"{len(lengths)} sequences"
    yield "causal" if dims["causal"] else "full"
    if window := dims.get("window"):
        yield f"window {window[0]} + {window[1]}"
    if softcap := dims.get("softcap"):
        yield f"softcap {softcap:g}"


def _of_matmul(dims: Mapping[str, Any]) -> str:
    """m x n x k, and how both operands lie: N by rows, T by columns."""
    m, k = dims["shape"]
    lie = "".join("T" if dims.get(name) == "column" else "N" for name in ("a", "b"))
    tf32 = ", tf32" if dims.get("precision") == "tf32" else ""
    return f"{m} x {dims['n']} x {k}, {lie}{tf32}"


def _layout(dims: Mapping[str, Any]) -> str:
    return dims.get("layout") or "bhsd"


def yardsticks(found: Record) -> str:
    """What the vendor's libraries and the peers reach."""
    rows = []
    for row in filter(has_number, found.rows):
        rate = f"{row.gbps:,.0f} GB/s" if row.bound == "bandwidth" else f"{row.tflops:,.0f} TFLOP/s"
        where = f"{row.op} {row.case}, {SHORT.get(row.dtype, row.dtype)}"
        rows.append((where, row.contender, micros(row.us or 0), rate, f"{row.of_roof or 0:.0%}",
                     "; ".join(row.flags)))  # fmt: skip
    return _table(("work", "by", "µs", "rate", "of roof", "flagged"), rows)


def roofs(found: Record) -> str:
    """What the GPU reached at best."""
    rows = []
    for roof in found.roofs:
        datasheet = f"{roof.datasheet:,.0f}" if roof.datasheet else ""
        digits = 2 if roof.unit == "us" else 0
        unit = "µs" if roof.unit == "us" else roof.unit
        rows.append((roof.name, f"{roof.value:,.{digits}f} {unit}", datasheet))
    return _table(("roof", "measured", "datasheet"), rows)


def repeated(root: Path) -> str:
    """How far two runs of the quick suite agree."""
    first, second = _bench(root, "bench-quick"), _bench(root, "bench-quick-again")
    if first is None or second is None:
        return NOT_MEASURED
    again = {row.key: row.us for row in second.rows if row.us}
    pairs = [(r.us, again[r.key]) for r in first.rows if r.us and r.key in again]
    rows = []
    for words, least in (("all rows", 0.0), ("rows above 20 µs", 20.0)):
        changes = sorted(abs(b / a - 1) for a, b in pairs if a > least)
        within = sum(change <= 0.03 for change in changes)
        rows.append((words, f"{len(changes)}", f"{within}", f"{changes[-1]:.1%}"))
    seconds = [f"{record.end['seconds']:.0f} s" for record in (first, second) if record.end]
    cases = len({row.case_key for row in first.rows})
    heads = ("", "rows in both", "medians within 3 %", "largest change")
    words = (
        f"The runs took {' and '.join(seconds)} for {cases} cases, the second with what "
        f"torch.compile had kept of the first; {_bench_words(first)}"
    )
    return f"{_table(heads, rows)}\n\n{words}"


def agreement(root: Path) -> str:
    """Our clock beside Triton's, from results/h200/agreement.json."""
    record = _record(root, "h200/agreement.json")
    if record is None:
        return NOT_MEASURED
    rows = []
    for row in record["rows"]:
        clocks, figures = ("clock_us", "in_turns_us"), ("bench_us", "do_bench_us")
        rows.append((row["case"], *(f"{row[name]:,.1f}" for name in clocks),
                     f"{row['clock_ratio']:.3f}", *(f"{row[name]:,.1f}" for name in figures),
                     f"{row['bench_ratio']:.3f}", f"{row['reading_us']:,.1f}",
                     f"{row['reading_ratio']:.3f}"))  # fmt: skip
    heads = ("call", "our clock, µs", "do_bench in turns, µs", "ratio",
             "bench, µs", "do_bench, µs", "ratio", "do_bench reading, µs", "ratio")  # fmt: skip
    return f"{_table(heads, rows)}\n\nMedians; {_environment(record)}."


def profile(root: Path) -> str:
    """A worked example of profiling, from results/h200/profile-softmax.json."""
    record = _record(root, "h200/profile-softmax.json")
    return NOT_MEASURED if record is None else worked_example(record)


def _of_bench(name: str, table: Callable[[Record], str]) -> Callable[[Path], str]:
    """A region that is a table of results/h200/<name>.jsonl, and where that was measured."""

    def region(root: Path) -> str:
        found = _bench(root, name)
        return f"{table(found)}\n\n{_bench_words(found)}" if found else NOT_MEASURED

    return region


REGIONS: dict[str, Callable[[Path], str]] = {
    "ops": ops,
    "performance": _of_bench("bench-model", performance),
    "pictures": pictures,
    "picture": picture,
    "families": families,
    "families-in-short": families,
    "machines": machines,
    "run-on": run_on,
    "printed": _of_bench("bench-printed", printed),
    "host-cost": host_cost,
    "verified": verified,
    "compiled": compiled,
    "roofs": _of_bench("bench-quick", roofs),
    "yardsticks": _of_bench("yardsticks", yardsticks),
    "repeated": repeated,
    "agreement": agreement,
    "profile": profile,
    "attention-features": attention_features,
    "attention-floors": _of_bench("bench-quick", attention_floors),
    "attention-speed": _of_bench("bench-sweep-attention", attention_speed),
    "attention-sparse": _of_bench("bench-sparse-attention", attention_sparse),
    "attention-sparse-hopper": _of_bench("bench-sparse-forward-attention", attention_sparse),
    "attention-hopper": _of_bench("bench-forward-attention", attention_hopper),
    "flash-attention-steps": flash_attention_steps,
    "compat": compat,
    "matmul-ridges": matmul_ridges,
    "matmul-intensity": matmul_intensity,
    "matmul-curves": matmul_curves,
    "matmul-routes": matmul_routes,
    "matmul-beside-cublas": matmul_beside_cublas,
    **{f"measured-{name}": partial(measured, name) for name in OP_FOLDERS},
}
DOCUMENTS = (
    "README.md",
    "docs/performance.md",
    "docs/correctness.md",
    "docs/host-cost.md",
    "docs/machines.md",
    "docs/benchmarking.md",
    "docs/profiling.md",
    "docs/attention.md",
    "docs/flash_attention.md",
    "docs/tradeoffs.md",
    *(f"src/tilewright/ops/{name}/notes.md" for name in OP_FOLDERS),
)
PICTURES = Path("docs", "pictures")


def render(text: str, root: Path) -> str:
    """`text` with every region made anew; a region that nobody makes is a mistake."""

    def region(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}{REGIONS[name](root)}\n{end}"

    return REGION.sub(region, text)


def stale_pictures(root: Path) -> list[str]:
    """Pictures whose data are not those of the record any more, that say something else, or that
    are not there."""
    from tilewright.bench.svg import embedded_digest, words

    stale = []
    for name, wanted in _drawn(root).items():
        path = root / PICTURES / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (embedded_digest(text), words(text)) != (embedded_digest(wanted), words(wanted)):
            stale.append(name)
    return stale


def _drawn(root: Path) -> dict[str, str]:
    """Every picture of the documents by its file name."""
    return {**_drawn_bench(root), **_drawn_routes(root)}


def _drawn_bench(root: Path) -> dict[str, str]:
    from tilewright.bench.report import readme_pictures

    found = _bench(root, "bench-model")
    return readme_pictures(found) if found else {}


def _bench(root: Path, name: str) -> Record | None:
    path = root / "results" / "h200" / f"{name}.jsonl"
    return _read_once(path, path.stat().st_mtime_ns) if path.exists() else None


@lru_cache(maxsize=64)
def _read_once(path: Path, changed: int) -> Record:
    """Read a record; twenty documents are made from twenty of them."""
    return read(path)


def _bench_words(found: Record) -> str:
    parts = [_environment(found.run)]
    parts += [f"{name} {version}" for name, version in found.run.get("rivals", {}).items()]
    state = found.run.get("machine") or {}
    if state.get("sm_mhz"):
        clocks = "application clocks set" if state.get("locked") else "no application clocks set"
        parts.append(f"driver {state['driver']}, {clocks}")
    return f"{', '.join(parts)}; record `{found.path.name}`."


def _names(backends: Sequence[Backend]) -> str:
    return ", ".join(b.name for b in backends)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _record(root: Path, name: str) -> Any:
    path = root / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _environment(record: Any) -> str:
    facts = record["environment"]
    parts = [facts["gpu"] or "CPU"]
    parts += [f"{name} {facts[name]}" for name in ("torch", "triton") if facts.get(name)]
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tables and pictures of the docs anew.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on drift")
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the repository")
    options = parser.parse_args()
    root = options.root
    if not (root / "README.md").exists():
        sys.exit(f"readme: no {root / 'README.md'}; run it in the root of the repository")
    paths = [root / name for name in DOCUMENTS if (root / name).exists()]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    made = {path: render(text, root) for path, text in texts.items()}
    if options.check:
        stale = [str(path) for path in texts if texts[path] != made[path]]
        stale += stale_pictures(root)
        if stale:
            sys.exit(
                f"{', '.join(stale)}: not what the records say; run python -m tilewright.readme"
            )
        return
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    if stale_pictures(root):
        (root / PICTURES).mkdir(parents=True, exist_ok=True)
        for name, text in _drawn(root).items():
            (root / PICTURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
