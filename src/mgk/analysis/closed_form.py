"""The paper's closed form of what an attention costs (its appendix B), its arithmetic error corrected.

A multiplication or an addition is one operation, so a product of ``[m, k]`` and ``[k, n]`` costs ``(2 k - 1) m n``:
less than the ``2 m k n`` of :func:`mgk.analysis.forward_flops` by the addition that a sum of k terms does not need.
Softmax, exponentials and norms cost nothing, a Gaussian distance what a dot product costs, and the output projection
is ``[H D, H D]``, where real models have ``[H D, D_x]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention over a sequence, as the appendix writes it."""

    tokens: int
    """N."""
    heads: int
    """H, of the softmax attention; the mixture has H / M."""
    head_dim: int
    """D, of queries, keys and values."""
    input_dim: int
    """D_x."""

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim", "input_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def softmax_operations(shape: AttentionShape) -> int:
    """``N^2 H (4 D - 1) + N H D (6 D_x + 2 H D - 5)``: softmax attention with H heads, as printed."""
    tokens, width = shape.tokens, shape.heads * shape.head_dim
    square = tokens**2 * shape.heads * (4 * shape.head_dim - 1)
    return square + tokens * width * (6 * shape.input_dim + 2 * width - 5)


def mixture_operations(shape: AttentionShape, components: int = 2, *, as_printed: bool = False) -> int:
    """A mixture of M projected keys with H / M heads::

        N^2 H (2 (M + 1) D - 1) / M + N H D (2 (M + 2) D_x / M + 2 H D / M - (2 M + 3) / M)

    The paper prints ``(3 M + 2) / M`` as the last constant, which does not follow from its own count of one head, and
    agrees with it for M = 1 only. Its multiplications by the prior are not counted, its additions are.

    Args:
        shape: H heads, of which the mixture has H / M.
        components: M.
        as_printed: with the paper's constant.
    """
    _check_components(shape, components)
    tokens, width = shape.tokens, shape.heads * shape.head_dim
    constant = 3 * components + 2 if as_printed else 2 * components + 3
    square = Fraction(tokens**2 * shape.heads * (2 * (components + 1) * shape.head_dim - 1), components)
    inner = Fraction(2 * (components + 2) * shape.input_dim + 2 * width - constant, components)
    total = square + tokens * width * inner
    assert total.denominator == 1
    return int(total)


def saved_operations(shape: AttentionShape, *, as_printed: bool = False) -> int:
    """What two components with half the heads save: ``N^2 H (D - 1/2) + N H D (2 D_x + H D - 3/2)``.

    The paper prints ``- 1`` in place of ``- 3/2``, after the constant of :func:`mixture_operations`.
    """
    return softmax_operations(shape) - mixture_operations(shape, as_printed=as_printed)


def softmax_parameters(shape: AttentionShape) -> int:
    """``3 H D D_x + (H D)^2``, as printed: no biases."""
    width = shape.heads * shape.head_dim
    return 3 * width * shape.input_dim + width**2


def mixture_parameters(shape: AttentionShape, components: int = 2) -> int:
    """``(M + 2) H D D_x / M + (H D)^2 / M + H``: queries, values and M keys for H / M heads, and M priors for each.

    With M = 2 the paper's ``2 H D D_x + (H D)^2 / 2 + H``.
    """
    _check_components(shape, components)
    width = shape.heads * shape.head_dim
    inner = width // components
    return (components + 2) * inner * shape.input_dim + inner * width + shape.heads


def _check_components(shape: AttentionShape, components: int) -> None:
    if components < 1 or shape.heads % components:
        raise ValueError(f"components must divide heads, got {components} components and {shape.heads} heads")
