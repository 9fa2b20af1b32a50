"""Composition of the pictures of several rows into one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DPI = 150
SMALLEST = 6.0
"""Smallest width in inches, which the titles need."""


def compose(pictures: Mapping[str, Path], path: Path, *, title: str) -> None:
    """Stack pictures vertically with a title for each, without scaling them down.

    Args:
        pictures: pictures by their titles.
        path: PNG file to write.
        title: title of the whole.
    """
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    loaded = {}
    for name, source in pictures.items():
        try:
            loaded[name] = imread(source)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{source} must be a picture, got {error}") from error
    head = 0.4
    width = max(SMALLEST, max(image.shape[1] for image in loaded.values()) / DPI)
    height = head + sum(image.shape[0] / DPI + head for image in loaded.values())
    figure = Figure(figsize=(width, height), dpi=DPI)
    figure.text(0.01, 1 - 0.5 * head / height, title, fontsize=12, va="center")
    top = height - head
    for name, image in loaded.items():
        own_width, own_height = image.shape[1] / DPI, image.shape[0] / DPI
        figure.text(0.01, (top - 0.5 * head) / height, name, fontsize=11, va="center", fontweight="bold")
        top -= head + own_height
        axes = figure.add_axes((0, top / height, own_width / width, own_height / height))
        axes.imshow(image, aspect="auto", interpolation="nearest", cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
