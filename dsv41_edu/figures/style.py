"""The house style, and `Drawing`: a figure that a page can show in both themes and a test can compare.

A drawing is inline SVG with fixed metadata. Lines and letters in INK take the page's text colour, so one
picture serves the light and the dark theme; areas keep their colours, chosen to be told apart by the
colour-blind (Okabe and Ito). Its text form holds a digest of the data, so that a changed number is seen
even by a reader of plain text.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, FAINT = "#010203", "#040506"  # become currentColor, whole and at a third of its opacity
BLUE, SKY, GREEN, ORANGE, RED, PINK, YELLOW, GREY = (
    "#2a7fbf #6cb9e8 #1aa37a #e8a010 #d9631e #c979a8 #e6d93c #8c8c8c".split()
)
ON_COLOUR = "#000000"  # letters on a coloured area, in both themes

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.hashsalt": "dsv41_edu",
    "path.simplify": False,
}


@dataclass(frozen=True)  # of a tuple a notebook would store the tuple's own text
class Drawing:
    """A finished figure: its SVG, what it shows in words, its caption, and the numbers it was drawn from."""

    svg: str
    alt: str
    caption: str
    data: Any

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the data as JSON."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        html = (
            f'<figure class="drawing"><div class="drawing-scroll" tabindex="0">{self.svg}</div>'
            f"<figcaption>{escape(self.caption)}</figcaption></figure>"
        )
        return {"text/plain": f"figure: {self.alt}\ndata {self.digest}", "text/html": html}


def significant(values: Iterable[float]) -> list[float]:
    """To 4 significant digits, for the data of a figure."""
    return [float(f"{float(v):.4g}") for v in values]


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """A figure of `width` x `height` inches in the house style, drawn without any global state of pyplot."""
    with mpl.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def finish(figure: Figure, alt: str, caption: str, data: Any) -> Drawing:
    """Turn a matplotlib figure into a Drawing; call it inside `canvas`. `data` must be plain JSON."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor").replace(f"stroke: {FAINT}", "stroke: currentColor; stroke-opacity: 0.3")
    svg = svg.replace(f"fill: {FAINT}", "fill: currentColor; fill-opacity: 0.3")
    # ids are per file: two figures of a page must not share a clip path
    salt = hashlib.sha256(svg.encode()).hexdigest()[:6]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{salt}-", svg)
    width = float(re.search(r'width="([\d.]+)pt"', svg)[1])
    svg = re.sub(
        r'width="[\d.]+pt"', f'style="width: 100%; max-width: {width * 4 / 3:.0f}px; height: auto"', svg, count=1
    )
    svg = re.sub(r' height="[\d.]+pt"', "", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
    return Drawing(svg.strip(), alt, caption, json.loads(json.dumps(data)))
