"""The base class of all models: initial weights, the choice of backend, saving and loading."""

from __future__ import annotations

import math
import os
from typing import Any, ClassVar, TypedDict

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache

from mgk.models.adaptive_softmax import AdaptiveSoftmax
from mgk.models.attention import BACKENDS, MGKAttention
from mgk.models.card import build as build_card
from mgk.models.card import licence
from mgk.models.card import metadata as card_metadata
from mgk.models.card import write as write_card
from mgk.models.configuration import MGKConfig
from mgk.models.layer import MGKLayer
from mgk.models.visibility import pad_to_slots
from mgk.nn import PRESETS, EMPrior, FixedVariance, LearnedPrior, LearnedVariance, ShiftedKeys
from mgk.ops.validation import may_inspect_values

# Alignment of torch's allocator on a CPU, in bytes.
ALIGNMENT = 64
NO_PAGES = (
    "continuous batching keeps keys in pages, which mixture attention does not read: use generate with a padded batch"
)


class ForwardOptions(TypedDict, total=False):
    """Arguments that every model's ``forward`` takes besides its own."""

    output_attentions: bool
    """Return the weights of every layer, which materialises them."""
    output_hidden_states: bool
    """Return the states between layers."""
    return_dict: bool
    """Return an output object, or a plain tuple if False."""
    cu_seq_lens_q: Tensor | None
    """Boundaries of sequences packed into one row: see :meth:`MGKModel.forward`."""


class MGKPreTrainedModel(PreTrainedModel):
    """Base class of all models."""

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

    def __init__(self, config: MGKConfig, *args: Any, **kwargs: Any) -> None:
        # Validated again, because fields may have been changed by hand or by `from_pretrained(..., dropout=7.0)`.
        config.validate()
        super().__init__(config, *args, **kwargs)
        # transformers asks this before it uses a mode of generation that may have to take back tokens.
        self._is_stateful = PRESETS[config.attention].feature_map is not None
        if PRESETS[config.attention].prior == "em":
            # In half precision a running mean would stop changing.
            self._keep_in_fp32_modules_strict = {"prior"}

    def _get_static_cache_init_shape(self) -> tuple[int, int] | None:
        """Shape with which transformers fills a static cache in advance; ``None`` for a state, made when needed."""
        if PRESETS[self.config.attention].feature_map is not None:
            return None
        return super()._get_static_cache_init_shape()

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing, so that transformers does not save copies of our source files after ``trust_remote_code=True``.

        The configuration writes what loading needs: see :mod:`mgk.models.remote_code`.
        """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as in transformers, but only from safetensors, because a pickle could run code.

        A damaged file is refused, and so is a file without a single weight of this model, unless
        ``output_loading_info=True`` asks for the list of missing ones. The loaded model reproduces the outputs of the
        saved one to the last bit.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors must be True, since other formats can run code, got False")
        report = kwargs.pop("output_loading_info", False)
        where = f"{pretrained_model_name_or_path}"
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True}, output_loading_info=True
            )
        except SafetensorError as error:
            raise ValueError(f"{where} must hold safetensors, got a damaged or foreign file: {error}") from error
        _align(model)
        if report:
            return model, info
        if kwargs.get("state_dict") is None and len(info["missing_keys"]) >= len(model.state_dict()):
            found = ", ".join(sorted(info["unexpected_keys"])[:3]) or "nothing"
            raise ValueError(f"{where} must hold the weights of {cls.__name__}, got {found}")
        return model

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save as in transformers, with a README.md that describes the model, unless you have written one."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        # For a model with adapters transformers saves only the adapters, and a pushed model has a card of its own.
        if is_main_process and not getattr(self, "_hf_peft_config_loaded", False) and os.path.isdir(save_directory):
            write_card(build_card(self, card_metadata(self), [("Licence", licence())]), save_directory)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the attention implementation for the ``attn_implementation`` that transformers was asked for."""
        if requested_attention is None:
            return "sdpa"
        if requested_attention.startswith("paged|"):
            raise ValueError(f'{NO_PAGES}, got `attn_implementation="{requested_attention}"`')
        if requested_attention not in BACKENDS:
            raise ValueError(
                f'Specified `attn_implementation="{requested_attention}"` is not supported: '
                "use 'sdpa' (the fastest that serves a call), 'triton' or 'eager'"
            )
        return requested_attention

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse continuous batching, which would otherwise fail in a thread that only logs the error."""
        raise ValueError(NO_PAGES)

    @staticmethod
    def create_masks_for_generate(
        config: MGKConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache, **_: Any
    ) -> Tensor | None:
        """Pad the mask to the length of a static cache, so that every step of generation has the same shapes."""
        if attention_mask is None or isinstance(past_key_values.get_seq_length(), int):
            return attention_mask
        return pad_to_slots(attention_mask, past_key_values.get_max_length())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise every parameter and buffer of one module.

        It uses transformers' functions, which skip loaded tensors, and torch's ``nn.init``, which transformers makes
        skip them, too, while it calls this.
        """
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            self._init_linear(module)
        elif isinstance(module, nn.Embedding):
            xavier = self.config.initialization == "xavier"
            init.normal_(module.weight, std=self.config.hidden_size**-0.5 if xavier else std)
        elif isinstance(module, AdaptiveSoftmax):
            module.reset_parameters(std)
        elif isinstance(module, (ShiftedKeys, LearnedPrior)):
            module.reset_parameters()
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
        bias_std = getattr(module, "bias_init_std", None)
        if bias_std is not None:
            init.normal_(module.bias, std=bias_std)
        elif self.config.initialization == "torch":
            bound = module.in_features**-0.5
            init.uniform_(module.bias, -bound, bound)
        else:
            init.zeros_(module.bias)


def _align(model: nn.Module) -> None:
    """Align weights that are mapped from a file, because matrix kernels round differently for unaligned ones."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT != 0:
            parameter.data = parameter.data.clone()


def check_token_ids(name: str, token_ids: Tensor, vocab_size: int) -> None:
    """Check shape, dtype and values, since on a GPU a wrong value fails in a device assertion far from here."""
    if token_ids.ndim != 2 or token_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} must be integers of shape [B, N], got {token_ids.dtype} of shape {list(token_ids.shape)}"
        )
    if may_inspect_values(token_ids) and token_ids.numel() > 0:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{name} must lie in [0, {vocab_size}), the vocabulary, got {lowest if lowest < 0 else highest}"
            )
