"""The translation model: an encoder and a decoder with mixture attention in both and between them."""

import copy
from typing import Any, ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from mgk.models.attention import MGKAttention
from mgk.models.configuration import MGKConfig
from mgk.models.generation import MGKGenerationMixin
from mgk.models.layer import MGKLayer
from mgk.models.loss import IGNORED, cross_entropy
from mgk.models.model import MGKModel
from mgk.models.pretrained import ForwardOptions, MGKPreTrainedModel
from mgk.models.visibility import packed_positions


class MGKDecoder(MGKModel):
    """A causal stack whose layers attend to an encoder as well."""

    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": MGKLayer,
        "attentions": OutputRecorder(MGKAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MGKAttention, index=1, layer_name="cross_attn"),
    }

    input_prefix = "decoder_"

    def __init__(self, config: MGKConfig) -> None:
        super().__init__(config, is_causal=True, has_cross_attention=True, num_layers=config.decoder_layers)


class MGKSeq2SeqModel(MGKPreTrainedModel):
    """Encoder and decoder without a head.

    Source and target share one embedding table, unless ``config.source_vocab_size`` gives the source a vocabulary of
    its own or ``config.tie_word_embeddings`` is off.
    """

    def __init__(self, config: MGKConfig) -> None:
        config = _as_encoder_decoder(config)
        super().__init__(config)
        self.encoder = MGKModel(config, is_causal=False, vocab_size=config.source_vocab_size)
        self.decoder = MGKDecoder(config)
        if config.source_vocab_size is None:
            self._tied_weights_keys = {"encoder.embed_tokens.weight": "decoder.embed_tokens.weight"}
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embed_tokens = value
        if self.config.source_vocab_size is None and self.config.tie_word_embeddings:
            self.encoder.embed_tokens = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the size of the target's vocabulary, and of the source's if they share a table."""
        _keep_source_table(self.config)
        return super().resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        decoder_cu_seq_lens_q: Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> Seq2SeqModelOutput:
        """Run the encoder, unless ``encoder_outputs`` are given, and the decoder.

        Args:
            input_ids: ``[B, Ns]``, the source, unless ``inputs_embeds`` is given.
            attention_mask: ``[B, Ns]``, 0 at padding.
            decoder_input_ids: ``[B, Nt]``, the target so far, unless ``decoder_inputs_embeds`` is given.
            decoder_attention_mask: ``[B, past + Nt]``, 0 at padding.
            encoder_outputs: outputs of the encoder from an earlier call.
            past_key_values: an ``EncoderDecoderCache``.
            inputs_embeds: ``[B, Ns, hidden_size]``.
            decoder_inputs_embeds: ``[B, Nt, hidden_size]``.
            decoder_position_ids: ``[B, Nt]``; ``None`` counts from the first token that is not padding.
            use_cache: whether to fill a cache.
            decoder_cu_seq_lens_q: int32 ``[S + 1]``, boundaries of S targets that are packed one after the other in a
                batch of one row; ``cu_seq_lens_q`` has those of their sources.
            kwargs: ``output_attentions``: whether to return all weights, which materialises them;
                ``output_hidden_states``: whether to return the states between layers.
        """
        cu_seq_lens_q = kwargs.pop("cu_seq_lens_q", None)
        if (cu_seq_lens_q is None) != (decoder_cu_seq_lens_q is None):
            missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "decoder_cu_seq_lens_q"
            raise ValueError(f"sources and targets must both be packed, got no {missing}")
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, cu_seq_lens_q=cu_seq_lens_q,
                **{**kwargs, "use_cache": False},
            )  # fmt: skip
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if use_cache is None:
            use_cache = self.config.use_cache and cu_seq_lens_q is None and self.config.normalization == "sum"
        if use_cache and past_key_values is None and not (self.decoder.gradient_checkpointing and self.training):
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        decoded = self.decoder(
            decoder_input_ids, attention_mask=decoder_attention_mask, position_ids=decoder_position_ids,
            past_key_values=past_key_values, inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs[0], encoder_attention_mask=attention_mask, use_cache=use_cache,
            cu_seq_lens_q=decoder_cu_seq_lens_q, encoder_cu_seq_lens=cu_seq_lens_q, **kwargs,
        )  # fmt: skip
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )


class MGKForSeq2SeqLM(MGKPreTrainedModel, MGKGenerationMixin):
    """Encoder, decoder and a softmax over the target's vocabulary, with ``generate``."""

    def __init__(self, config: MGKConfig) -> None:
        config = _as_encoder_decoder(config)
        super().__init__(config)
        self.model = MGKSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
        if config.source_vocab_size is None:
            self._tied_weights_keys["model.encoder.embed_tokens.weight"] = "model.decoder.embed_tokens.weight"
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the size of the target's vocabulary, and of the source's if they share a table."""
        _keep_source_table(self.config)
        return super().resize_token_embeddings(*args, **kwargs)

    def get_encoder(self, *args: Any, **kwargs: Any) -> MGKModel:
        return self.model.encoder

    def get_decoder(self, *args: Any, **kwargs: Any) -> MGKDecoder:
        return self.model.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor, cu_seq_lens: Tensor | None = None) -> Tensor:
        """Return the decoder's input for predicting ``labels``: the start token, then all labels but the last."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError(
                f"labels need decoder_start_token_id and pad_token_id in the configuration, got {start} and {pad}"
            )
        return one_later(labels, start, pad, cu_seq_lens)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        decoder_cu_seq_lens_q: Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> Seq2SeqLMOutput:
        """Return logits ``[B, Nt, V]`` and, if ``labels [B, Nt]`` are given, the loss.

        Labels are the target itself. Without ``decoder_input_ids`` the decoder reads the labels shifted by one
        position. The other arguments are those of :meth:`MGKSeq2SeqModel.forward`.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, decoder_cu_seq_lens_q)
        outputs = self.model(
            input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask, encoder_outputs=encoder_outputs,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids, use_cache=use_cache,
            decoder_cu_seq_lens_q=decoder_cu_seq_lens_q, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None if labels is None else cross_entropy(logits, labels[:, kept], num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )


def one_later(labels: Tensor, start: int, pad: int, cu_seq_lens: Tensor | None = None) -> Tensor:
    """Shift ``labels [B, N]`` right by one position, put ``start`` first, and replace ignored labels by ``pad``.

    Packed labels ``[1, T]`` are shifted within each sequence.
    """
    late = F.pad(labels[..., :-1], (1, 0), value=start)
    if cu_seq_lens is not None:
        late = late.masked_fill(packed_positions(cu_seq_lens, labels.shape[-1]) == 0, start)
    return late.masked_fill(late == IGNORED, pad)


def _as_encoder_decoder(config: MGKConfig) -> MGKConfig:
    """Return the configuration, or a copy of it for this model if it was made for another one."""
    if config.is_encoder_decoder and config.decoder_layers is not None:
        return config
    config = copy.deepcopy(config)
    config.is_encoder_decoder = True
    config.decoder_layers = config.decoder_layers or config.num_hidden_layers
    return config


def _keep_source_table(config: MGKConfig) -> None:
    """Set the source's vocabulary size before the target's changes, if their tables are not tied."""
    if config.source_vocab_size is None and not config.tie_word_embeddings:
        config.source_vocab_size = config.vocab_size
