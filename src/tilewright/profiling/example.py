"""The worked example of docs/profiling.md, made from a saved report. No number in it is typed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.dims import as_text
from tilewright.profiling.advice import LATENCY, ROOF
from tilewright.profiling.kernel import short_name

NOT_MEASURED = "not measured yet"

Row = Mapping[str, Any]


def worked_example(record: Mapping[str, Any] | None) -> str:
    """Command, table and a few sentences, as markdown; the record is `Report.record()` of ncu."""
    rows = [row for row in (record or {}).get("rows", ()) if row["name"] != "one call"]
    if record is None or not rows or rows[0].get("sm_pct") is None:
        return NOT_MEASURED
    return "\n\n".join(
        (
            f"```console\n{_wrapped(record['command'])}\n```",
            _table(rows, record["predicted"]),
            f"{_call(record)}; {_environment(record)}.",
            _reading(_longest(rows), record),
        )
    )


def _longest(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: (row["duration_us"] or 0) * row["launches"])


def _wrapped(command: str) -> str:
    """One option a line: the list of metrics alone is longer than a page is wide."""
    words = shlex.split(command)
    lines = [words[0]]
    for word in words[1:]:
        if (word.startswith("-") and word != "-m") or word == "python":
            lines.append(f"    {shlex.quote(word)}")
        else:
            lines[-1] += f" {word if word == '&&' else shlex.quote(word)}"
    return "$ " + " \\\n".join(lines)


def _table(rows: Sequence[Row], predicted: Mapping[str, Any]) -> str:
    heads = ["", *(f"`{short_name(row['name'])}`" for row in rows), "predicted, one call"]
    lines = [heads, ["---"] * len(heads)]
    for what, cell, expected in _LINES:
        cells = [cell(row) for row in rows]
        if any(cells):
            lines.append([what, *cells, f"{predicted[expected]:,}" if expected else ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(key: str, form: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else form.format(value)

    return cell


def _stalls(row: Row) -> str:
    return ", ".join(f"{reason} {warps:.1f}" for reason, warps in (row.get("stalls") or {}).items())


# what, how it is written, and the prediction that stands beside it
_LINES: tuple[tuple[str, Callable[[Row], str], str], ...] = (
    ("launches", _number("launches", "{:,}"), ""),
    ("duration, µs", _number("duration_us", "{:.1f}"), ""),
    ("SM busy, %", _number("sm_pct", "{:.1f}"), ""),
    ("memory busy, %", _number("memory_pct", "{:.1f}"), ""),
    ("DRAM busy, %", _number("dram_pct", "{:.1f}"), ""),
    ("tensor pipe busy, %", _number("tensor_pct", "{:.1f}"), ""),
    ("occupancy achieved, %", _number("occupancy_pct", "{:.1f}"), ""),
    ("occupancy allowed, %", _number("theoretical_occupancy_pct", "{:.1f}"), ""),
    ("registers of a thread", _number("registers", "{}"), ""),
    ("L2 hits, %", _number("l2_hit_pct", "{:.1f}"), ""),
    ("read from DRAM, bytes", _number("dram_read", "{:,.0f}"), "read"),
    ("written to DRAM, bytes", _number("dram_written", "{:,.0f}"), "written"),
    ("warps waiting, per issue", _stalls, ""),
    ("advice", _number("advice", "{}"), ""),
)


def _call(record: Mapping[str, Any]) -> str:
    request = record["request"]
    shape = as_text({"shape": request["dims"]["shape"]}).replace("x", " x ")
    return (
        f"`{request['op']}` {request['phase']}, {shape} in {request['dtype']}, backend "
        f"`{request['backend']}`"
    )


def _environment(record: Mapping[str, Any]) -> str:
    facts = record["environment"]
    parts = [facts.get("gpu") or "an unnamed GPU"]
    names = ("torch", "triton", "ncu")
    parts += [f"{name} {facts[name]}" for name in names if facts.get(name)]
    return ", ".join(parts)


def _reading(row: Row, record: Mapping[str, Any]) -> str:
    """The sentences: what limits the kernel, what it moved, what the advice is."""
    name, dram = f"`{short_name(row['name'])}`", row["dram_pct"]
    sentences = [f"{name} took {row['duration_us']:.1f} µs, the caches cold."]
    if dram is not None and dram >= ROOF:
        sentences.append(
            f"DRAM ran at {dram:.1f} % of its peak, the SMs at {row['sm_pct']:.1f} %: the kernel "
            "is bound by bandwidth, and fewer instructions would change nothing."
        )
    else:
        busiest = max(row["sm_pct"], row["memory_pct"] or 0.0)
        sentences.append(
            f"The SMs ran at {row['sm_pct']:.1f} % of their peak, the memory at "
            f"{row['memory_pct'] or 0:.1f} %."
        )
        sentences.append(
            "The kernel waits more than it works."
            if busiest < LATENCY
            else "These are parts of a theoretical peak that no kernel reaches: whether there is "
            "anything left to gain, `tilewright bench` tells, by the roof it measures there."
        )
    whole = record["rows"][-1]
    read, written = whole.get("read_over_predicted"), whole.get("written_over_predicted")
    if read is not None and written is not None:
        sentences.append(
            f"One call read {read:.2f} times the bytes that it must read, and wrote {written:.2f} "
            "times those that it must write; what is still in L2 when a kernel ends is not counted "
            "as written."
        )
    return " ".join(sentences)
