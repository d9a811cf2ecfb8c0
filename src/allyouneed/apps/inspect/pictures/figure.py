"""Pictures as files; matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allyouneed.apps.inspect.pictures.canvas import Panel
from allyouneed.errors import UserError
from allyouneed.errors.extras import missing
from allyouneed.files import temporary_name

SUFFIXES = (".png", ".svg", ".pdf")
ACROSS = 3  # panels in a row
INCHES = 3.9  # of a panel
DOTS = 100  # an inch
MARKED, UNMARKED, MUTED, EDGE = "#2f6fb0", "#eef1f5", "#5f6b7a", "#c5ccd5"


def save(panels: Sequence[Panel], path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: unknown picture format (allowed: {', '.join(SUFFIXES)})")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; pass a file")
    if not path.resolve().parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist; create it first")
    figure, drawn = _figure(panels), io.BytesIO()
    # no timestamps, so that a picture under version control only changes with its content
    meta = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    suffix = path.suffix.lower()
    small: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if suffix == ".png" else {}
    figure.savefig(drawn, format=suffix[1:], dpi=DOTS, metadata=meta[suffix], **small)
    work = temporary_name(path)
    try:
        work.write_bytes(drawn.getvalue())
        work.replace(path)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _figure(panels: Sequence[Panel]) -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise missing("look", "a picture") from None
    matplotlib.rcParams["svg.hashsalt"] = "allyouneed"
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    tallest = max(len(panel.notes) for panel in panels)
    size = (INCHES * across, (INCHES + 0.3 + 0.16 * tallest) * down)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for number, panel in enumerate(panels):
        _draw(figure, figure.add_subplot(down, across, number + 1), panel)
    return figure


def _draw(figure: Any, axes: Any, panel: Panel) -> None:
    {"marks": _marks, "matrix": _matrix, "curves": _curves}[panel.shape](figure, axes, panel)
    axes.set_title("\n".join(textwrap.wrap(panel.title, 40)), fontsize=10)
    notes = "\n".join(line for note in panel.notes for line in textwrap.wrap(note, 52))
    axes.set_xlabel(f"{panel.across}\n", fontsize=9)
    axes.annotate(
        notes, (0.5, 0), (0, -34), "axes fraction", "offset points", ha="center", va="top", fontsize=8, color=MUTED
    )
    axes.tick_params(labelsize=8, color=MUTED)
    for spine in axes.spines.values():
        spine.set_color(EDGE)


def _marks(figure: Any, axes: Any, panel: Panel) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    rows, columns = panel.values.shape
    colours = ListedColormap([UNMARKED, MARKED])
    axes.imshow(panel.values.numpy(), cmap=colours, vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    if columns <= 40:  # grid lines between single tokens
        axes.set_xticks([n - 0.5 for n in range(1, columns)], minor=True)
        axes.set_yticks([n - 0.5 for n in range(1, rows)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel(panel.down, fontsize=9)


def _names(figure: Any, axes: Any, names: Sequence[str], shades: Sequence[Any]) -> None:
    """A colour bar instead of a legend, which would cover the curves."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(names)
    if count < 2:
        return
    scale = ScalarMappable(BoundaryNorm([n - 0.5 for n in range(count + 1)], count), ListedColormap(list(shades)))
    step = math.ceil(count / 16)
    bar = figure.colorbar(scale, ax=axes, shrink=0.9, pad=0.02, ticks=range(0, count, step))
    bar.ax.set_yticklabels(names[::step])
    bar.ax.tick_params(labelsize=8, length=0)
    bar.outline.set_edgecolor(EDGE)


def _matrix(figure: Any, axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    values = panel.values.float()
    most = max(float(values.abs().max()), 1e-9)
    rows, columns = values.shape
    edges = (panel.start - 0.5, panel.start + columns - 0.5, rows - 0.5, -0.5)
    shown = axes.imshow(
        values.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest", aspect="auto", extent=edges
    )
    bar = figure.colorbar(shown, ax=axes, shrink=0.9, pad=0.02)
    bar.ax.tick_params(labelsize=8, color=MUTED)
    bar.outline.set_edgecolor(EDGE)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel(panel.down, fontsize=9)


def _curves(figure: Any, axes: Any, panel: Panel) -> None:
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    colours = matplotlib.colormaps["viridis"]
    points = range(panel.start, panel.start + panel.values.shape[1])
    last = max(1, len(panel.values) - 1)
    shades = [colours(0.92 * number / last) for number in range(len(panel.values))]
    for line, shade in zip(panel.values.float(), shades, strict=True):
        axes.plot(points, line.numpy(), color=shade, linewidth=1.4)
    if panel.start < 0:
        axes.axvline(0, color=EDGE, linewidth=0.8, zorder=0)
    _names(figure, axes, panel.lines, shades)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel(panel.down, fontsize=9)
    axes.margins(x=0.01)
