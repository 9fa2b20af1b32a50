"""The changes of a conversion to the modules of a model, for existing weights and before loading saved ones."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from mgk.conversion.attention import MIXTURE, NAME
from mgk.conversion.cache import CacheCheck
from mgk.conversion.families import AS_HEADS, Family, family_of
from mgk.conversion.mixture import KeyMixture
from mgk.conversion.projections import Projections
from mgk.conversion.record import Record
from mgk.nn import PRESETS


def install(model: Any, record: Record, *, pooling: str = "neighbours", noise: Any = None) -> None:
    """Give every attention module its new heads, keys and mixture.

    Args:
        model: a model of a family.
        record: arguments of the conversion.
        pooling: which heads are merged.
        noise: noise that moves equal keys apart, for existing weights.
    """
    family = family_of(model)
    found = attention_modules(model, family)
    shifted = PRESETS[record.attention].keys == "shifted"
    projected = 1 if shifted else record.components
    heads = [projections.check(record.num_heads, record.num_kv_heads, projected) for _, projections in found]
    for (module, projections), (num_heads, num_kv_heads) in zip(found, heads, strict=True):
        projections.resize((num_heads, num_kv_heads), projected, pooling, noise)
        mixture = KeyMixture(record, num_kv_heads, projections.head_dim, family.projected)
        weight: Any = projections.output.weight
        setattr(module, MIXTURE, mixture.to(device=weight.device, dtype=weight.dtype).train(module.training))
        key_heads = num_kv_heads * (projected if family.projected == AS_HEADS else 1)
        check = CacheCheck(getattr(module, "layer_idx", None), key_heads, num_kv_heads, projections.head_dim)
        module.register_forward_pre_hook(check, with_kwargs=True)
    record.write(model.config)
    if family.has_head_fields:
        config = model.config
        config.head_dim = found[0][1].head_dim
        config.num_attention_heads, config.num_key_value_heads = heads[0]
    # In some models encoder and decoder have copies of the configuration.
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._attn_implementation = NAME


def attention_modules(model: nn.Module, family: Family) -> list[tuple[nn.Module, Projections]]:
    """Return all attention modules of a model, with their projections."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if type(module).__name__ in family.attentions:
            found.append((module, Projections(family, module, modules[name.rpartition(".")[0]])))
    if not found:
        raise ValueError(f"model must have an attention of {family.attentions[0]}, got {type(model).__name__} without")
    return found
