"""The record of all attention calls of a model on a batch, from which the analyses start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mgk.evaluation.inference import evaluation_mode
from mgk.models import MGKPreTrainedModel
from mgk.nn import MixtureAttention
from mgk.ops import linear_mixture_weights, mixture_weights

# Default number of queries per head that are analysed. Longer sequences are sampled evenly, because the cost of a
# singular value decomposition grows with the cube of the number.
NUM_QUERIES = 1024
# Most bytes of attention weights that are kept for a layer.
KEPT_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """One call of an attention layer: its queries, keys and masks."""

    name: str
    """Name to show: ``layer 1``, ``encoder layer 2``, ``decoder layer 1, cross``."""
    path: str
    """Path of the module in the model."""
    attention: MixtureAttention
    """The layer itself."""
    query: Tensor
    """``[B, H, Nq, D]``, after positions and norms."""
    key: Tensor
    """``[B, Hkv, M, Nk, D]``, or ``[B, Hkv, Nk, D]`` if shifts have to be added."""
    shift: Tensor | None
    """``[Hkv, M, D]``, or ``None``."""
    is_causal: bool
    """Whether a query sees only keys up to its own position."""
    key_mask: Tensor | None
    """bool ``[B, Nk]``, False at padding."""
    query_mask: Tensor | None
    """bool ``[B, Nq]``, False at padding."""
    attn_mask: Tensor | None
    """bool, broadcastable to ``[B, H, Nq, Nk]``."""
    _keeps: list[bool] = field(default_factory=list, init=False, repr=False)
    """Not empty inside :meth:`keeping_weights`."""
    _kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    """Queries and their weights, by sample and head."""

    @property
    def num_samples(self) -> int:
        return len(self.query)

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def num_components(self) -> int:
        return self.attention.num_components

    @property
    def is_linear(self) -> bool:
        return self.attention.feature_map is not None

    @torch.no_grad()
    def component_keys(self, sample: int) -> Tensor:
        """Keys of a sample that are not padding, with shifts added, ``[Hkv, M, n, D]``."""
        key = self.key[sample]
        if key.ndim == 3:
            key = key[:, None]
        if self.shift is not None:
            key = key + self.shift.detach().to(key.dtype)[:, :, None, :]
        return key[:, :, self.keys(sample)]

    def keys(self, sample: int) -> Tensor:
        """Positions of the keys that are not padding."""
        return _positions(self.key_mask, sample, self.key.shape[-2], self.key.device)

    def queries(self, sample: int, limit: int | None = None) -> Tensor:
        """Positions of the queries that are not padding, at most ``limit`` of them, evenly spaced."""
        found = _positions(self.query_mask, sample, self.query.shape[2], self.query.device)
        if limit is None or len(found) <= limit:
            return found
        return found[torch.arange(limit, device=found.device) * len(found) // limit]

    def check_has_tokens(self, sample: int) -> None:
        """Raise an error for a sample that is padding alone, whose attention matrix is empty."""
        if len(self.queries(sample)) == 0 or len(self.keys(sample)) == 0:
            raise ValueError(f"every sequence must have a token, got sequence {sample} of {self.name} with none")

    def visible(self, sample: int, head: int, queries: Tensor) -> Tensor | None:
        """Mask of the keys, without padding, that each query sees, bool ``[n, keys]``; ``None`` if all are seen."""
        keys = self.keys(sample)
        seen = None
        if self.is_causal:
            seen = keys <= queries[:, None] + self.key.shape[-2] - self.query.shape[2]
        if self.attn_mask is not None:
            pairs = self.attn_mask.expand(self.num_samples, self.num_heads, self.query.shape[2], -1)[sample, head]
            pairs = pairs[queries][:, keys]
            seen = pairs if seen is None else seen & pairs
        return seen

    @torch.no_grad()
    def problem(self, sample: int, head: int, queries: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of :func:`mgk.mixture_weights` and similar functions for one head of one sample, without padding.

        Linear attention, which has neither variance nor masks of pairs, is not supported.
        """
        own = head // (self.num_heads // self.num_kv_heads)
        seen = self.visible(sample, head, queries)
        variance, log_prior = self.attention.variance(), self.attention.prior()
        if isinstance(variance, Tensor) and variance.ndim == 2:
            variance = variance[own : own + 1]
        return {
            "query": self.query[sample, head, queries].to(dtype)[None, None],
            "key": self.key[sample, own].index_select(-2, self.keys(sample)).to(dtype)[None, None],
            "shift": None if self.shift is None else self.shift[own : own + 1].detach().to(dtype),
            "log_prior": None if log_prior is None else log_prior[own : own + 1].to(dtype),
            "variance": variance.to(dtype) if isinstance(variance, Tensor) else variance,
            "similarity": self.attention.similarity,
            "attn_mask": None if seen is None else seen[None, None],
        }

    @torch.no_grad()
    def weights(self, sample: int, head: int, queries: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Weights of one head, ``[n, keys]``, with rows for these queries and columns for keys that are not padding.

        They are computed in ``dtype`` from the queries and keys that the model had in its own precision.
        """
        if not self._keeps:
            return self._compute_weights(sample, head, queries, dtype)
        kept_for, weights = self._kept.get((sample, head), (None, None))
        if kept_for is None or weights is None or not torch.equal(kept_for, queries):
            weights = self._compute_weights(sample, head, queries, torch.float64)
            if sum(each.nbytes for _, each in self._kept.values()) + weights.nbytes <= KEPT_BYTES:
                self._kept[sample, head] = queries, weights
        return weights.to(dtype)

    @contextlib.contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """Context in which the fp64 weights of each head are computed once and kept, for analyses that share them.

        Beyond :data:`KEPT_BYTES` further weights are recomputed.
        """
        self._keeps.append(True)
        try:
            yield
        finally:
            self._keeps.pop()
            self._kept.clear()

    def _compute_weights(self, sample: int, head: int, queries: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.is_linear:
            options = self.problem(sample, head, queries, dtype)
            return mixture_weights(**options, assignment=self.attention.assignment)[0, 0]
        assert self.attention.feature_map is not None
        own = head // (self.num_heads // self.num_kv_heads)
        log_prior = self.attention.prior()
        found = linear_mixture_weights(
            self.query[sample, head].to(dtype)[None, None], self.key[sample, own].to(dtype)[None, None],
            shift=None if self.shift is None else self.shift[own : own + 1].detach().to(dtype),
            log_prior=None if log_prior is None else log_prior[own : own + 1].to(dtype),
            feature_map=self.attention.feature_map, is_causal=self.is_causal,
            key_mask=None if self.key_mask is None else self.key_mask[sample : sample + 1],
        )  # fmt: skip
        return found[0, 0, queries][:, self.keys(sample)]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRecord:
    """The calls of all attention layers of a model on one batch, in the order of execution."""

    calls: Sequence[AttentionCall]
    """The calls, at least one."""

    @property
    def num_samples(self) -> int:
        return self.calls[0].num_samples


def record_attention(model: nn.Module, **inputs: Any) -> AttentionRecord:
    """Run a model on a batch and record the inputs of each of its attention layers.

    The model is evaluated without dropout and gradients, and keeps its mode. Memory is linear in the length, because no
    attention matrix is formed here. For a model of pairs, the first sequence is recorded.

    Args:
        model: any model of :mod:`mgk.models`, or any other that contains :class:`mgk.MixtureAttention`.
        inputs: arguments of its ``forward``, padded and not packed.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, MixtureAttention)}
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"model must hold mgk.MixtureAttention, as those of mgk.models do, got {kind} without any")
    if any(name.endswith("cu_seq_lens_q") and value is not None for name, value in inputs.items()):
        raise ValueError("inputs must be padded to be analysed, got packed sequences (cu_seq_lens_q)")
    if isinstance(model, MGKPreTrainedModel):
        # With a cache, linear attention takes another path; no cache is needed here.
        inputs = {**inputs, "use_cache": False}
    calls: dict[str, AttentionCall] = {}
    with evaluation_mode(model), _listening(layers, calls):
        model(**inputs)
    if not calls:
        raise ValueError(f"model must run its attention layers on these inputs, got none of {len(layers)} that ran")
    if any(call.num_samples == 0 for call in calls.values()):
        raise ValueError("inputs must hold at least one sequence, got none")
    return AttentionRecord(calls=list(calls.values()))


