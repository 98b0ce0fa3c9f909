"""The report: self-contained, escaped, honest about what it may not show, alive in a browser."""

from __future__ import annotations

import ast
import csv
import html
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

import synthetic
from tilewright.bench import canvas, contest, plots, report, svg
from tilewright.bench.contest import NO_NUMBER, Contest, contests, verdict
from tilewright.bench.record import Record, Row, read

EVIL = "<script>window.hacked = 1</script>\"'&$x$"
SVG = "{http://www.w3.org/2000/svg}"
MANY = 1000  # rows


@pytest.fixture(scope="module")
def record() -> Record:
    return synthetic.record()


@pytest.fixture(scope="module")
def page(record: Record) -> str:
    """A thousand rows: every kind that there is, one op whose name is an attack, and long kernels.

    Pictures take their time. One page therefore serves all, and each op has one dtype and phase.
    """
    norm, usual = ("float32", "backward"), ("bfloat16", "forward")
    rows = [r for r in record.rows if (r.dtype, r.phase) == (norm if r.op == "rms_norm" else usual)]
    rows += [replace(r, op=EVIL, case=EVIL) for r in rows if r.op == "matmul"]
    long = {"kernels": (f"void at::native::{'elementwise_' * 20}kernel",) * 3}
    plain = [replace(r, **long) for r in rows if r.op == "rms_norm" and r.case != "prompt"]
    rows += [replace(r, case=f"{r.case}-{n}") for n in range(60) for r in plain]
    return report.page([replace(record, rows=rows[:MANY])])


def few(record: Record) -> list[Row]:
    """One case of each op: enough for what does not depend on how many there are."""
    return [r for r in record.rows if r.case in ("wide", "square") and r.dtype == "bfloat16"]


def rivals(record: Record) -> list[Row]:
    """One case without us: two pictures, and nobody to be faster."""
    rows = [r for r in few(record) if r.op == "relu" and r.phase == "forward"]
    return [r for r in rows if not r.ours]


def one(rows: list[Row], **facts: Any) -> Row:
    (found,) = [r for r in rows if all(getattr(r, k) == v for k, v in facts.items())]
    return found


