"""Tables of the paper's formula for the operations of one attention, its appendix B."""

from __future__ import annotations

from collections.abc import Sequence

from mgk.analysis.closed_form import AttentionShape, mixture_operations, softmax_operations
from mgk.reproduction.page import Grid


def closed_form_over_sizes(widths: Sequence[int], lengths: Sequence[int]) -> Grid:
    """Return the ratio of the operations of a mixture with 8 heads to those of softmax."""
    lines = []
    for width in widths:
        cells = []
        for length in lengths:
            shape = AttentionShape(tokens=length, heads=8, head_dim=width // 8, input_dim=width)
            cells.append(f"{mixture_operations(shape) / softmax_operations(shape):.3f}")
        lines.append((str(width), *cells))
    return Grid(
        title="One attention alone, by the paper's closed form (appendix B), its constant corrected",
        header=("D", *(f"N = {length}" for length in lengths)),
        lines=tuple(lines),
    )


def closed_form_over_heads(numbers: Sequence[int]) -> Grid:
    """Return the operations as printed and as corrected, for each of these numbers of heads."""
    lines = []
    for heads in numbers:
        shape = AttentionShape(tokens=4096, heads=heads, head_dim=32, input_dim=64)
        softmax, printed, right = (
            softmax_operations(shape), mixture_operations(shape, as_printed=True), mixture_operations(shape),
        )  # fmt: skip
        lines.append((str(heads), f"{softmax:,}", f"{printed:,}", f"{right:,}", f"{right / softmax:.4f}"))
    return Grid(
        title="One attention over 4096 tokens by the paper's closed form, operations",
        header=("heads", "softmax", "MGK as printed", "MGK corrected", "corrected / softmax"),
        lines=tuple(lines),
    )
