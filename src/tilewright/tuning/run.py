"""A whole run: bucket after bucket, beside what an earlier run found; written at the end, or not.

A time near the stored one (`tuned.STAY`) leaves the stored number, and the stored winner stays
unless it is beaten by more, and that twice. So a second run on the same machine writes the same
choices, and mostly the same bytes.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import tempfile
import tokenize
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilewright import __version__, dispatch, doctor
from tilewright.bench.clock import CudaClock
from tilewright.errors import InputError
from tilewright.gpu import Gpu
from tilewright.spec import Choice, Op
from tilewright.tuned import file
from tilewright.tuned.file import Bucket, Device, Table
from tilewright.tuning.measure import NOISE, Tools, measure
from tilewright.tuning.plan import Job, grid

MEASURED = ("_impl", "_kernels", "_math", "launches")  # files of an op's folder
Tables = Mapping[str, Table]
Key = tuple[str, tuple[float, ...]]  # of a bucket


@dataclass
class Result:
    tables: dict[str, Table]
    measured: list[tuple[Job, Bucket]] = field(default_factory=list)
    wrong: list[tuple[Job, Choice, str]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """A choice was wrong, or a bucket has none at all."""
        return bool(self.wrong) or any(bucket.choice is None for _, bucket in self.measured)


def run(
    jobs: Sequence[Job],
    tools: Tools,
    kept: Tables,
    known: Tables,
    progress: Callable[[str, int], None] = lambda title, done: None,
) -> Result:
    """Measure the jobs. Other buckets and other ops of `kept` stay; `known` numbers are kept to, if
    they are of this code and these versions."""
    ops = list({job.op.name: job.op for job in jobs}.values())
    for op in ops:
        _fit_together(op, jobs, kept.get(op.name))
    result = Result(dict(kept))
    alike = {op.name: known[op.name] for op in ops if not _differs(op, known.get(op.name))}
    stored = {(name, b.key): b for name, table in alike.items() for b in table.buckets}
    for done, job in enumerate(jobs):
        progress(job.title, done)
        found = measure(job, tools, stored.get((job.op.name, _key(job))))
        result.measured.append((job, found.bucket))
        result.wrong += [(job, choice, found.bucket.refused[choice]) for choice in found.wrong]
    for op in ops:
        new = [bucket for job, bucket in result.measured if job.op is op]
        old = kept[op.name].buckets if op.name in kept else ()
        by_key = {bucket.key: bucket for bucket in (*old, *new)}
        buckets = tuple(by_key[key] for key in _keys(grid(op)) if key in by_key)
        result.tables[op.name] = Table(tools.gpu.name, NOISE, versions(), source_of(op), buckets)
    return result


def _key(job: Job) -> Key:
    return job.place(job.meta())


def _keys(jobs: Sequence[Job]) -> dict[Key, None]:
    """In order; two cases in one place are one bucket."""
    return dict.fromkeys(_key(job) for job in jobs)


def _fit_together(op: Op, jobs: Sequence[Job], kept: Table | None) -> None:
    """A table is of one code and one set of versions: a part is measured beside its like only."""
    part = len(_keys([job for job in jobs if job.op is op])) < len(_keys(grid(op)))
    if kept is None or not part:
        return
    difference = _differs(op, kept)
    if difference:
        raise InputError(
            f"tune: a part of {op.name} is asked for, and the rest was measured with {difference}. "
            "Tune all of it, or name a new --out."
        )


def _differs(op: Op, table: Table | None) -> str | None:
    """The first difference between what was measured and what is here."""
    if table is None:
        return "nothing"
    then = {**table.versions, "source": table.source}
    for name, now in {**versions(), "source": source_of(op)}.items():
        if then.get(name) != now:
            return f"{name} {then.get(name)}, not {now}"
    return None


def instruments(gpu: Gpu, seed: int) -> Tools:
    """The real ones."""
    return Tools(gpu, CudaClock(gpu), seed=seed)


def there(path: Path, gpu: Gpu) -> Tables:
    """The tables of the file that will be written over.

    One that cannot be used is as good as none, but for a whole one of another GPU, which somebody
    may want to keep.
    """
    try:
        return file.read(path.read_text("utf-8"), Device.of(gpu))
    except file.Elsewhere as e:
        raise InputError(f"tune: --out: {path} {e}. Name another file.") from e
    except (OSError, UnicodeDecodeError, file.Unusable):
        return {}


def write(path: Path, gpu: Gpu, tables: Tables) -> None:
    """At once or not at all: whoever reads meanwhile sees the old file or the new one."""
    text = file.text(Device.of(gpu), tables)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def versions() -> dict[str, str]:
    found = {
        "tilewright": __version__,
        "triton": doctor.version("triton") or doctor.version("triton-windows"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    return {name: str(version) for name, version in found.items()}


def source_of(op: Op) -> str:
    """A digest of an op's kernels and how they are launched: what was measured."""
    assert op.tuning is not None
    here = Path(inspect.getfile(dispatch.load(op.tuning.choices))).parent
    digest = hashlib.sha256()
    for path in sorted(here.iterdir()):
        if path.suffix == ".cu" or path.stem.endswith(MEASURED):
            text = path.read_text("utf-8")
            code = text if path.suffix == ".cu" else _without_comments(text)
            digest.update(f"{path.name}\0{code}".encode())
    return digest.hexdigest()[:16]


def _without_comments(text: str) -> str:
    """Of Python: a word about the code is no reason to measure again."""
    lines = text.split("\n")  # as tokenize counts them
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())
