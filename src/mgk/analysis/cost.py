"""The cost of a model: parameters, floating-point operations, bytes of cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mgk.evaluation.inference import evaluation_mode
from mgk.models import AdaptiveSoftmax, MGKConfig
from mgk.models.attention import MGKAttention
from mgk.nn import PRESETS, MixtureAttention
from mgk.ops import FeatureMap
from mgk.training.configuration import RunConfig
from mgk.training.resolved_model import build_model_config


def parameters(model: nn.Module) -> int:
    """Number of parameters; a table that two modules share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def embedding_parameters(model: nn.Module) -> int:
    """Number of parameters in the tables of tokens and learned positions; a table that two modules share counts once.

    A tied output layer is the token table itself, and an output layer of its own does not count as an embedding.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(table.numel() for table in tables)


def forward_flops(model: nn.Module, **inputs: Any) -> int:
    """Count the floating-point operations of the matrix products in one forward pass on these inputs.

    A product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n``. Counted are, for the shapes that occur (with every padded
    token):

    - each call of an ``nn.Linear`` and of the adaptive softmax, which with ``labels`` computes the clusters of the
      targets only, and without them the whole vocabulary;
    - each attention, by the identities of mixture attention and not by the operations of a backend (``sdpa`` repeats
        values for M components, ``chunked`` works in blocks). With B sequences, H query and G key/value heads of
        width D::

          q.k       2 B H Nq Nk D      once for shifted keys (q.(k + b_r) = q.k + q.b_r), M times for M projected
                                       keys, and for shifted keys that ``qk_norm`` normalises after the shift
          q.b_r     2 B H Nq M D       shifted keys
          k.b_r     2 B G Nk M D       shifted keys under the Gaussian similarity, for |k + b_r|^2
          weight.v  2 B H Nq Nk Dv

      and for linear attention with F features, for every backend::

          state     2 B G Nk F (Dv + 1)
          out       2 B H Nq F (Dv + 1)

    Packed sequences count one by one. Causal attention counts the full square, as torch's own counter does. Norms,
    softmax, activations, biases, embeddings and rotary positions count nothing, and neither do matrix products in other
    modules.

    The pass is run in evaluation mode without gradients. It leaves the model unchanged, but fills a cache among the
    inputs. With model and inputs on the ``meta`` device it takes neither time nor memory, and attention is counted
    without being run; only the adaptive softmax with ``labels`` and packed sequences cannot be counted there.

    Args:
        model: any module built on the library's attention.
        inputs: arguments of its ``forward``.
    """
    counter = _Counter()
    with evaluation_mode(model), counter.watching(model):
        model(**inputs)
    return counter.total


def training_flops(model: nn.Module, **inputs: Any) -> int:
    """Operations of forward and backward, three times :func:`forward_flops`: each product has two in the backward pass.

    Recomputation, by activation checkpointing or inside a backend, is not counted.
    """
    return 3 * forward_flops(model, **inputs)


def cache_bytes_per_token(config: MGKConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of keys and values that all layers cache for one token, in ``dtype``; 0 for linear attention.

    The cache has ``layers * kv_heads * (key width + head_dim)`` numbers. A key is ``head_dim`` wide if shifts are added
    on reading, and M times that for projected keys and, with ``qk_norm``, for shifted ones. Linear attention keeps a
    state of constant size instead. An encoder has no cache; for it this is what attention holds per token during the
    forward pass. For a translation model it is the decoder's cache per token of the target (self-attention), and the
    same again per token of the source (cross-attention).
    """
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    preset = PRESETS[config.attention]
    if preset.feature_map is not None:
        return 0
    components = preset.num_components if config.num_components is None else config.num_components
    keys = 1 if preset.keys == "shifted" and not config.qk_norm else components
    layers = config.num_hidden_layers
    if config.is_encoder_decoder and config.decoder_layers is not None:
        layers = config.decoder_layers
    return layers * config.num_key_value_heads * (keys + 1) * config.head_dim * dtype.itemsize


def cache_bytes_of_run(run: RunConfig) -> int:
    """:func:`cache_bytes_per_token` of the model that a run trains, in bf16."""
    return cache_bytes_per_token(build_model_config(run))


