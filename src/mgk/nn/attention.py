"""The attention layer: projections, a mixture of keys, its prior and its variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mgk.nn.keys import SHIFT_INITS, ProjectedKeys, ShiftedKeys
from mgk.nn.prior import EMPrior, LearnedPrior, UniformPrior
from mgk.nn.variance import FixedVariance, LearnedVariance
from mgk.ops import FeatureMap
from mgk.ops.dispatch import BACKENDS, LINEAR_BACKENDS, attend
from mgk.ops.dispatch import weights as materialised_weights
from mgk.ops.feature_maps import Map, resolve
from mgk.ops.linear import NORMALIZATIONS, attend_linearly, linear_weights, make_linear_problem
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.validation import ASSIGNMENTS, SIMILARITIES, check_choice, check_integer, check_number, make_problem

KEYS = ("projected", "shifted")
PRIORS = ("learned", "uniform", "em")


class MixtureAttention(nn.Module):
    """Multi-head attention in which each key position holds a mixture of M keys.

    See :func:`mgk.mixture_attention` for the formula and :func:`mgk.build_attention` for the paper's variants by name.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of query heads.
        head_dim: width of one head; ``None`` is ``embed_dim / num_heads``. Pass it to change only the number of heads:
            the paper halves the heads at a fixed head dimension, which makes the layer narrower.
        num_components: keys per position, M.
        keys: ``"projected"`` (``k_jr = W_r x_j``) or ``"shifted"`` (``k_jr = W x_j + b_r``).
        similarity: ``"gaussian"`` or ``"dot"``.
        assignment: ``"soft"`` sums over the components, ``"hard"`` takes the most similar one alone and has no prior.
        prior: ``"learned"``, ``"uniform"``, or ``"em"`` (see :func:`mgk.update_priors`), per key/value head.
        learn_variance: learn a variance per key/value head and component.
        variance_scale: variance divided by ``sqrt(head_dim)``, one number or one per component.
        shift_init_std: standard deviation of the initial shifts.
        shift_init: ``"normal"`` draws all shifts, as in the paper. ``"first-zero"`` starts the first component at 0, as
            in its released code (where the others have a standard deviation of 0.5).
        num_kv_heads: number of key/value heads, a divisor of ``num_heads``: 1 is multi-query, ``None`` is
            ``num_heads``. Shifts, priors and variances belong to the keys, so there is one set per key/value head.
        qk_norm: normalise the query and every component's key (RMS, learned gain) before the similarity. Shifted keys
            are normalised after the shift, which forfeits their saving: M keys enter the attention instead of one.
        feature_map: feature map of linear attention (:func:`mgk.linear_mixture_attention`): ``"elu"``, ``"relu"``,
            ``"dpfp"``, ``"favor"``, a function or a :class:`mgk.FeatureMap`. Linear attention ignores similarity and
            variance, and refuses options that need single pairs: dropout, hard assignment, EM, masks of pairs.
        normalization: normalisation of linear attention, ``"sum"`` or ``"length"``.
        bias: whether the four projections have biases.
        dropout: dropout probability of the attention weights, in training only.
        is_causal: whether position i may see only positions up to i.
        backend: see :func:`mgk.mixture_attention`.
        prior_momentum: for ``prior="em"``, the share of the old prior that an update keeps.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_components: int = 2,
        keys: str = "projected",
        similarity: str = "gaussian",
        assignment: str = "soft",
        prior: str = "learned",
        learn_variance: bool = False,
        variance_scale: float | Sequence[float] = 1.0,
        shift_init_std: float = 1.0,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        feature_map: str | Map | FeatureMap | None = None,
        normalization: str = "sum",
        bias: bool = True,
        dropout: float = 0.0,
        is_causal: bool = False,
        backend: str = "auto",
        prior_momentum: float = 0.0,
        shift_init: str = "normal",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        counts = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "num_components": num_components,
            "num_kv_heads": num_kv_heads,
            **({} if head_dim is None else {"head_dim": head_dim}),
        }
        for name, count in counts.items():
            if check_integer(name, count) < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        for name, fraction in {"dropout": dropout, "prior_momentum": prior_momentum}.items():
            if not 0.0 <= check_number(name, fraction) < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {fraction}")
        if not 0.0 <= check_number("shift_init_std", shift_init_std) < math.inf:
            raise ValueError(f"shift_init_std must be finite and not negative, got {shift_init_std}")
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {type(is_causal).__name__}")
        check_choice("keys", keys, KEYS)
        check_choice("similarity", similarity, SIMILARITIES)
        check_choice("assignment", assignment, ASSIGNMENTS)
        check_choice("prior", prior, PRIORS)
        check_choice("shift_init", shift_init, SHIFT_INITS)
        check_choice("backend", backend, BACKENDS)
        check_choice("normalization", normalization, NORMALIZATIONS)
        if feature_map is not None:
            check_choice("backend", backend, LINEAR_BACKENDS)
            pairwise = {"assignment='hard'": assignment == "hard", "prior='em'": prior == "em", "dropout": dropout > 0}
            for name, is_given in {**pairwise, "learn_variance": learn_variance}.items():
                if is_given:
                    raise ValueError(f"linear attention has no {name}, got that and feature_map={feature_map!r}")
        elif normalization != "sum":
            raise ValueError(f"normalization must be 'sum' without a feature_map, got {normalization!r}")
        if head_dim is None:
            if embed_dim % num_heads != 0:
                raise ValueError(
                    f"embed_dim must be a multiple of num_heads, or head_dim given, got {embed_dim} and {num_heads}"
                )
            head_dim = embed_dim // num_heads
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_components = num_components
        self.num_kv_heads = num_kv_heads
        self.similarity = similarity
        self.assignment = assignment
        self.dropout = dropout
        self.is_causal = is_causal
        self.backend = backend
        # Resolved once, because the function that a name stands for does not change.
        self.feature_map = None if feature_map is None else resolve(feature_map, head_dim, normalization)
        self.normalization = normalization

        self.keys: ProjectedKeys | ShiftedKeys
        if keys == "projected":
            self.keys = ProjectedKeys(num_kv_heads, head_dim, num_components)
        else:
            self.keys = ShiftedKeys(num_kv_heads, head_dim, num_components, shift_init_std, shift_init)
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, self.keys.width, bias=bias)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else None

        self.prior: UniformPrior | LearnedPrior | EMPrior
        # A single component and hard assignment have no use for a prior.
        if prior == "uniform" or num_components == 1 or assignment == "hard":
            self.prior = UniformPrior()
        elif prior == "learned":
            self.prior = LearnedPrior(num_kv_heads, num_components)
        else:
            self.prior = EMPrior(num_kv_heads, num_components, prior_momentum)
        self.variance: FixedVariance | LearnedVariance
        if learn_variance:
            self.variance = LearnedVariance(num_kv_heads, head_dim, num_components, variance_scale)
        else:
            self.variance = FixedVariance(head_dim, num_components, variance_scale)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Project, attend and project back.

        Args:
            query: ``[B, Nq, embed_dim]``.
            key: ``[B, Nk, embed_dim]``; ``None`` is self-attention.
            value: ``[B, Nk, embed_dim]``; ``None`` is ``key``.
            key_mask: bool ``[B, Nk]``, True = attend.
            query_mask: bool ``[B, Nq]``, False = padded query, which attends to nothing: its row of the output is the
                bias of ``out_proj``.
            attn_mask: bool, broadcastable to ``[B, H, Nq, Nk]``, True = attend.
            is_causal: overrides the setting of the layer for this call.
            cu_seqlens: int32 ``[S + 1]``, boundaries of sequences that are packed one after the other in a batch of
                one row and do not see each other, as in :func:`mgk.mixture_attention_varlen`.
            cu_seqlens_k: boundaries of ``key``, if they differ.

        Returns:
            ``[B, Nq, embed_dim]``.
        """
        is_self_attention = key is None or key is query
        key = query if key is None else key
        value = key if value is None else value
        q = self.project_query(query)
        k, shift = self.project_key(key)
        return self.attend(
            q, k, self.project_value(value), shift=shift, key_mask=key_mask,
            query_mask=query_mask, attn_mask=attn_mask, is_causal=self.is_causal if is_causal is None else is_causal,
            is_self_attention=is_self_attention, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
        )[0]  # fmt: skip

    def attention_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Weights that :meth:`forward` uses without dropout, ``[B, H, Nq, Nk]``, materialised for analysis."""
        q = self.project_query(query)
        k, shift = self.project_key(query if key is None else key)
        causal = self.is_causal if is_causal is None else is_causal
        visibility = Visibility(causal, key_mask, query_mask, attn_mask)
        if self.feature_map is not None:
            mixture = Mixture(shift, self.prior())
            return linear_weights(make_linear_problem(q, k, None, mixture, visibility, self.feature_map, "sum"))
        return materialised_weights(make_problem(q, k, None, self._mixture(shift), visibility))

    def project_query(self, query: Tensor) -> Tensor:
        """Project ``[B, Nq, embed_dim]`` to queries ``[B, H, Nq, D]``."""
        self._check_width("query", query)
        q: Tensor = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        # Under autocast the projections return half precision, while the gains of the norms stay in fp32.
        return q if self.q_norm is None else self.q_norm(q.to(self.q_norm.weight.dtype))

    def project_key(self, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project ``[B, Nk, embed_dim]`` to keys, and return them with the shifts that the attention must add, if any.

        The keys are ``[B, Hkv, Nk, D]`` if there are shifts to add, otherwise ``[B, Hkv, M, Nk, D]``.
        """
        self._check_width("key", key)
        k, shift = self.keys(self.k_proj(key))
        if self.k_norm is not None:
            if shift is not None:
                k, shift = k[:, :, None] + shift.to(k.dtype)[:, :, None, :], None
            k = self.k_norm(k.to(self.k_norm.weight.dtype))
        return k, shift

    def project_value(self, value: Tensor) -> Tensor:
        """Project ``[B, Nk, embed_dim]`` to values ``[B, Hkv, Nk, D]``."""
        self._check_width("value", value)
        return self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        shift: Tensor | None,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        is_self_attention: bool,
        need_weights: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with projected queries, keys and values, and apply the output projection.

        Returns:
            The output ``[B, Nq, embed_dim]`` and, if ``need_weights`` is set, the weights ``[B, H, Nq, Nk]`` that it
            was computed from, dropout included.
        """
        visibility = Visibility(is_causal, key_mask, query_mask, attn_mask, cu_seqlens, cu_seqlens_k)
        if self.feature_map is not None:
            out, weights = self._attend_linearly(q, k, v, Mixture(shift, self.prior()), visibility, need_weights)
            return self.out_proj(out.transpose(1, 2).flatten(2)), weights
        mixture = self._mixture(shift)
        problem = make_problem(q, k, v, mixture, visibility, self.dropout if self.training else 0.0)
        weights = None
        if need_weights:
            weights = F.dropout(materialised_weights(problem), problem.dropout_p)
            out = weights @ v.to(weights.dtype).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        else:
            out = attend(problem, self.backend)
        if isinstance(self.prior, EMPrior):
            if query_mask is None and is_self_attention and cu_seqlens_k is None:
                # A padded token is not counted as a query either, although its output is computed.
                visibility = visibility._replace(query_mask=key_mask)
            out = self.prior.gather(out, q, k, mixture, visibility)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _attend_linearly(
        self, q: Tensor, k: Tensor, v: Tensor, mixture: Mixture, visibility: Visibility, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self.feature_map is not None
        problem = make_linear_problem(q, k, v, mixture, visibility, self.feature_map, self.normalization)
        weights = None
        if need_weights:
            # The rows of materialised weights sum to 1, even if the layer divides by something else.
            weights = linear_weights(problem)
        if weights is not None and self.normalization == "sum":
            out = weights @ v.to(weights.dtype).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            return out.to(q.dtype), weights
        return attend_linearly(problem, self.backend), weights

    def _mixture(self, shift: Tensor | None) -> Mixture:
        return Mixture(shift, self.prior(), self.variance(), self.similarity, self.assignment)

    def _check_width(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 3 or tensor.shape[-1] != self.embed_dim:
            raise ValueError(f"{name} must have shape [B, N, {self.embed_dim}], got {list(tensor.shape)}")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        # load_state_dict(assign=True) puts tensors in the place of those on the meta device.
        weight = state_dict.get(f"{prefix}q_proj.weight")
        is_assigned = weight is not None and local_metadata.get("assign_to_params_buffers", False)
        if is_assigned and isinstance(self.variance, FixedVariance):
            self.variance.leave_meta(weight.device)

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts.append(f"similarity={self.similarity!r}, assignment={self.assignment!r}")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        if self.is_causal:
            parts.append("is_causal=True")
        return ", ".join(parts)
