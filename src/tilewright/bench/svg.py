"""A picture for a file: as SVG text, or as pixels.

matplotlib writes the light value of every colour; `svg` turns each into the CSS variable
`--tw-NAME`: one SVG serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from tilewright.bench.canvas import THEME, Picture, css, style


def svg(picture: Picture, ident: str, standalone: bool = False) -> str:
    """The picture as SVG: for a page that defines the colours, or on its own with both themes.

    `ident` begins every id, so that several pictures can share a page.
    """
    buffer = io.StringIO()
    with style():
        picture.figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
    body = _named_colours(_compact(_own_ids(body, ident, picture.tips)))
    body, sheet = _shared_styles(body, ident)
    width, height = (round(72 * inches) for inches in picture.figure.get_size_inches())
    space = ""
    if standalone:
        used = sorted(set(re.findall(r"--tw-(\w+)", body + sheet)))
        dark = f"@media (prefers-color-scheme:dark){{svg{{{css(used, True)}}}}}"
        own = f"svg{{font-family:system-ui,sans-serif;{css(used, False)}}}{dark}"
        sheet = f"{own}svg *{{stroke-linejoin:round}}{sheet}"
        size_in_pixels = f'width="{width / 0.75:.0f}" height="{height / 0.75:.0f}"'
        space = f' xmlns="http://www.w3.org/2000/svg" {size_in_pixels}'
    return (
        f'<svg{space} viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="{ident}-title {ident}-desc">'
        f'<title id="{ident}-title">{escape(picture.title)}</title>'
        f'<desc id="{ident}-desc">{escape(picture.alt)}</desc>'
        f"<metadata>data sha256:{picture.digest}</metadata><style>{sheet}</style>{body}</svg>\n"
    )


def words(svg_text: str) -> list[str]:
    """Every word in the picture, wherever it stands: lines may be broken in other places."""
    return sorted(" ".join(re.findall(r"<text[^>]*>([^<]*)", svg_text)).split())


def embedded_digest(svg_text: str) -> str | None:
    """The digest that `svg` wrote: two SVGs with the same one draw the same data."""
    found = re.search(r"<metadata>data sha256:([0-9a-f]{64})</metadata>", svg_text)
    return found[1] if found else None


def pixels(picture: Picture, dpi: int = 120) -> Any:
    """The picture as an array [height, width, 4], in the light theme."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with style():
        picture.figure.set_dpi(dpi)
        canvas = FigureCanvasAgg(picture.figure)
        canvas.draw()
        return numpy.asarray(canvas.buffer_rgba()).copy()


def _own_ids(body: str, ident: str, tips: Mapping[str, str]) -> str:
    """Words for hover where an artist has some, no id that nothing points at, short ones else."""
    for gid, words in tips.items():
        body = body.replace(f'<g id="{gid}">', f"<g><title>{escape(words)}</title>")
    used = dict.fromkeys(re.findall(r"(?:url\(|href=\")#([\w.-]+)", body))
    names = {old: f"{ident}-{number}" for number, old in enumerate(used)}

    def defined(match: re.Match[str]) -> str:
        return f' id="{names[match[1]]}"' if match[1] in names else ""

    body = re.sub(r' id="([^"]*)"', defined, body)
    body = re.sub(r"url\(#([\w.-]+)\)", lambda m: f"url(#{names[m[1]]})", body)
    return re.sub(r'(?:xlink:)?href="#([\w.-]+)"', lambda m: f'href="#{names[m[1]]}"', body)


def _compact(body: str) -> str:
    """Two thirds of what matplotlib writes is white space, digits and fonts."""

    def tag(match: re.Match[str]) -> str:
        text = re.sub(r"\s+", " ", match[0])
        text = re.sub(r"-?\d+\.\d{2,}", lambda m: _shorter(float(m[0])), text)
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
        text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
        text = re.sub(r"([:;]) ", r"\1", text).replace(' "', '"')
        return re.sub(r"(?<=[\d\"]) ?([MLCz]) ?(?=[-\d\"])", r"\1", text)

    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<[a-zA-Z][^>]*>", tag, body)
    body = re.sub(r">\s+<", "><", body)
    body = re.sub(r"<defs></defs>", "", body)
    alone = re.compile(r"<g>(<(?:path|use)\b[^>]*/>|<text\b[^>]*>[^<]*</text>)</g>")
    while (shorter := alone.sub(r"\1", body)) != body:
        body = shorter
    return body.strip()


def _shorter(number: float) -> str:
    """A tenth of a point for a place, a hundredth for a width."""
    return f"{number:.{1 if abs(number) >= 10 else 2}f}".rstrip("0").rstrip(".")


def _shared_styles(body: str, ident: str) -> tuple[str, str]:
    """The body with a class for every style that is used again, and the sheet of the classes."""
    uses = Counter(re.findall(r' style="([^"]*)"', body))
    again = [style for style, times in uses.items() if times > 2]
    classes = {style: f"{ident}-s{number}" for number, style in enumerate(again)}

    def shared(match: re.Match[str]) -> str:
        name = classes.get(match[1])
        return f' class="{name}"' if name else match[0]

    sheet = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    return re.sub(r' style="([^"]*)"', shared, body), sheet


def _named_colours(body: str) -> str:
    """Every colour of the theme by its name, inside tags only."""
    names = {value: name for name, (value, _) in THEME.items()}

    def named(match: re.Match[str]) -> str:
        name = names.get(match[0])
        return f"var(--tw-{name})" if name else match[0]

    body = re.sub(r"<[a-zA-Z][^>]*>", lambda m: re.sub(r"#[0-9a-f]{6}\b", named, m[0]), body)
    return re.sub(r' fill="(var\([^"]*)"', r' style="fill:\1"', body)
