"""Mixture attention with half the heads against stock softmax attention, on this CPU.

Every preset's output is compared with fp64 first; a preset that is wrong gets no time. The runs of all presets are
interleaved in one process, so that a slow moment of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import mgk

LARGEST_ERROR = 1e-3  # gradients of priors cancel; outputs and the other gradients are near 1e-6


def inputs(preset: str, batch: int, heads: int, tokens: int, head_dim: int) -> dict[str, Tensor]:
    """Keyword arguments of the attention, all of them leaves that want a gradient."""
    shape = (batch, heads, tokens, head_dim)
    tensors = {"query": torch.randn(shape), "key": torch.randn(shape), "value": torch.randn(shape)}
    if preset == "smgk":
        tensors["shift"] = torch.randn(heads, 2, head_dim)
    if preset == "mgk":
        tensors["key"] = torch.randn(batch, heads, 2, tokens, head_dim)
    if preset in ("mgk", "smgk"):
        tensors["log_prior"] = torch.randn(heads, 2).log_softmax(-1)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def attention(preset: str, is_causal: bool, backend: str) -> Callable[[dict[str, Tensor]], Tensor]:
    if preset == "softmax":
        return lambda tensors: call(F.scaled_dot_product_attention, tensors, is_causal=is_causal)
    return lambda tensors: call(mgk.mixture_attention, tensors, is_causal=is_causal, backend=backend)


def call(function: Callable[..., Tensor], tensors: dict[str, Tensor], **options: object) -> Tensor:
    return function(**tensors, **options)


def error(preset: str, is_causal: bool, backend: str, tensors: dict[str, Tensor]) -> float:
    """Largest relative error of output and gradients against the fp64 reference, on a slice of the inputs."""
    data = ("query", "key", "value")
    few = {name: t.detach()[:1, ..., :512, :] if name in data else t.detach() for name, t in tensors.items()}
    similarity = "dot" if preset == "softmax" else "gaussian"
    grad = torch.randn_like(few["value"])

    def results(function: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = {name: t.to(dtype).requires_grad_() for name, t in few.items()}
        out = function(leaves)
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))]

    got = results(attention(preset, is_causal, backend), torch.float32)
    expected = results(
        lambda t: call(mgk.mixture_attention, t, is_causal=is_causal, similarity=similarity, backend="reference"),
        torch.float64,
    )
    return max(float((x - y).norm() / y.norm()) for x, y in zip(got, expected, strict=True))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(arguments: argparse.Namespace, is_causal: bool) -> None:
    heads = {"softmax": arguments.heads, "gaussian": arguments.heads, "smgk": arguments.heads // 2}
    heads["mgk"] = arguments.heads // 2
    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for preset, count in heads.items():
        tensors = inputs(preset, arguments.batch, count, arguments.tokens, arguments.head_dim)
        found = error(preset, is_causal, arguments.backend, tensors)
        if not found <= LARGEST_ERROR:
            raise SystemExit(f"{preset} is wrong by {found:.1e}: no times")
        attend, grad = attention(preset, is_causal, arguments.backend), torch.randn_like(tensors["value"])
        leaves = list(tensors.values())

        def forward(attend: Callable[..., Tensor] = attend, tensors: dict[str, Tensor] = tensors) -> None:
            with torch.no_grad():
                attend(tensors)

        def training(
            attend: Callable[..., Tensor] = attend,
            tensors: dict[str, Tensor] = tensors,
            leaves: list[Tensor] = leaves,
            grad: Tensor = grad,
        ) -> None:
            torch.autograd.grad(attend(tensors), leaves, grad)

        runs[preset] = (forward, training)

    times: dict[str, tuple[list[float], list[float]]] = {preset: ([], []) for preset in runs}
    for repeat in range(arguments.repeats + 1):
        for preset, functions in runs.items():
            for collected, function in zip(times[preset], functions, strict=True):
                elapsed = seconds(function)
                if repeat > 0:
                    collected.append(elapsed)
    medians = {preset: [statistics.median(collected) for collected in both] for preset, both in times.items()}
    print(
        f"\n{'causal' if is_causal else 'full'} attention, batch {arguments.batch}, {arguments.tokens} tokens, "
        f"head_dim {arguments.head_dim}, fp32, {torch.get_num_threads()} threads, median of {arguments.repeats}"
    )
    print(f"{'':>10} {'heads':>5} {'forward ms':>11} {'ratio':>6} {'training ms':>12} {'ratio':>6}")
    for preset, (forward_time, training_time) in medians.items():
        ratios = [base / mine for base, mine in zip(medians["softmax"], (forward_time, training_time), strict=True)]
        print(
            f"{preset:>10} {heads[preset]:>5} {1e3 * forward_time:>11.1f} {ratios[0]:>5.2f}x "
            f"{1e3 * training_time:>12.1f} {ratios[1]:>5.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8, help="heads of softmax; the mixtures get half")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backend", default="auto", help="of the mixtures; softmax is always the stock kernel")
    arguments = parser.parse_args()
    if arguments.heads < 2:
        parser.error(f"--heads must be at least 2, got {arguments.heads}")
    torch.manual_seed(0)
    print("ratio = time of stock F.scaled_dot_product_attention / time of the row; training = forward + backward")
    for is_causal in (False, True):
        compare(arguments, is_causal)


if __name__ == "__main__":
    main()