@contextlib.contextmanager
def _listening(layers: dict[str, MixtureAttention], calls: dict[str, AttentionCall]) -> Iterator[None]:
    """Context in which the first call of every layer's ``attend`` is recorded."""
    try:
        for number, (path, layer) in enumerate(layers.items(), start=1):
            # An attribute of the instance hides the method of the class.
            layer.__dict__["attend"] = _listener(_name(path, layer, number), path, layer, calls)
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("attend", None)


def _listener(
    name: str, path: str, layer: MixtureAttention, calls: dict[str, AttentionCall]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    attend = layer.attend

    def listen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        if path not in calls:
            query_mask = options["query_mask"]
            if query_mask is None and options["is_self_attention"]:
                # In self-attention a padded key is also a padded query.
                query_mask = options["key_mask"]
            calls[path] = AttentionCall(
                name=name, path=path, attention=layer, query=q, key=k, shift=options["shift"],
                is_causal=options["is_causal"], key_mask=options["key_mask"], query_mask=query_mask,
                attn_mask=options["attn_mask"],
            )  # fmt: skip
        return attend(q, k, v, **options)

    return listen


def _name(path: str, layer: MixtureAttention, number: int) -> str:
    parts = path.split(".")
    side = next((f"{part} " for part in parts if part in ("encoder", "decoder")), "")
    place = next((int(part) + 1 for part in parts if part.isdecimal()), number)
    return f"{side}layer {place}{', cross' if getattr(layer, 'is_cross', False) else ''}"


def _positions(mask: Tensor | None, sample: int, length: int, device: torch.device) -> Tensor:
    if mask is None:
        return torch.arange(length, device=device)
    return mask[sample].nonzero().squeeze(-1)
