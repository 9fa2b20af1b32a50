"""The paper's closed form of the cost of attention (its appendix B), with its arithmetic error corrected.

A multiplication or an addition is one operation, so a product of ``[m, k]`` and ``[k, n]`` costs ``(2 k - 1) m n``.
:func:`mgk.analysis.forward_flops` counts ``2 m k n``, although a sum of k terms needs only k - 1 additions. Softmax,
exponentials and norms cost nothing, a Gaussian distance costs as much as a dot product, and the output projection is
``[H D, H D]``, while real models have ``[H D, D_x]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of one attention over a sequence, in the notation of the appendix."""

    tokens: int
    """N."""
    heads: int
    """H, the heads of softmax attention; the mixture has H / M."""
    head_dim: int
    """D, of queries, keys and values."""
    input_dim: int
    """D_x."""

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim", "input_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def softmax_operations(shape: AttentionShape) -> int:
    """Operations of softmax attention with H heads, as printed: ``N^2 H (4 D - 1) + N H D (6 D_x + 2 H D - 5)``."""
    tokens, width = shape.tokens, shape.heads * shape.head_dim
    square = tokens**2 * shape.heads * (4 * shape.head_dim - 1)
    return square + tokens * width * (6 * shape.input_dim + 2 * width - 5)


def mixture_operations(shape: AttentionShape, components: int = 2, *, as_printed: bool = False) -> int:
    """Operations of a mixture of M projected keys with H / M heads::

        N^2 H (2 (M + 1) D - 1) / M + N H D (2 (M + 2) D_x / M + 2 H D / M - (2 M + 3) / M)

    The paper prints ``(3 M + 2) / M`` as the last constant. That does not follow from its own count for one head and
    agrees with it only for M = 1. As in the paper, multiplications by the prior are not counted, but its additions are.

    Args:
        shape: sizes of the attention, of whose H heads the mixture has H / M.
        components: M.
        as_printed: whether to use the paper's constant.
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
    """Operations that two components with half the heads save: ``N^2 H (D - 1/2) + N H D (2 D_x + H D - 3/2)``.

    The paper prints ``- 1`` in place of ``- 3/2``, after the constant of :func:`mixture_operations`.
    """
    return softmax_operations(shape) - mixture_operations(shape, as_printed=as_printed)


def softmax_parameters(shape: AttentionShape) -> int:
    """Parameters of softmax attention as printed, without biases: ``3 H D D_x + (H D)^2``."""
    width = shape.heads * shape.head_dim
    return 3 * width * shape.input_dim + width**2


def mixture_parameters(shape: AttentionShape, components: int = 2) -> int:
    """Parameters of a mixture with H / M heads: ``(M + 2) H D D_x / M + (H D)^2 / M + H``.

    They are queries, values, M keys and the output projection, and M priors for each head. For M = 2 this is the
    paper's ``2 H D D_x + (H D)^2 / 2 + H``.
    """
    _check_components(shape, components)
    width = shape.heads * shape.head_dim
    inner = width // components
    return (components + 2) * inner * shape.input_dim + inner * width + shape.heads


def _check_components(shape: AttentionShape, components: int) -> None:
    if components < 1 or shape.heads % components:
        raise ValueError(f"components must divide heads, got {components} components and {shape.heads} heads")
