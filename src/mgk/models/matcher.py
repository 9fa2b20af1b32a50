"""Classification of sequence pairs: the Long Range Arena Retrieval model."""

from typing import Any, Unpack

import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from mgk.models.classifier import ClassificationHead, classification_loss, pool
from mgk.models.configuration import MGKConfig
from mgk.models.model import MGKModel
from mgk.models.pretrained import ForwardOptions, MGKPreTrainedModel


class MGKForSequencePairClassification(MGKPreTrainedModel):
    """One encoder for both sequences, and a head on ``[a, b, a * b, a - b]`` of their pooled states a and b."""

    def __init__(self, config: MGKConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MGKModel(config)
        self.classifier = ClassificationHead(4 * config.hidden_size, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pair_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        pair_cu_seq_lens_q: Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> SequenceClassifierOutput:
        """Return logits ``[B, num_labels]`` and, if ``labels [B]`` are given, the loss.

        ``input_ids [B, N]`` and ``pair_input_ids [B, N']`` are the two sequences, each with its mask; both may be given
        as embeddings instead. States and attentions in the output are those of the first sequence; call ``model.model``
        for those of the second. If packed, each has its own ``cu_seq_lens_q``, with the same number of sequences.
        """
        if (pair_input_ids is None) == (pair_inputs_embeds is None):
            got = "neither" if pair_input_ids is None else "both"
            raise ValueError(f"exactly one of pair_input_ids and pair_inputs_embeds must be given, got {got}")
        options: dict[str, Any] = {**kwargs, "use_cache": False}
        bounds = options.get("cu_seq_lens_q")
        first = self.model(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **options)
        options["cu_seq_lens_q"] = pair_cu_seq_lens_q
        second = self.model(
            pair_input_ids, attention_mask=pair_attention_mask, inputs_embeds=pair_inputs_embeds, **options
        )
        a = pool(first.last_hidden_state, attention_mask, bounds, self.config)
        b = pool(second.last_hidden_state, pair_attention_mask, pair_cu_seq_lens_q, self.config)
        if a.shape[0] != b.shape[0]:
            raise ValueError(f"both sides must have as many sequences, got {a.shape[0]} and {b.shape[0]}")
        logits = self.classifier(torch.cat([a, b, a * b, a - b], dim=-1))
        loss = None if labels is None else classification_loss(self.config, logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=first.hidden_states,
            attentions=first.attentions,
        )
