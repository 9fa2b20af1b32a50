"""The language model."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from mgk.models.adaptive_softmax import AdaptiveSoftmax
from mgk.models.configuration import MGKConfig
from mgk.models.generation import MGKGenerationMixin
from mgk.models.loss import IGNORED, check_labels, cross_entropy, mean_loss, shifted_labels
from mgk.models.model import MGKModel
from mgk.models.pretrained import ForwardOptions, MGKPreTrainedModel


class CausalLMOptions(ForwardOptions, total=False):
    """Options that are no named argument of ``forward``, where ``Trainer`` would take them for columns of the data."""

    shift_labels: Tensor
    cluster_rows: Sequence[Tensor]


class MGKForCausalLM(MGKPreTrainedModel, MGKGenerationMixin):
    """A causal language model with a plain or an adaptive softmax, and with ``generate``."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MGKConfig) -> None:
        if config.is_encoder_decoder:
            raise ValueError("MGKForCausalLM needs is_encoder_decoder=False, got True: use MGKForSeq2SeqLM")
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        self.model = MGKModel(config)
        self.lm_head: nn.Linear | AdaptiveSoftmax
        if config.adaptive_cutoffs is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.lm_head = AdaptiveSoftmax(config.hidden_size, config.vocab_size, config.adaptive_cutoffs)
        if config.positions_from == "end" and self.generation_config is not None:
            self.generation_config.use_cache = False
        self.post_init()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer if it is a single matrix, otherwise ``None``."""
        return None if self._is_adaptive else self.lm_head

    @property
    def _is_adaptive(self) -> bool:
        """Whether the softmax is adaptive, according to the configuration: PEFT may have wrapped the head itself."""
        return self.config.adaptive_cutoffs is not None

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **kwargs: Any
    ) -> nn.Embedding:
        """Change the size of the vocabulary."""
        if self._is_adaptive:
            size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
            size = size if pad_to_multiple_of is None else -(-size // pad_to_multiple_of) * pad_to_multiple_of
            if size != self.config.vocab_size:
                raise ValueError(
                    f"the clusters of an adaptive softmax end at vocab_size={self.config.vocab_size}, "
                    f"which cannot become {size}"
                )
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, **kwargs)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Continue prompts, as in transformers, with padding on either side of a prompt or inside it.

        New tokens follow the last token of a prompt, never its padding. The returned prompts are unchanged, but the
        weights of ``output_attentions`` have the padding first. Without a mask, tokens that equal the padding token are
        padding, as everywhere in transformers.
        """
        prompts = kwargs.pop("input_ids", None) if inputs is None else inputs
        mask, embeds = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
        if prompts is not None and (not isinstance(prompts, Tensor) or prompts.ndim != 2):
            got = f"shape {list(prompts.shape)}" if isinstance(prompts, Tensor) else type(prompts).__name__
            raise ValueError(f"prompts must be a tensor of shape [B, N], got {got}")
        if mask is None and prompts is not None and kwargs.get("past_key_values") is None:
            mask = self._mask_of_padding(prompts, args[0] if args else kwargs.get("generation_config"), kwargs)
        given = embeds if prompts is None else prompts
        if given is None or mask is None or mask.shape != given.shape[:2]:
            return super().generate(prompts, *args, **kwargs)
        # The stable sort puts padding first and keeps the order of the tokens.
        order = mask.bool().long().argsort(dim=1, stable=True)
        kwargs["attention_mask"] = mask.gather(1, order)
        if (positions := kwargs.get("position_ids")) is not None and positions.shape == mask.shape:
            kwargs["position_ids"] = positions.gather(1, order)
        if embeds is not None and embeds.shape[:2] == mask.shape:
            kwargs["inputs_embeds"] = embeds.gather(1, order[..., None].expand_as(embeds))
        if prompts is None:
            return super().generate(None, *args, **kwargs)
        out = super().generate(prompts.gather(1, order), *args, **kwargs)
        sequences = out if isinstance(out, Tensor) else out.sequences
        copies = sequences.shape[0] // prompts.shape[0]
        sequences[:, : prompts.shape[1]] = prompts.repeat_interleave(copies, dim=0)
        return out

    def _mask_of_padding(
        self, prompts: Tensor, generation: GenerationConfig | None, settings: dict[str, Any]
    ) -> Tensor | None:
        """Mask of prompts by their padding token; ``None`` without such a token, or if it also ends a text."""

        def setting(name: str) -> Any:
            # As in transformers, what a generation_config leaves open is taken from that of the model.
            given = getattr(generation, name, None)
            return settings.get(name, getattr(self.generation_config, name) if given is None else given)

        pad, end = setting("pad_token_id"), setting("eos_token_id")
        if pad is None or pad in (end if isinstance(end, list) else [end]):
            return None
        return (prompts != pad).long()

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Leave positions from the end to :meth:`MGKModel.forward`, because transformers counts from the start."""
        if self.config.positions_from == "end":
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Unpack[CausalLMOptions],
    ) -> CausalLMOutputWithPast:
        """Return logits ``[B, N, V]`` and, if labels are given, the loss.

        With an adaptive softmax the logits are log-probabilities. If labels are given, they are ``None``, because the
        loss never forms them.

        Args:
            input_ids: ``[B, N]``, see :meth:`MGKModel.forward`.
            attention_mask: see :meth:`MGKModel.forward`.
            position_ids: see :meth:`MGKModel.forward`.
            past_key_values: see :meth:`MGKModel.forward`.
            inputs_embeds: see :meth:`MGKModel.forward`.
            labels: ``[B, N]``, the tokens themselves (position i predicts label i + 1); -100 is ignored.
            use_cache: see :meth:`MGKModel.forward`.
            logits_to_keep: number of last positions, or indices of positions, to compute logits for; 0 is all.
            num_items_in_batch: divides the summed loss instead of the number of labels.
            kwargs: ``output_attentions`` and ``output_hidden_states``, see there; ``shift_labels [B, N]``, what each
                position predicts, instead of ``labels``; with an adaptive softmax ``cluster_rows``, what
                :func:`mgk.models.cluster_rows` says of the flattened ``shift_labels``, so that the host waits for
                nothing and the model can be recorded.
        """
        targets, rows = kwargs.pop("shift_labels", None), kwargs.pop("cluster_rows", None)
        if targets is None and labels is not None:
            targets = shifted_labels(labels)
        outputs = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept]
        logits, loss = None, None
        if targets is None or not self._is_adaptive:
            logits = self.lm_head(hidden_states)
        if targets is not None:
            loss = self._loss(hidden_states, logits, targets[:, kept], rows, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        targets: Tensor,
        rows: Sequence[Tensor] | None,
        num_items: int | Tensor | None,
    ) -> Tensor:
        if logits is not None:
            return cross_entropy(logits, targets, num_items)
        check_labels(targets, self.config.vocab_size)
        counted = targets.flatten() != IGNORED
        losses = self.lm_head(hidden_states.flatten(0, 1), targets.flatten().long().masked_fill(~counted, 0), rows)
        return mean_loss(torch.where(counted, losses, 0.0).sum(), targets, num_items)
