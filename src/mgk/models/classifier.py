"""Sequence classification: the Long Range Arena model."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from mgk.models.configuration import MGKConfig
from mgk.models.loss import cross_entropy, mean_loss
from mgk.models.model import MGKModel
from mgk.models.pretrained import ForwardOptions, MGKPreTrainedModel
from mgk.ops.boundaries import sequence_of_tokens


def sum_over_tokens(hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum ``[B, N, d]`` over the tokens that are not padding, and return ``[B, d]`` and their number, ``[B]``.

    The sum is in fp32, because a few thousand tokens overflow fp16.
    """
    if attention_mask is None:
        attention_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must have shape [B, N] to take a mean, got {list(attention_mask.shape)}")
    valid = attention_mask.bool()
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    total = hidden_states.masked_fill(~valid[..., None], 0.0).sum(dim=1, dtype=dtype)
    return total, valid.sum(dim=1)


def sum_over_sequences(hidden_states: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sum ``[1, T, d]`` over the tokens of each packed sequence, and return ``[S, d]`` and their number, ``[S]``.

    The sum is a product with a matrix of zeros and ones, which has a fixed order, forward and backward.
    """
    sequence = sequence_of_tokens(cu_seqlens, hidden_states.shape[1])
    number = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    with torch.autocast(hidden_states.device.type, enabled=False):
        total = (sequence[None, :] == number[:, None]).to(dtype) @ hidden_states[0].to(dtype)
    return total, cu_seqlens.diff()


def pool(hidden_states: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, config: MGKConfig) -> Tensor:
    """Pool each sequence, padded or packed, as ``config.pooling`` says. A sequence without tokens gives 0."""
    if cu_seqlens is not None:
        total, count = sum_over_sequences(hidden_states, cu_seqlens)
    else:
        total, count = sum_over_tokens(hidden_states, attention_mask)
    if config.pooling == "mean":
        return (total / count.clamp(min=1)[:, None]).to(hidden_states.dtype)
    length = config.max_position_embeddings if config.pooling_length is None else config.pooling_length
    return (total / length).to(hidden_states.dtype)


class ClassificationHead(nn.Module):
    """``Linear, ReLU, Linear``."""

    def __init__(self, input_size: int, config: MGKConfig) -> None:
        super().__init__()
        assert config.num_labels is not None
        self.dense = nn.Linear(input_size, config.classifier_size)
        self.out_proj = nn.Linear(config.classifier_size, config.num_labels)

    def forward(self, features: Tensor) -> Tensor:
        return self.out_proj(F.relu(self.dense(features)))


def classification_loss(config: MGKConfig, logits: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
    """Loss according to ``config.problem_type``; if that is ``None``, according to the labels, as in transformers."""
    problem = config.problem_type
    if problem is None:
        if config.num_labels == 1:
            problem = "regression"
        elif labels.dtype in (torch.int64, torch.int32):
            problem = "single_label_classification"
        else:
            problem = "multi_label_classification"
    if problem == "single_label_classification":
        return cross_entropy(logits, labels.flatten(), num_items)
    if labels.numel() != logits.numel():
        raise ValueError(f"labels must have shape {list(logits.shape)} for {problem}, got {list(labels.shape)}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits, labels = logits.to(dtype), labels.to(dtype).view_as(logits)
    loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    # Every number is a target here: -100 marks labels to ignore only among classes.
    return mean_loss(loss(logits, labels, reduction="sum"), torch.zeros_like(labels), num_items)


class MGKForSequenceClassification(MGKPreTrainedModel):
    """The Long Range Arena classifier: an encoder, pooling over its last states (``config.pooling``), a small MLP."""

    def __init__(self, config: MGKConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MGKModel(config)
        self.classifier = ClassificationHead(config.hidden_size, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> SequenceClassifierOutput:
        """Return logits ``[B, num_labels]`` and, if ``labels [B]`` are given, the loss.

        The other arguments are those of :meth:`MGKModel.forward`. With ``cu_seq_lens_q`` each packed sequence has one
        row of logits and one label.
        """
        outputs = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
            **{**kwargs, "use_cache": False},
        )  # fmt: skip
        logits = self.classifier(
            pool(outputs.last_hidden_state, attention_mask, kwargs.get("cu_seq_lens_q"), self.config)
        )
        loss = None if labels is None else classification_loss(self.config, logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