class Elements(HTMLParser):
    """Every tag with its attributes, and the cells of the table of rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        self._open = tag in ("td", "th", "button")

    def handle_data(self, data: str) -> None:
        if self._open and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def cells(text: str) -> list[dict[str, str]]:
    """The rows of the big table, by head; a reason that spans the numbers is called `why`."""
    table = text[text.index('<table id="rows"') :]
    heads, *rows = [row for row in Elements(table).rows if row]
    return [
        dict(zip(heads, row, strict=True))
        if len(row) == len(heads)
        else dict(zip([*heads[: len(row) - 1], "why"], row, strict=True))
        for row in rows
    ]


# --- the page ------------------------------------------------------------------------------------


@pytest.mark.drawn(seconds=8.2, family="slow")
def test_the_page_asks_nobody_for_anything(page: str) -> None:
    assert not re.search(r"https?://|\bsrc=|@import|url\((?!#)", page)
    found = Elements(page)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in found.tags}
    for _, attributes in found.tags:
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in page


def test_names_are_text_wherever_they_stand(page: str) -> None:
    assert "<script>window.hacked" not in page
    assert page.count("<script>") == 1  # ours
    assert html.escape("<script>window.hacked", quote=False) in page


def test_an_id_is_used_once_and_every_reference_finds_it(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', page)) <= set(ids)
    labels = " ".join(re.findall(r'aria-labelledby="([^"]+)"', page)).split()
    assert set(labels) <= set(ids)


def test_every_picture_says_what_it_shows(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) > 10
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img"
        title, desc = root.find("title"), root.find("desc")
        assert title is not None and desc is not None
        assert f"{title.get('id')} {desc.get('id')}" == root.get("aria-labelledby")
        assert re.search(r"\d", desc.text or ""), "an alt text states its key figure"
        assert not re.search(r"#[0-9a-f]{6}\b", picture), "a colour that no theme can change"


def test_the_environment_is_told(page: str, record: Record) -> None:
    for words in ("NVIDIA H200", "580.95.05", "2.13.0", "3.9.0", "3ffad0e4572874b6"):
        assert words in page
    assert "1980, at the end 1965" in page
    assert "nothing, at the end power cap" in page
    assert "bandwidth 2:1" in page
    assert "cut short" not in page
    assert "cut short" in report.page([replace(record, rows=[], end=None)])


def test_refused_rows_have_a_reason_and_no_number(page: str) -> None:
    rows = cells(page)
    refused = [row for row in rows if row["state"] == "refused"]
    assert len(refused) == 2
    for row in refused:
        assert set(row) == {"op", "case", "dtype", "phase", "contender", "state", "why"}
    assert "its result is wrong" in refused[0]["why"]
    flagged = [row for row in rows if row["state"] == "flagged"]
    assert [row["remarks"].startswith("noisy") for row in flagged] == [True]
    assert flagged[0]["µs"]


def test_the_summary_counts_what_the_rows_say(page: str) -> None:
    def number(words: str) -> int:
        return int(re.findall(rf">([\d,]+)</b><span>{words}", page)[0].replace(",", ""))

    assert number("refused") == 2
    assert number("flagged") == 1
    assert number("of these noisy") == 1
    assert number("rows measured") == MANY
    assert number("cases not judged") == 1
    # relu where a row is wide, and matmul, which stands here twice
    assert number("slower than") == 5
    assert page.count("times as long") == 5
    # three ops with four shapes, two matmuls twice, and copies with six contenders each
    cases = 3 * 4 + 2 * 2 + (MANY - 88) // 6
    assert number("cases where") + number("within") == cases - 5 - 1


def test_a_speedup_needs_the_whole_field(record: Record) -> None:
    rows = [r for r in few(record) if r.op == "softmax" and r.phase == "forward"]
    whole = Contest({r.contender: r for r in rows})
    assert whole.barred == ""
    assert whole.speedup("eager") == pytest.approx(
        one(rows, contender="eager").us / one(rows, contender="cuda_v2").us
    )
    vendor = one(rows, contender="vendor")
    for broken, why in (
        (None, "vendor was not measured"),
        (replace(vendor, state="refused", reason="wrong"), "vendor has no number: wrong"),
        (replace(vendor, state="unavailable", us=None), "vendor has no number"),
    ):
        others = [r for r in rows if r is not vendor] + ([broken] if broken else [])
        contest = Contest({r.contender: r for r in others})
        assert contest.barred.startswith(why)
        assert contest.speedup("eager") is None and contest.outcome == ""
    excused = replace(vendor, state="unavailable", us=None, reason="not installed")
    assert Contest({r.contender: r for r in [*rows, excused]}).barred == ""
    text = report.page([replace(record, rows=[r for r in rows if r is not vendor])])
    ours = [row for row in cells(text) if row["contender"] in ("triton", "cuda_v2")]
    assert {row["speed-up"] for row in ours} == {NO_NUMBER}
    assert 'title="no speed-up: vendor was not measured"' in text
    svgs = re.findall(r"<svg.*?</svg>", text, re.S)
    (picture,) = [text for text in svgs if "/ ours</title>" in text]
    assert picture.count(f">{NO_NUMBER}</text>") == 3  # eager, compile and liger


def test_verdicts() -> None:
    assert [verdict(s) for s in (0.97, 0.99, 1.0, 1.01, 1.03)] == [
        *("slower", "level", "level", "level", "faster")
    ]


def test_a_page_of_nothing(record: Record) -> None:
    assert "nothing to show" in report.page([])
    empty = report.page([replace(record, rows=[], roofs=[])])
    assert "There are no rows" in empty and "<svg" not in empty and "no roofs" in empty
    bare = [Row("op", "case", {}, "int8", "forward", "triton", True, "ok")]
    assert len(cells(report.page([replace(record, rows=bare)]))) == 1


def test_two_runs_share_a_page(record: Record) -> None:
    rows = rivals(record)
    other = replace(synthetic.record(1), rows=rows)
    text = report.page([replace(record, rows=rows), other])
    assert len(cells(text)) == 2 * len(rows) and text.count("<svg") == 4
    assert "Speed-ups" not in text
    assert {row["run"] for row in cells(text)} == {"synthetic-0.jsonl", "synthetic-1.jsonl"}
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_thousand_rows_stay_small(page: str) -> None:
    assert len(cells(page)) == MANY
    assert page.count("elementwise_" * 5) > MANY // 2
    assert len(page.encode()) < 2_000_000


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    for module in (canvas, contest, plots, report, svg):
        tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or node.names[0].name for node in found}
        assert names and not {"matplotlib", "jinja2", "markupsafe", "numpy", "PIL"} & {
            name.split(".")[0] for name in names
        }


@pytest.mark.parametrize("reach", [1.69, 2.0, 5.0, 40.0, 1e3, 1e6])
def test_an_axis_always_has_a_label(reach: float) -> None:
    for low in (0.7, 1.1, 2.3, 5.1, 7.7, 23.0):
        assert 1 <= len(canvas.log_ticks(low, low * reach)) <= 12


# --- CSV, PNG, SVG -------------------------------------------------------------------------------


def test_csv_comes_back(record: Record) -> None:
    evil = replace(record.rows[0], op='a "quoted", op\nof two lines', flags=("a", "b"))
    rows = [*record.rows, evil]
    found = list(csv.DictReader(io.StringIO(report.csv_text([replace(record, rows=rows)]))))
    assert len(found) == len(rows)
    for line, row in zip(found, rows, strict=True):
        assert (line["record"], line["gpu"]) == (record.path.name, record.gpu)
        assert (line["op"], line["case"], line["contender"]) == (row.op, row.case, row.contender)
        assert json.loads(line["dims"]) == row.dims
        assert int(line["bytes_read"]) == row.bytes_read
        if row.state == "ok":
            assert float(line["us"]) == row.us
            assert row.graph is not None and float(line["graph_us"]) == row.graph.median
        else:
            assert line["reason"] == row.reason
            assert {line[name] for name in (*report.MEASURED, "graph_us", "cpu_us")} == {""}
    assert found[-1]["flags"] == "a; b"
    assert "samples" not in found[0]


def test_png_is_an_image(record: Record, tmp_path: Path) -> None:
    report.write_png([replace(record, rows=rivals(record))], tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as image:
        image.load()
        assert image.format == "PNG" and image.width > 1000
        assert len(image.convert("RGB").getcolors(2**24)) > 20
    report.write_png([], tmp_path / "empty.png")
    with Image.open(tmp_path / "empty.png") as image:
        image.load()


def test_a_digest_is_of_what_is_drawn(record: Record) -> None:
    rows = few(record)
    before = report.figure_digest(rows)
    assert before == report.figure_digest(rows)
    first = rows[0]
    for change in (
        {"us": (first.us or 0) * 1.01},
        {"roof_us": 1.0},
        {"state": "refused"},
        {"flags": ("noisy",)},
        {"contender": "cuda"},
        {"error": 0.123},
        {"graph": replace(first.graph, p80=99.0)},
    ):
        assert report.figure_digest([replace(first, **change), *rows[1:]]) != before
    for silent in ({"samples": ()}, {"host": None}, {"kernels": ("other",)}):
        assert report.figure_digest([replace(first, **silent), *rows[1:]]) == before
    assert report.figure_digest(rows, record.roofs) != before


def test_a_digest_outlives_the_file(record: Record, tmp_path: Path) -> None:
    rows = few(record)
    again = read(synthetic.write(tmp_path / "a.jsonl", rows))
    assert report.figure_digest(again.rows, again.roofs) == report.figure_digest(
        rows, synthetic.ROOFS
    )


@pytest.mark.drawn(seconds=4.3, family="slow")
def test_no_word_is_cut_off(record: Record) -> None:
    """Not even where a reader's font is wider than ours. With long names and few rivals a heatmap
    is narrow, and its key is the widest thing in it."""
    rows = [replace(r, case=f"{r.case}, with a long name", flags=("noisy",)) for r in few(record)]
    drawn = plots.pictures(rows, record.roofs)
    drawn["narrow"] = [plots.heatmap(contests(rows), "title", "narrow")]
    for picture in (picture for its in drawn.values() for picture in its):
        drawing = FigureCanvasAgg(picture.figure)
        drawing.draw()
        sheet = picture.figure.bbox.padded(1)
        # an axis has labels in store for what lies beyond its ends
        axes = picture.figure.axes
        ticks = {t for each in axes for t in (*each.get_xticklabels(), *each.get_yticklabels())}
        for text in set(picture.figure.findobj(Text)) - ticks:
            box = text.get_window_extent(drawing.get_renderer())
            more = 0.08 * box.width
            left = {"left": 0.0, "right": more}.get(text.get_ha(), more / 2)
            seen = text.get_text() and text.get_visible()
            assert not seen or sheet.x0 <= box.x0 - left, (picture.name, text)
            assert not seen or sheet.x1 >= box.x1 + more - left, (picture.name, text)


def test_pictures_for_the_readme(record: Record) -> None:
    small = replace(record, rows=[r for r in few(record) if r.op in ("relu", "softmax")])
    found = report.readme_pictures(small)
    assert set(found) == {"speedup.svg", "bandwidth.svg"}
    assert found == report.readme_pictures(small), "the same data draw the same file"
    for text in found.values():
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg" and root.get("width")
        for tag in ("title", "desc"):
            element = root.find(f"{SVG}{tag}")
            assert element is not None and (element.text or "").strip()
            assert element.get("id") in root.get("aria-labelledby", "")
        assert "prefers-color-scheme:dark" in text
        assert "H200" in text and "<text" in text
        defined = set(re.findall(r"(--tw-\w+):#", text))
        assert set(re.findall(r"var\((--tw-\w+)\)", text)) == defined
        assert not re.search(r"\d{4}-\d\d-\d\d", text), "a date makes a file that never settles"
    changed = [replace(r, us=(r.us or 1) * 1.1) if r.ours else r for r in small.rows]
    digests = [
        {name: svg.embedded_digest(text) for name, text in pictures.items()}
        for pictures in (found, report.readme_pictures(replace(small, rows=changed)))
    ]
    for name in found:
        assert digests[0][name] and digests[0][name] != digests[1][name]


def test_the_readme_takes_cases_by_size_alone(record: Record) -> None:
    base = [r for r in record.rows if r.op == "relu" and r.phase == "forward"]
    many = [
        replace(r, case=f"{r.case}-{n}", bytes_read=r.bytes_read + n)
        for n in range(20)
        for r in base
        if r.dtype == "bfloat16"
    ]
    chosen, of = report._representative(contests(many))
    assert of == 80 and len(chosen) == report.README_CASES
    sizes = [contest.first.bytes for contest in chosen]
    assert sizes == sorted(sizes)
    assert {min(r.bytes for r in many), max(r.bytes for r in many)} <= set(sizes)
    assert report._representative([]) == ([], 0)


# --- colours -------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_apart_and_read() -> None:
    lights = [light for light, _ in canvas.THEME.values()]
    assert len(lights) == len(set(lights)), "a colour is found again by its light value"
    for theme in (0, 1):
        named = {name: values[theme] for name, values in canvas.THEME.items()}
        for name in ("ink", "muted", "loss", "warn", "triton"):  # text
            assert contrast(named[name], named["paper"]) >= 4.5, name
            assert contrast(named[name], named["page"]) >= 4.5, name
        for name in canvas.MARKERS:  # marks
            assert contrast(named[name], named["paper"]) >= 3, name
        for step in range(len(canvas.STEPS) + 1):
            assert contrast(named["ink"], named[f"heat{step}"]) >= 4.5, step
    assert len(set(canvas.MARKERS.values())) == len(canvas.MARKERS)


# --- a real browser ------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--window-size=500,800", "--dump-dom"),
)
DRIVER = """
<script>
addEventListener("load", () => {
  const heads = [...document.querySelectorAll("#rows th")], out = {};
  const column = heads.findIndex((th) => th.textContent === "µs");
  const visible = () => [...document.querySelectorAll("#rows tbody tr")].filter((tr) => !tr.hidden);
  const time = (cell) => cell.colSpan > 1 ? "" : cell.textContent;
  const times = () => visible().map((tr) => time(tr.cells[column]));
  const click = (th) => { th.querySelector("button").click(); return th.getAttribute("aria-sort") };
  out.up = [click(heads[column]), times()];
  out.down = [click(heads[column]), times()];
  const names = () => visible().map((tr) => tr.cells[0].textContent);
  out.names = [click(heads[0]), names(), heads[column].getAttribute("aria-sort")];
  const filter = document.getElementById("filter");
  filter.value = "softmax -eager refused";
  filter.dispatchEvent(new Event("input"));
  out.filtered = [visible().length, document.getElementById("shown").textContent];
  const theme = document.getElementById("theme");
  const ground = () => getComputedStyle(document.body).backgroundColor;
  out.theme = [ground(), theme.getAttribute("aria-pressed")];
  theme.click();
  out.theme.push(ground(), theme.getAttribute("aria-pressed"));
  out.overflow = document.documentElement.scrollWidth - innerWidth;
  out.hacked = typeof window.hacked;
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify(out);
  document.body.append(seen);
});
</script>
"""


def browse(text: str, folder: Path) -> tuple[str, list[str]]:
    """(the document after its scripts ran, what they said on the console)."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    (folder / "page.html").write_text(text, encoding="utf-8")
    place = [f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()]
    done = subprocess.run([browser, *QUIET, *place], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_lives_in_a_browser(page: str, tmp_path: Path) -> None:
    document, console = browse(page.replace("</body>", f"{DRIVER}</body>"), tmp_path)
    assert not console
    seen = json.loads(html.unescape(re.findall(r'<pre id="seen">(.*?)</pre>', document)[0]))
    for way, order in (("up", 1), ("down", -1)):
        name, times = seen[way]
        assert name == {"up": "ascending", "down": "descending"}[way]
        numbers = [float(t.replace(",", "")) for t in times if t]
        assert len(numbers) > 200 and max(numbers) >= 100 > 10 > min(numbers)
        assert numbers == sorted(numbers, reverse=order < 0)
        assert not any(times[len(numbers) :]), "rows without a number come last, either way"
    name, names, other = seen["names"]
    assert (name, other) == ("ascending", "none")
    assert [n for n in names if n != EVIL] == sorted(n for n in names if n != EVIL)
    assert seen["filtered"] == [1, f"1 of {len(names)} rows"]
    before, unpressed, after, pressed = seen["theme"]
    assert before != after and (unpressed, pressed) == ("false", "true")
    assert seen["overflow"] <= 0, "wide tables scroll in their own boxes"
    assert seen["hacked"] == "undefined"


def test_a_fault_in_the_page_would_show(tmp_path: Path) -> None:
    _, console = browse("<body><script>nobody.home()</script></body>", tmp_path)
    assert console and "nobody is not defined" in console[0]
