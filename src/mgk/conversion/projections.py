"""The projections of an attention module, read by head and resized in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mgk.conversion.families import AS_POSITIONS, Family
from mgk.conversion.heads import HeadPlan, check_heads, plan_heads, pool

KINDS = (nn.Linear, Conv1D)


class Projections:
    """The projections of one attention module.

    Args:
        family: the family of the model.
        module: the attention module.
        parent: the parent of the attention module.
    """

    def __init__(self, family: Family, module: nn.Module, parent: nn.Module) -> None:
        self.family = family
        self.module = module
        names = [family.fused_name] if family.fused else [family.query, family.key, family.value]
        self.inputs = [getattr(module, name) for name in names]
        self.output = (
            parent.get_submodule(family.output[3:]) if family.output[:3] == "../" else getattr(module, family.output)
        )
        for layer in (*self.inputs, self.output):
            if type(layer) not in KINDS:
                raise TypeError(
                    f"projections must be nn.Linear, got {type(layer).__name__} in {type(module).__name__}: convert a "
                    "model before it is quantised or gets adapters"
                )
        sizes = (getattr(module, name, None) for name in ("head_dim", "attention_head_size", "head_size"))
        self.head_dim: int = next(size for size in sizes if size is not None)
        query, key, _ = self._widths()
        self.old = (query // self.head_dim, key // self.head_dim)

    def _widths(self) -> list[int]:
        """Widths of queries, keys and values over all heads."""
        if self.family.fused is None:
            return [_rows(layer)[0].shape[0] for layer in self.inputs]
        return [_rows(self.inputs[0])[0].shape[0] // 3] * 3

    def check(self, num_heads: int | None, num_kv_heads: int | None, components: int) -> tuple[int, int]:
        """Return the new numbers of query and key/value heads, or raise an error if the module cannot have them."""
        heads, kv_heads = check_heads(self.old, num_heads, num_kv_heads)
        if not self.family.is_grouped and heads != kv_heads:
            raise ValueError(
                f"{type(self.module).__name__} shapes queries, keys and values alike, so num_kv_heads must be "
                f"num_heads, got {kv_heads} and {heads}"
            )
        if components > 1 and self.family.projected is None:
            raise ValueError(
                f"{type(self.module).__name__} has no key projection that M keys a head could widen, got {components} "
                "projected keys: take a preset of shifted keys such as 'smgk'"
            )
        return heads, kv_heads

    def resize(self, new: tuple[int, int], components: int, pooling: str, noise: Any) -> None:
        """Pool heads, and project ``components`` keys per position, which ``noise`` moves apart.

        Args:
            new: numbers of query and key/value heads from :meth:`check`.
            components: number of projected keys per position and head.
            pooling: ``"neighbours"`` or ``"similar"``.
            noise: function from the keys' weights ``[Hkv, M, D, in]`` to the noise to add; or ``None``.
        """
        weights, biases = self._read()
        alike: list[Tensor | None] = [None, None]
        # On the meta device there are no weights to compare.
        if pooling == "similar" and not weights[0].is_meta:
            alike = [weights[0], torch.cat([weights[1].flatten(1), weights[2].flatten(1)], dim=1)]
        plan = plan_heads(self.old, new, *alike)
        groups = (plan.query, plan.key, plan.key)
        weights = [pool(weight, group) for weight, group in zip(weights, groups, strict=True)]
        biases = [None if bias is None else pool(bias, group) for bias, group in zip(biases, groups, strict=True)]
        weights[1] = self._widen(weights[1], components, noise)
        biases[1] = None if biases[1] is None else self._widen(biases[1], components, None)
        self._write(weights, biases)
        self._pool_norms(plan, components)
        self._pool_output(plan)
        self._tell(*new)

    def _read(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return weights ``[heads, D, in]`` and biases ``[heads, D]`` of queries, keys and values."""
        weights: list[Tensor]
        biases: list[Tensor | None]
        if self.family.fused is None:
            weights, biases = map(list, zip(*map(_rows, self.inputs), strict=True))
        else:
            weight, bias = _rows(self.inputs[0])
            weights = self._unfuse(weight)
            biases = [None] * 3 if bias is None else list(self._unfuse(bias))
        sized = [weight.unflatten(0, (-1, self.head_dim)) for weight in weights]
        return sized, [None if bias is None else bias.unflatten(0, (-1, self.head_dim)) for bias in biases]

    def _unfuse(self, rows: Tensor) -> list[Tensor]:
        if self.family.fused == "thirds":
            return list(rows.chunk(3))
        return [part.flatten(0, 1) for part in rows.unflatten(0, (-1, 3, self.head_dim)).unbind(1)]

    def _widen(self, blocks: Tensor, components: int, noise: Any) -> Tensor:
        """Widen ``[Hkv, D, ...]`` to ``[Hkv * M, D, ...]``, with the components first if they pass as positions."""
        if components == 1:
            return blocks
        copies = blocks.unsqueeze(1).expand(-1, components, *[-1] * (blocks.ndim - 1))
        copies = copies if noise is None else copies + noise(copies)
        if self.family.projected == AS_POSITIONS:
            copies = copies.transpose(0, 1)
        return copies.flatten(0, 1)

    def _write(self, weights: list[Tensor], biases: list[Tensor | None]) -> None:
        flat = [weight.flatten(0, 1) for weight in weights]
        flat_biases = [None if bias is None else bias.flatten(0, 1) for bias in biases]
        if self.family.fused is None:
            for layer, weight, bias in zip(self.inputs, flat, flat_biases, strict=True):
                _set_rows(layer, weight, bias)
        elif self.family.fused == "thirds":
            bias = torch.cat([bias for bias in flat_biases if bias is not None]) if flat_biases[0] is not None else None
            _set_rows(self.inputs[0], torch.cat(flat), bias)
            # The module splits its projection by these sizes, which were equal so far.
            setattr(self.module, "split_size", [len(weight) for weight in flat])  # noqa: B010
        else:
            joined = torch.stack(weights, dim=1).flatten(0, 2)
            given = [bias for bias in biases if bias is not None]
            _set_rows(self.inputs[0], joined, torch.stack(given, dim=1).flatten() if given else None)

    def _pool_norms(self, plan: HeadPlan, components: int) -> None:
        for name, groups, copies in zip(self.family.norms or (), plan, (1, components), strict=False):
            norm = getattr(self.module, name)
            gains = pool(norm.weight.detach().unflatten(0, (-1, self.head_dim)), groups)
            _set(norm, "weight", self._widen(gains, copies, None).flatten())

    def _pool_output(self, plan: HeadPlan) -> None:
        weight, bias = _rows(self.output)
        by_head = weight.unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        # The projected outputs of the heads are added, so the projections of merged heads are added as well.
        pooled = pool(by_head, plan.query, is_sum=True)
        _set_rows(self.output, pooled.transpose(0, 1).flatten(1), bias)

    def _tell(self, heads: int, kv_heads: int) -> None:
        """Set the attributes from which the module takes its shapes."""
        module: Any = self.module
        for name, value in (
            ("num_attention_heads", heads),
            ("num_heads", heads),
            ("num_key_value_groups", heads // kv_heads),
            ("all_head_size", heads * self.head_dim),
            (self.family.heads_attribute, kv_heads),
        ):
            if name and hasattr(module, name):
                setattr(module, name, value)


def _rows(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight ``[out, in]`` and bias of a layer."""
    weight = layer.weight.detach()
    return weight.T if isinstance(layer, Conv1D) else weight, None if layer.bias is None else layer.bias.detach()


def _set_rows(layer: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Replace the weight ``[out, in]`` and the bias of a layer."""
    if isinstance(layer, Conv1D):
        layer.nf, layer.nx = weight.shape
        weight = weight.T
    else:
        layer.out_features, layer.in_features = weight.shape
    _set(layer, "weight", weight)
    if bias is not None:
        _set(layer, "bias", bias)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    old = getattr(module, name)
    if value.shape == old.shape and (value.is_meta or torch.equal(value, old)):
        return
    # Attributes are copied, because transformers marks loaded parameters, which it must not initialise again.
    new = nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format), requires_grad=old.requires_grad)
    if hasattr(old, "_is_hf_initialized"):
        new._is_hf_initialized = old._is_hf_initialized  # type: ignore[attr-defined]
    setattr(module, name, new)
