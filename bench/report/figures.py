"""Plots as inline SVG with the page's font, text colour and background, so that they fit light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

OURS = "#2f81f7"
PEER = "#8b949e"
_GREY = "#808b96"
"""Of a file's text: readable on white and on black."""
INK = "#123456"
"""A placeholder for the page's text colour."""

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


@contextmanager
def style() -> Iterator[None]:
    """Plots that are drawn inside look like the page."""
    with mpl.rc_context(_STYLE):
        yield


def save(drawn: Figure, path: Path) -> None:
    """An SVG file for a page with any background. Call this inside `style`."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        drawn.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    path.write_text(buffer.getvalue().replace(INK, _GREY), encoding="utf-8")


def figure(name: str, drawn: Figure, alt: str, caption: str) -> str:
    """`name` must be unique on the page, because all figures share SVG ids. Call this inside `style`."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        drawn.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    _, svg = buffer.getvalue().split("<svg ", 1)
    tag, drawing = svg.split(">", 1)
    tag = re.sub(r'\b(width|height)="[^"]*"', "", tag)
    drawing = re.sub(r"<!--.*?-->", "", drawing.replace(INK, "currentColor"), flags=re.DOTALL)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    return (
        f'<figure><div class="scroll"><svg role="img" aria-label="{escape(alt)}" {tag}>{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