class _Counter:
    """Counts the matrix products of a model while it runs."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    stack.enter_context(module.register_forward_hook(self._linear))
                elif isinstance(module, AdaptiveSoftmax):
                    stack.enter_context(module.register_forward_hook(self._adaptive_softmax, with_kwargs=True))
                elif isinstance(module, MixtureAttention):
                    stack.enter_context(self._attending(module))
            yield

    def _linear(self, module: nn.Linear, args: tuple[Any, ...], output: Tensor) -> None:
        self.total += 2 * module.in_features * output.numel()

    def _adaptive_softmax(
        self, module: AdaptiveSoftmax, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        named = {**dict(zip(("hidden", "target"), args, strict=False)), **kwargs}
        hidden, target = named["hidden"], named.get("target")
        width = hidden.shape[-1]
        tokens = hidden.numel() // width
        ends = module.cutoffs
        rows = tokens * (ends[0] + len(ends) - 1)
        for start, end in itertools.pairwise(ends):
            inside = tokens if target is None else int(((target >= start) & (target < end)).sum())
            rows += inside * (end - start)
        self.total += 2 * width * rows

    @contextmanager
    def _attending(self, module: MixtureAttention) -> Iterator[None]:
        # A hook on the module would see only hidden states; here the keys are complete, with the cached ones.
        attend = module.attend

        @functools.wraps(attend)
        def counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
            if module.feature_map is not None:
                self.total += _linear_attention_flops(q, v, module.feature_map)
            else:
                self.total += _attention_flops(
                    q, k, v, options["shift"], module.similarity, options.get("cu_seqlens"), options.get("cu_seqlens_k")
                )
            if q.is_meta and not options.get("need_weights"):
                # On the meta device there are no numbers to compute, and a backend's loop over blocks would take most
                # of the time.
                return module.out_proj(v.new_empty(*q.shape[:3], v.shape[-1]).transpose(1, 2).flatten(2)), None
            return attend(q, k, v, **options)

        module.attend = counted  # type: ignore[method-assign]
        with ExitStack() as stack:
            stack.callback(delattr, module, "attend")
            if isinstance(module, MGKAttention) and module.feature_map is not None:
                # With a cache, linear attention continues from a state, which is another method.
                go_on = module.attend_to_state

                @functools.wraps(go_on)
                def counted_step(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
                    assert module.feature_map is not None
                    self.total += _linear_attention_flops(q, v, module.feature_map)
                    return go_on(q, k, v, *args)

                module.attend_to_state = counted_step  # type: ignore[assignment,method-assign]
                stack.callback(delattr, module, "attend_to_state")
            yield


def _linear_attention_flops(q: Tensor, v: Tensor, feature_map: FeatureMap) -> int:
    """Operations of linear attention for q ``[B, H, Nq, D]`` and v ``[B, G, Nk, Dv]``."""
    features = feature_map.key(q.new_zeros(1, q.shape[-1], dtype=torch.float32)).shape[-1]
    tokens = q.shape[:3].numel() + v.shape[:3].numel()
    return 2 * tokens * features * (v.shape[-1] + 1)


def _attention_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shift: Tensor | None,
    similarity: str,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> int:
    """Operations of attention.

    The shapes are q ``[B, H, Nq, D]``, k ``[B, G, Nk, D]`` or ``[B, G, M, Nk, D]``, v ``[B, G, Nk, Dv]``, shift ``[G,
    M, D]``, and boundaries of packed sequences ``[S + 1]``.
    """
    batch, heads, queries, width = q.shape
    keys, value_width = v.shape[-2:]
    pairs = 2 * batch * heads * queries * keys
    if cu_seqlens is not None:
        bounds_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        pairs = 2 * heads * int((cu_seqlens.diff().long() * bounds_k.diff().long()).sum())
    products = k.shape[2] if k.ndim == 5 else 1
    total = pairs * (products * width + value_width)
    if shift is not None:
        kv_heads, components, _ = shift.shape
        total += 2 * batch * heads * queries * components * width
        if similarity == "gaussian":
            total += 2 * batch * kv_heads * keys * components * width
    return total
