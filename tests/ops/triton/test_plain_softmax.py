"""Plain softmax, which `auto` may give to our kernel: as exact as the stock kernels that would have computed it."""

import pytest
import torch
import torch.nn.functional as F
from cases import OUTPUT_CAP
from triton_cases import DTYPES, INTERPRETED

import mgk

TOKENS = 40 if INTERPRETED else 300
HALF = [dtype for dtype in DTYPES if dtype != torch.float32]


def errors_of(attention, leaves, grad):
    """Relative RMS of the output and of every gradient, against fp64 on the same rounded numbers."""
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.scaled_dot_product_attention(*exact, is_causal=attention.is_causal)
    out = attention(*leaves)
    found = [(out, expected)]
    found += zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    )  # fmt: skip
    return [float((got.double() - want).norm() / want.norm()) for got, want in found]


class Way:
    def __init__(self, backend, is_causal):
        self.backend, self.is_causal = backend, is_causal

    def __call__(self, query, key, value):
        return mgk.mixture_attention(
            query, key, value, similarity="dot", is_causal=self.is_causal, backend=self.backend
        )  # fmt: skip


@pytest.mark.parametrize("size", [1.0, 3.0])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_softmax_is_as_exact_as_on_stock_kernels(dtype, is_causal, size, device):
    """Logits of up to about 40 in size, where one key often has nearly all the weight."""
    torch.manual_seed(0)
    leaves = [(scale * torch.randn(2, 2, TOKENS, 32, device=device)).to(dtype) for scale in (size, size, 1.0)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grad = torch.randn_like(leaves[2])
    ours = errors_of(Way("triton", is_causal), leaves, grad)
    stock = errors_of(Way("sdpa", is_causal), leaves, grad)
    for mine, its in zip(ours, stock, strict=True):
        # On a CPU the stock kernels are asked in fp32.
        assert mine <= (OUTPUT_CAP[dtype] if INTERPRETED else max(OUTPUT_CAP[dtype], 1.5 * its))
