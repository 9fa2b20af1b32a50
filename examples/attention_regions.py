"""The picture of the README: which position does a query attend to?

Four positions in the plane. With one Gaussian each, a position wins the region nearest to its key: one piece with
straight borders. With a mixture of two it wins several. Colours mix by attention weight, computed by the library.

    python examples/attention_regions.py docs/attention_regions.png
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import mgk

COLOURS = torch.tensor([[0.12, 0.47, 0.71], [1.0, 0.5, 0.05], [0.17, 0.63, 0.17], [0.84, 0.15, 0.16]])
EXTENT, PIXELS = 3.2, 320


def attention_colours(key: torch.Tensor) -> torch.Tensor:
    """Colour of every query in the plane, ``[PIXELS, PIXELS, 3]``, for keys ``[M, N, 2]``."""
    axis = torch.linspace(-EXTENT, EXTENT, PIXELS)
    plane = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).reshape(1, 1, -1, 2)
    # The values are colours: what comes out is the mixture of the positions' colours.
    out = mgk.mixture_attention(plane, key[None, None], COLOURS[None, None], variance=0.12)
    return out.reshape(PIXELS, PIXELS, 3).clamp(0, 1)


def main() -> None:
    first = torch.tensor([[-1.9, 1.4], [1.7, 1.7], [-1.5, -1.7], [1.9, -1.3]])
    second = torch.tensor([[0.9, -2.4], [-2.4, -0.2], [0.3, 0.5], [0.2, 2.5]])
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    panels = {"one Gaussian per position": first[None], "a mixture of two": torch.stack([first, second])}
    for axis, (title, key) in zip(axes, panels.items(), strict=True):
        axis.imshow(attention_colours(key), origin="lower", extent=(-EXTENT, EXTENT, -EXTENT, EXTENT))
        for component, marker in zip(key, ("o", "s"), strict=False):
            axis.scatter(*component.T, c=COLOURS.numpy(), marker=marker, s=70, edgecolors="white", linewidths=1.5)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "attention_regions.png", dpi=110)


if __name__ == "__main__":
    main()
