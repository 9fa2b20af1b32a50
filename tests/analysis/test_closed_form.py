"""The paper's appendix on cost, number by number; where it is wrong, its number and the right one."""

import pytest
import torch

import mgk
from mgk.analysis import forward_flops
from mgk.analysis.closed_form import (
    AttentionShape,
    mixture_operations,
    mixture_parameters,
    saved_operations,
    softmax_operations,
    softmax_parameters,
)

H, D, D_X = 8, 32, 64


def shape(tokens, heads=H, head_dim=D, input_dim=D_X):
    return AttentionShape(tokens=tokens, heads=heads, head_dim=head_dim, input_dim=input_dim)


def product(m, k, n):
    """Multiplications and additions of ``[m, k]`` by ``[k, n]``."""
    return m * n * k + m * n * (k - 1)


def softmax_by_hand(s):
    width = s.heads * s.head_dim
    head = 3 * product(s.tokens, s.input_dim, s.head_dim) + product(s.tokens, s.head_dim, s.tokens)
    head += product(s.tokens, s.tokens, s.head_dim)
    return s.heads * head + product(s.tokens, width, width)


def mixture_by_hand(s, components):
    heads, width = s.heads // components, s.heads * s.head_dim
    head = (2 + components) * product(s.tokens, s.input_dim, s.head_dim)
    head += components * product(s.tokens, s.head_dim, s.tokens) + (components - 1) * s.tokens**2
    head += product(s.tokens, s.tokens, s.head_dim)
    return heads * head + product(s.tokens, heads * s.head_dim, width)


SHAPES = [shape(4096), shape(1), shape(300, heads=12, head_dim=5, input_dim=7), shape(17, 6, 16, 128)]


@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_products_by_hand(s):
    assert softmax_operations(s) == softmax_by_hand(s)
    for components in (1, 2, 3):
        if s.heads % components == 0:
            assert mixture_operations(s, components) == mixture_by_hand(s, components)


def test_the_paper_is_right_for_one_component_only():
    """Its constant is (3 M + 2) / M, the right one (2 M + 3) / M: (M - 1) N H D / M operations too few."""
    s = shape(4096, heads=12)
    assert mixture_operations(s, 1, as_printed=True) == mixture_operations(s, 1) == softmax_operations(s)
    for components in (2, 3, 4):
        missing = mixture_operations(s, components) - mixture_operations(s, components, as_printed=True)
        assert missing == 4096 * 12 * D * (components - 1) // components


def test_numbers_of_the_appendix():
    """H = 8, D = 32, D_x = 64, N = 4096, multiplied out once."""
    s = shape(4096)
    assert softmax_operations(s) == 17_979_932_672
    assert mixture_operations(s, as_printed=True) == 13_350_469_632
    assert mixture_operations(s) == 13_350_993_920
    n, width = 4096, H * D
    assert softmax_operations(s) == n**2 * H * (4 * D - 1) + n * width * (6 * D_X + 2 * width - 5)
    assert mixture_operations(s, as_printed=True) == n**2 * H * (3 * D - 0.5) + n * width * (4 * D_X + width - 4)
    assert mixture_operations(s) == n**2 * H * (3 * D - 0.5) + n * width * (4 * D_X + width - 3.5)
    assert saved_operations(s, as_printed=True) == n**2 * H * (D - 0.5) + n * width * (2 * D_X + width - 1)
    assert saved_operations(s) == n**2 * H * (D - 0.5) + n * width * (2 * D_X + width - 1.5)


@pytest.mark.parametrize(("tokens", "ratio"), [(256, 0.667), (1024, 0.719), (2048, 0.734), (4096, 0.743)])
def test_ratios(tokens, ratio):
    """The paper's are smaller, by half of N H D operations."""
    s = shape(tokens)
    right, printed = (mixture_operations(s, as_printed=flag) / softmax_operations(s) for flag in (False, True))
    assert right == pytest.approx(ratio, abs=5e-4)
    assert right - printed == pytest.approx(0.5 * tokens * H * D / softmax_operations(s), rel=1e-9)


def test_limit_of_long_sequences():
    """(3 D - 1/2) / (4 D - 1), which is 0.752: the three quarters of two products out of two times two."""
    s = shape(10**9)
    assert mixture_operations(s) / softmax_operations(s) == pytest.approx((3 * D - 0.5) / (4 * D - 1), rel=1e-5)


def test_parameters_of_the_appendix():
    s = shape(1)
    assert softmax_parameters(s) == 114_688
    assert mixture_parameters(s) == 65_544
    assert softmax_parameters(s) - mixture_parameters(s) == H * D * D_X + (H * D) ** 2 // 2 - H == 49_144


@pytest.mark.parametrize(("attention", "heads"), [("softmax", H), ("mgk", H // 2)])
def test_what_is_counted_is_the_closed_form_and_its_last_additions(attention, heads):
    """2 m k n for each product is one addition more for each number of the result. The closed form adds M - 1 numbers
    for each pair of tokens to mix components, which is no product, and has an output [H D, H D]."""
    s, n = shape(96), 96
    layer = mgk.build_attention(attention, embed_dim=D_X, num_heads=heads, head_dim=D, bias=False).to("meta")
    counted = forward_flops(layer, query=torch.zeros(1, n, D_X, device="meta"))
    keys = 2 if attention == "mgk" else 1
    inner, width = heads * D, H * D
    counted += 2 * n * inner * (width - D_X)  # the paper's wider output
    results = n * inner * (2 + keys) + heads * n * n * keys + n * inner + n * width
    mixing = heads * n * n * (keys - 1)
    closed = softmax_operations(s) if attention == "softmax" else mixture_operations(s)
    assert counted == closed + results - mixing


def test_parameters_of_the_layer_are_the_closed_form_with_the_output_of_real_models():
    for attention, heads, closed in (("softmax", H, softmax_parameters), ("mgk", H // 2, mixture_parameters)):
        layer = mgk.build_attention(attention, embed_dim=D_X, num_heads=heads, head_dim=D, bias=False)
        wider = heads * D * (H * D - D_X)
        assert sum(parameter.numel() for parameter in layer.parameters()) + wider == closed(shape(1))


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="components must divide heads, got 3 components and 8 heads"):
        mixture_operations(shape(4), 3)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        shape(0)
