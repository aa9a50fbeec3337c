"""Boxes, arrows and text as SVG, legible on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

_STYLE: Final = """
  text { font: 14px "DejaVu Sans", Verdana, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: bold; }
  .small { font-size: 12px; fill: #57606a; }
  .label { fill: #0550ae; font-size: 12.5px; }
  .page { fill: #ffffff; }
  .box { fill: #f6f8fa; stroke: #57606a; stroke-width: 1.5; }
  .arrow { fill: none; stroke: #0550ae; stroke-width: 2; }
  .head { fill: #0550ae; }
  .dashed { stroke-dasharray: 6 4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .label { fill: #79c0ff; }
    .page { fill: #0d1117; }
    .box { fill: #161b22; stroke: #8b949e; }
    .arrow { stroke: #79c0ff; }
    .head { fill: #79c0ff; }
  }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Return a line of text with its baseline at `y`."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, title: str, lines: Sequence[str] = ()) -> str:
    """Return a box with a bold title and smaller lines below it, centred."""
    first = y + height / 2 - 8.5 * len(lines) + 5
    middle = x + width / 2
    made = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="box"/>']
    made.append(text(middle, first, title, "title"))
    made += [text(middle, first + 17 * at, line, "small") for at, line in enumerate(lines, 1)]
    return "\n".join(made)


def arrow(points: Sequence[tuple[float, float]], *, dashed: bool = False, both: bool = False) -> str:
    """Return a line through `points` with a head at its end, or at both ends."""
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    start = ' marker-start="url(#head)"' if both else ""
    kind = "arrow dashed" if dashed else "arrow"
    return f'<path d="{path}" class="{kind}"{start} marker-end="url(#head)"/>'


def write(file: Path, width: int, height: int, title: str, parts: Sequence[str]) -> None:
    """Write the picture; `title` is what screen readers read."""
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" class="head"/></marker>'
    )
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{head}</defs>",
        f'<rect width="{width}" height="{height}" rx="10" class="page"/>',
        *parts,
        "</svg>",
    ]
    file.write_text("\n".join(made) + "\n")
