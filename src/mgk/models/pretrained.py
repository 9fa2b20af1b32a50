"""What all models share: initial weights, the choice of backend, and what transformers must know about them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache

from mgk.models.adaptive_softmax import AdaptiveSoftmax
from mgk.models.attention import BACKENDS, MGKAttention
from mgk.models.configuration import MGKConfig
from mgk.models.layer import MGKLayer
from mgk.models.visibility import pad_to_slots
from mgk.nn import EMPrior, FixedVariance, LearnedPrior, LearnedVariance, ShiftedKeys
from mgk.ops.validation import may_inspect_values


class MGKPreTrainedModel(PreTrainedModel):
    """Base of all models."""

    config_class = MGKConfig
    config: MGKConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["MGKLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = False
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": MGKLayer, "attentions": MGKAttention}

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """transformers asks here what to make of ``attn_implementation``."""
        if requested_attention is None:
            return "sdpa"
        if requested_attention == "triton":
            raise ValueError("attn_implementation='triton' is not part of this version: use 'sdpa' or 'eager'")
        if requested_attention not in BACKENDS:
            raise ValueError(
                f'Specified `attn_implementation="{requested_attention}"` is not supported: '
                f"it must be one of {', '.join(BACKENDS)}"
            )
        return requested_attention

    @staticmethod
    def create_masks_for_generate(
        config: MGKConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache, **_: Any
    ) -> Tensor | None:
        """Give the mask the length of the static cache, so that every step of generation has the same shapes."""
        if attention_mask is None or isinstance(past_key_values.get_seq_length(), int):
            return attention_mask
        return pad_to_slots(attention_mask, past_key_values.get_max_length())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Every parameter and buffer of one module, through transformers' functions: they skip what was loaded."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            self._init_linear(module)
        elif isinstance(module, nn.Embedding):
            xavier = self.config.initialization == "xavier"
            init.normal_(module.weight, std=self.config.hidden_size**-0.5 if xavier else std)
        elif isinstance(module, AdaptiveSoftmax):
            init.normal_(module.weight, std=std)
            init.normal_(module.cluster_weight, std=std)
            init.zeros_(module.bias)
            init.zeros_(module.cluster_bias)
        elif isinstance(module, ShiftedKeys):
            init.normal_(module.shift, std=module.init_std)
        elif isinstance(module, LearnedPrior):
            init.zeros_(module.logits)
        elif isinstance(module, EMPrior):
            init.constant_(module.log_prior, -math.log(module.log_prior.shape[1]))
        elif isinstance(module, LearnedVariance):
            init.copy_(module.log_variance, torch.tensor(module.initial).log().expand_as(module.log_variance))
        elif isinstance(module, FixedVariance):
            if module.per_component is not None:
                init.copy_(module.per_component, torch.tensor(module.values))
        else:
            super()._init_weights(module)

    def _init_linear(self, module: nn.Linear) -> None:
        if self.config.initialization == "normal":
            init.normal_(module.weight, std=self.config.initializer_range)
        elif self.config.initialization == "xavier":
            init.xavier_uniform_(module.weight)
        else:
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        if module.bias is None:
            return
        if self.config.initialization == "torch":
            bound = module.in_features**-0.5
            init.uniform_(module.bias, -bound, bound)
        else:
            init.zeros_(module.bias)


def check_token_ids(name: str, token_ids: Tensor, vocab_size: int) -> None:
    """On a GPU a token outside the vocabulary would be a device assertion far from here."""
    if may_inspect_values(token_ids) and token_ids.numel() > 0:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{name} must lie in [0, {vocab_size}), the vocabulary, got {lowest if lowest < 0 else highest}"
            )
