"""The trunk of every model: embeddings and a stack of layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from mgk.models.configuration import MGKConfig
from mgk.models.layer import MGKLayer, build_norm
from mgk.models.positions import RotaryEmbedding, Rotation, build_positions
from mgk.models.pretrained import MGKPreTrainedModel, check_token_ids
from mgk.models.visibility import (
    Visibility,
    packed_positions,
    packed_visibility,
    padding_mask,
    past_length,
    self_visibility,
    token_positions,
)


class MGKModel(MGKPreTrainedModel):
    """Token embeddings, positions and layers, without a head.

    Self-attention is bidirectional, or causal with ``config.is_decoder``, which is set for language models.

    Args:
        config: configuration of the model.
        is_causal: overrides ``config.is_decoder``.
        has_cross_attention: whether each layer attends to an encoder as well.
        num_layers: overrides ``config.num_hidden_layers``.
        vocab_size: overrides ``config.vocab_size``.
    """

    input_prefix = ""
    """Prefix of the names of inputs in error messages."""

    def __init__(
        self,
        config: MGKConfig,
        *,
        is_causal: bool | None = None,
        has_cross_attention: bool = False,
        num_layers: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(config)
        self.is_causal = config.is_decoder if is_causal is None else is_causal
        self.has_cross_attention = has_cross_attention
        self.embedding_scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
        self.embed_tokens = nn.Embedding(config.vocab_size if vocab_size is None else vocab_size, config.hidden_size)
        self.embed_positions = build_positions(config)
        self.rotary_emb = RotaryEmbedding(config) if config.positions == "rotary" else None
        self.layers = nn.ModuleList(
            MGKLayer(config, number, is_causal=self.is_causal, has_cross_attention=has_cross_attention)
            for number in range(config.num_hidden_layers if num_layers is None else num_layers)
        )
        self.norm = build_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as in transformers. ``AutoModel`` calls this for every configuration, including translation."""
        if cls is MGKModel and getattr(kwargs.get("config"), "is_encoder_decoder", False):
            return _seq2seq_model().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: MGKConfig, **kwargs: Any) -> Any:
        """Build a model for ``AutoModel.from_config``."""
        if cls is MGKModel and config.is_encoder_decoder:
            return _seq2seq_model()._from_config(config, **kwargs)
        return super()._from_config(config, **kwargs)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        encoder_cu_seq_lens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the stack.

        Args:
            input_ids: ``[B, N]``, unless ``inputs_embeds`` is given.
            attention_mask: ``[B, past + N]``, 0 at padding on either side; or a mask of pairs ``[B, 1 or H, N, Nk]``.
            position_ids: ``[B, N]``; ``None`` counts from the first token that is not padding. Positions that restart
                within a row mark packed sequences, which do not see each other.
            past_key_values: a cache of transformers, dynamic or static, for a causal stack.
            inputs_embeds: ``[B, N, hidden_size]`` instead of tokens.
            encoder_hidden_states: ``[B, Ns, hidden_size]``, for cross-attention.
            encoder_attention_mask: ``[B, Ns]``.
            use_cache: whether to fill a cache, which is a new one unless ``past_key_values`` is given.
            output_attentions: whether to return the weights of every layer, which materialises them.
            output_hidden_states: whether to return the states between layers.
            cu_seq_lens_q: int32 ``[S + 1]``, boundaries of S sequences that are packed one after the other in a batch
                of one row. ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` of transformers returns it;
                its other numbers are not needed.
            encoder_cu_seq_lens: boundaries of ``encoder_hidden_states``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            names = f"{self.input_prefix}input_ids and {self.input_prefix}inputs_embeds"
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"exactly one of {names} must be given, got {got}")
        if inputs_embeds is None:
            assert input_ids is not None
            check_token_ids(f"{self.input_prefix}input_ids", input_ids, self.embed_tokens.weight.shape[0])
            inputs_embeds = self.embed_tokens(input_ids)
        batch_size, num_queries, width = inputs_embeds.shape
        if width != self.config.hidden_size:
            raise ValueError(f"inputs_embeds must have width hidden_size={self.config.hidden_size}, got {width}")
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            kind = type(past_key_values).__name__
            raise TypeError(f"past_key_values must be a cache of transformers, such as DynamicCache, got {kind}")
        if position_ids is not None and position_ids.shape not in ((batch_size, num_queries), (1, num_queries)):
            raise ValueError(
                f"position_ids must have shape {[batch_size, num_queries]}, got {list(position_ids.shape)}"
            )
        if output_attentions is None:
            output_attentions = bool(self.config.output_attentions)
        if not self.is_causal:
            past_key_values = None
        elif self.config.positions_from == "end":
            if past_key_values is not None:
                raise ValueError(
                    "positions that are counted from the end change with every token, so nothing can be cached, "
                    "got past_key_values: generate with use_cache=False"
                )
        elif use_cache and past_key_values is None and cu_seq_lens_q is None and self.config.normalization == "sum":
            past_key_values = DynamicCache(config=self.config)

        if cu_seq_lens_q is not None:
            visibility = packed_visibility(
                f"{self.input_prefix}cu_seq_lens_q", cu_seq_lens_q, inputs_embeds, attention_mask, past_key_values,
                self.is_causal,
            )  # fmt: skip
            if position_ids is None:
                position_ids = packed_positions(
                    cu_seq_lens_q, num_queries, from_end=self.config.positions_from == "end"
                )
        else:
            visibility = self_visibility(
                attention_mask, position_ids, past_key_values, batch_size, num_queries, self.is_causal
            )
        if position_ids is None:
            past = past_length(past_key_values)
            position_ids = token_positions(attention_mask, past, num_queries, inputs_embeds.device)
            if self.config.positions_from == "end":
                position_ids = position_ids.amax(dim=-1, keepdim=True) - position_ids
        hidden_states = inputs_embeds * self.embedding_scale
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids).to(hidden_states.dtype)
        hidden_states = F.dropout(hidden_states, self.config.dropout, self.training)
        rotation = None
        if self.rotary_emb is not None:
            rotation = Rotation(*self.rotary_emb(hidden_states, position_ids))
        context_visibility = None
        if self.has_cross_attention:
            shape = (batch_size, -1 if encoder_hidden_states is None else encoder_hidden_states.shape[1])
            mask = padding_mask("encoder_attention_mask", encoder_attention_mask, shape)
            # Padding among the targets is no query here either, which counts for EM priors and for analyses.
            context_visibility = Visibility(
                key_mask=mask, query_mask=visibility.query_mask, cu_seqlens=cu_seq_lens_q,
                cu_seqlens_k=encoder_cu_seq_lens,
            )  # fmt: skip

        for layer in self.layers:
            hidden_states = layer(
                hidden_states, visibility, encoder_hidden_states, context_visibility, rotation=rotation,
                past_key_values=past_key_values, output_attentions=output_attentions,
            )  # fmt: skip
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )


def _seq2seq_model() -> type[MGKPreTrainedModel]:
    # Imported late, because that module builds on this one.
    from mgk.models.seq2seq import MGKSeq2SeqModel

    return MGKSeq2SeqModel
