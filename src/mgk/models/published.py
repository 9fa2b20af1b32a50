"""Conversion of checkpoints of the paper's authors (``minhtannguyen/transformer-mgk``) to our models.

The tensors correspond as follows, for a head h and a component r::

    ours                      Long Range Arena                      language model
    k_proj, rows of (h, r)    W_k, W_k2, rows of h                  kv_net, its part r, rows of h
    keys.shift[h, r]          -mu[r, h]                             -mu[r, h]
    prior.logits[h, r]        log clamp(pi[r], 0, 1)                log clamp(pi_r[h], 0, 1)
    variances                 sqrt(D)                               sqrt(D), sqrt(D) / 3
    cluster c of the softmax  -                                     row -1 - c of cluster_weight

Their priors need not sum to one, because the attention is the same for any multiple.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.models.architectures import architecture
from mgk.models.causal_lm import MGKForCausalLM
from mgk.models.classifier import MGKForSequenceClassification
from mgk.models.configuration import MGKConfig
from mgk.models.matcher import MGKForSequencePairClassification
from mgk.models.pickled_tensors import read_tensors
from mgk.models.pretrained import MGKPreTrainedModel


def import_checkpoint(
    path: str | Path,
    *,
    num_attention_heads: int | None = None,
    length: int | None = None,
    adaptive_cutoffs: Sequence[int] | None = None,
) -> MGKPreTrainedModel:
    """Return a model with the weights of a checkpoint of the authors' code, in evaluation mode.

    Softmax attention, and MGK and sMGK with hard assignment or with priors learned by gradient, compute the same
    function as the original (soft mixtures in language models up to the 1e-6 that the authors' code adds to a sum).
    Checkpoints that no model here can compute are refused: linear attention, which the authors' code normalises
    differently, and priors that differ between positions. Settings that the file does not contain are those of the
    authors' scripts: learned positions and mean pooling (Long Range Arena), norms after the residual sum (language
    models). Except for sMLK, the file of a classifier does not tell whether ``--model`` was ``softmax`` or ``linear``
    either; ``softmax`` is assumed.

    Args:
        path: a ``.pt`` or ``.model`` file saved by the authors' code, or its state as safetensors. It is read in a
            separate process, and nothing in it is run.
        num_attention_heads: number of heads, required if the checkpoint has no shifts, from which it could be inferred.
        length: length to which sequences were padded (Long Range Arena; ``None``: the rows of the table of positions),
            or the window (language models; ``None``: 256).
        adaptive_cutoffs: cutoffs of a language model's softmax; ``None``: 20,000, 40,000 and 200,000, as for
            WikiText-103.
    """
    weights = Weights(path, read_tensors(path))
    model: MGKPreTrainedModel
    if weights.has(r"embeddings\.word_embeddings"):
        if adaptive_cutoffs is not None:
            raise ValueError(f"adaptive_cutoffs are for language models, got {list(adaptive_cutoffs)} for a classifier")
        model = _long_range_arena(weights, num_attention_heads, length)
    elif weights.has(r"word_emb\.emb_layers"):
        model = _language_model(weights, num_attention_heads, length, adaptive_cutoffs)
    else:
        raise ValueError(f"{path} must be a classifier or a language model of transformer-mgk, got {weights.names(3)}")
    weights.check_all_taken()
    return model.eval()


class Weights:
    """The tensors of a checkpoint. :meth:`check_all_taken` makes sure that each of them was used."""

    def __init__(self, path: str | Path, tensors: dict[str, Tensor]) -> None:
        self.path = path
        # Some models were wrapped for several devices.
        self._tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}

    def has(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self._tensors)

    def names(self, count: int) -> str:
        return ", ".join(sorted(self._tensors)[:count])

    def count_layers(self, pattern: str) -> int:
        """Count the layers by a pattern whose first group is the number of a layer."""
        numbers = {int(found[1]) for name in self._tensors if (found := re.match(pattern, name))}
        if not numbers:
            raise ValueError(f"{self.path} must have at least one layer of its own, got none")
        return max(numbers) + 1

    def take(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.path} must hold {name}, got none")
        return self._tensors.pop(name)

    def take_if_there(self, name: str) -> Tensor | None:
        return self._tensors.pop(name, None)

    def take_linear(self, name: str, target: str) -> dict[str, Tensor]:
        """Take weight and bias, and return them under the names of the target."""
        return {f"{target}.{part}": self.take(f"{name}.{part}") for part in ("weight", "bias")}

    def check_all_taken(self) -> None:
        if self._tensors:
            raise ValueError(f"{self.path} must hold the weights of a model that is known here, got {self.names(3)}")


def _long_range_arena(weights: Weights, heads: int | None, length: int | None) -> MGKPreTrainedModel:
    if weights.has(r"mha\.attn\.mu$") or weights.has(r"mha\.attn\.performer"):
        raise ValueError(f"{weights.path} must not hold linear attention, whose released form is none of ours, got it")
    found = {
        "model.embed_tokens.weight": weights.take("model.embeddings.word_embeddings.weight"),
        "model.embed_positions.weight": weights.take("model.embeddings.position_embeddings.weight"),
        **weights.take_linear("model.norm", "model.norm"),
        **weights.take_linear("seq_classifer.mlpblock.0", "classifier.dense"),
        **weights.take_linear("seq_classifer.mlpblock.2", "classifier.out_proj"),
    }
    layers = weights.count_layers(r"model\.transformer_(\d+)\.")
    mixtures = []
    for number in range(layers):
        theirs, ours = f"model.transformer_{number}", f"model.layers.{number}"
        attn = f"{theirs}.mha.attn"
        shift = weights.take_if_there(f"{attn}.multi_gauss_kernel.mu")
        pi = weights.take_if_there(f"{attn}.multi_gauss_kernel.pi")
        # The same parameter may be stored under a second name.
        again = weights.take_if_there(f"{attn}.pi")
        weights.take_if_there(f"{attn}.kk_distance")
        keys = [f"{theirs}.mha.W_k"] + [f"{theirs}.mha.W_k2"] * weights.has(rf"transformer_{number}\.mha\.W_k2\.")
        mixture = Mixture(weights, shift, again if pi is None else pi, len(keys), heads)
        found |= weights.take_linear(f"{theirs}.mha.W_q", f"{ours}.self_attn.q_proj")
        found |= weights.take_linear(f"{theirs}.mha.W_v", f"{ours}.self_attn.v_proj")
        found |= weights.take_linear(f"{theirs}.mha.ff", f"{ours}.self_attn.out_proj")
        for part in ("weight", "bias"):
            found[f"{ours}.self_attn.k_proj.{part}"] = mixture.join([weights.take(f"{key}.{part}") for key in keys])
        found |= mixture.parameters(f"{ours}.self_attn")
        found |= weights.take_linear(f"{theirs}.norm1", f"{ours}.self_attn_norm")
        found |= weights.take_linear(f"{theirs}.norm2", f"{ours}.mlp_norm")
        found |= weights.take_linear(f"{theirs}.mlpblock.0", f"{ours}.mlp.up_proj")
        found |= weights.take_linear(f"{theirs}.mlpblock.3", f"{ours}.mlp.down_proj")
        mixtures.append(mixture)
    vocabulary, width = found["model.embed_tokens.weight"].shape
    table = len(found["model.embed_positions.weight"])
    config = architecture(
        "lra-text", vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        intermediate_size=len(found["model.layers.0.mlp.up_proj.weight"]), max_position_embeddings=table,
        pooling="mean-over-length", pooling_length=table if length is None else length,
        num_labels=len(found["classifier.out_proj.weight"]), classifier_size=len(found["classifier.dense.weight"]),
        activation_dropout=0.1,
        **_attention(weights, mixtures, found),
    )  # fmt: skip
    is_pair = found["classifier.dense.weight"].shape[1] == 4 * width
    return _fill(MGKForSequencePairClassification if is_pair else MGKForSequenceClassification, config, found)


def _language_model(
    weights: Weights, heads: int | None, length: int | None, cutoffs: Sequence[int] | None
) -> MGKPreTrainedModel:
    if weights.has(r"dec_attn\.qkv_net"):
        raise ValueError(f"{weights.path} must not hold linear attention, whose released form is none of ours, got it")
    table = weights.take("word_emb.emb_layers.0.weight")
    head = weights.take_if_there("crit.out_layers.0.weight")
    bias, clusters = weights.take("crit.out_layers.0.bias"), weights.take_if_there("crit.cluster_weight")
    weights.take_if_there("pos_emb.inv_freq")
    found = {"model.embed_tokens.weight": table}
    is_tied = head is None or torch.equal(head, table)
    if not is_tied:
        assert head is not None
        found["lm_head.weight"] = head
    ends: list[int] | None = None
    if clusters is not None:
        ends = [20_000, 40_000, 200_000] if cutoffs is None else list(cutoffs)
        if len(ends) != len(clusters):
            raise ValueError(f"adaptive_cutoffs must be {len(clusters)}, as many as there are clusters, got {ends}")
        # The authors' code reads the columns of the clusters from the end.
        found |= {"lm_head.cluster_weight": clusters.flip(0), "lm_head.bias": bias}
        found["lm_head.cluster_bias"] = weights.take("crit.cluster_bias").flip(0)
    elif bool((bias != 0).any()):
        raise ValueError(f"{weights.path} must have an adaptive softmax, or a plain one without biases, got biases")
    layers = weights.count_layers(r"layers\.(\d+)\.")
    mixtures = []
    for number in range(layers):
        theirs, ours = f"layers.{number}.dec_attn", f"model.layers.{number}"
        query, keys_and_values = weights.take(f"{theirs}.q_net.weight"), weights.take(f"{theirs}.kv_net.weight")
        *keys, value = keys_and_values.chunk(len(keys_and_values) // len(query))
        mixture = Mixture(
            weights, weights.take_if_there(f"{theirs}.mu"), _pi_of_language(weights, theirs), len(keys), heads
        )
        found[f"{ours}.self_attn.q_proj.weight"] = query
        found[f"{ours}.self_attn.k_proj.weight"] = mixture.join(keys)
        found[f"{ours}.self_attn.v_proj.weight"] = value
        found[f"{ours}.self_attn.out_proj.weight"] = weights.take(f"{theirs}.o_net.weight")
        found |= mixture.parameters(f"{ours}.self_attn")
        found |= weights.take_linear(f"{theirs}.layer_norm", f"{ours}.self_attn_norm")
        feed_forward = f"layers.{number}.pos_ff"
        found |= weights.take_linear(f"{feed_forward}.CoreNet.0", f"{ours}.mlp.up_proj")
        found |= weights.take_linear(f"{feed_forward}.CoreNet.3", f"{ours}.mlp.down_proj")
        found |= weights.take_linear(f"{feed_forward}.layer_norm", f"{ours}.mlp_norm")
        mixtures.append(mixture)
    attention = _attention(weights, mixtures, found)
    if attention["attention"] in ("mgk", "smgk"):
        warnings.warn(
            "the released language models with soft mixtures add 1e-6 to the sum of the weights, which is not done "
            "here: where no key is near a query, outputs differ",
            stacklevel=3,
        )
    config = architecture(
        "wikitext103-small", vocab_size=len(table), hidden_size=table.shape[1], num_hidden_layers=layers,
        intermediate_size=len(found["model.layers.0.mlp.up_proj.weight"]), adaptive_cutoffs=ends,
        tie_word_embeddings=is_tied, max_position_embeddings=256 if length is None else length, positions_from="end",
        variance_scale=1.0 if attention["attention"] == "softmax" else [1.0, 1.0 / 3.0], activation_dropout=0.1,
        **attention,
    )  # fmt: skip
    return _fill(MGKForCausalLM, config, found)


def _pi_of_language(weights: Weights, theirs: str) -> Tensor | None:
    """Return priors ``[2, H, positions]``; EM stores the first, and the second is one minus that."""
    both = [weights.take_if_there(f"{theirs}.pi{number}") for number in range(2)]
    first = weights.take_if_there(f"{theirs}.pi")
    if first is not None:
        return torch.stack([first, 1 - first]).flatten(2)
    if both[0] is None or both[1] is None:
        return None
    return torch.stack([each for each in both if each is not None]).flatten(2)


class Mixture:
    """The kind of one attention layer of a checkpoint, and its mixture parameters.

    Args:
        weights: the checkpoint, for error messages.
        shift: ``mu [2, H, D]``, or ``None``.
        pi: ``[2]``, shared by all heads; ``[H, positions]``, from EM; ``[2, H, positions]``; or ``None``.
        projections: number of key projections, 1 or 2.
        heads: number of heads that the user gave, or ``None``.
    """

    def __init__(
        self, weights: Weights, shift: Tensor | None, pi: Tensor | None, projections: int, heads: int | None
    ) -> None:
        self.shift = shift
        if heads is None and shift is not None:
            heads = shift.shape[1]
        if heads is None:
            raise ValueError(f"num_attention_heads must be given, since the weights in {weights.path} do not tell it")
        if shift is not None and shift.shape[1] != heads:
            raise ValueError(f"num_attention_heads must be {shift.shape[1]}, as the weights have it, got {heads}")
        self.heads = heads
        keys = "" if shift is None and projections == 1 else "mgk" if shift is None else "smgk"
        self.preset = keys or "softmax"
        self.logits: Tensor | None = None
        if keys and pi is None:
            self.preset = f"{keys}-hard"
        elif keys and pi is not None:
            if pi.ndim == 2:
                pi = torch.stack([pi, 1 - pi])
            pi = pi.clamp(0.0, 1.0)
            if pi.ndim == 3:
                if bool((pi != pi[..., :1]).any()):
                    raise ValueError(
                        f"{weights.path} must have priors that are the same at all positions, got ones that differ"
                    )
                pi = pi[..., 0]
            else:
                pi = pi[:, None].expand(-1, heads)
            if bool((pi.sum(0) == 0).any()):
                raise ValueError(f"{weights.path} must have a prior above 0 in every head, got one without")
            # A parameter must not be -inf; the logarithm of the smallest number has no effect on any sum.
            self.logits = pi.T.clamp(min=torch.finfo(pi.dtype).tiny).log().contiguous()

    def join(self, projections: list[Tensor]) -> Tensor:
        """Join the rows of all components, ``[H * D, ...]`` each, to one projection ``[H * M * D, ...]``."""
        rows = len(projections[0])
        if rows % self.heads != 0:
            raise ValueError(f"num_attention_heads must divide the width of all heads, {rows}, got {self.heads}")
        by_head = [each.unflatten(0, (self.heads, -1)) for each in projections]
        return torch.stack(by_head, dim=1).flatten(0, 2)

    def parameters(self, target: str) -> dict[str, Tensor]:
        found = {}
        if self.shift is not None:
            found[f"{target}.keys.shift"] = -self.shift.transpose(0, 1).contiguous()
        if self.logits is not None:
            found[f"{target}.prior.logits"] = self.logits
        return found


def _attention(weights: Weights, mixtures: list[Mixture], found: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of the configuration that describe the attention, on which all layers must agree."""
    presets = sorted({mixture.preset for mixture in mixtures})
    if len(presets) != 1:
        raise ValueError(f"{weights.path} must have one kind of attention in all layers, got {', '.join(presets)}")
    heads, inner = mixtures[0].heads, len(found["model.layers.0.self_attn.q_proj.weight"])
    return {"attention": presets[0], "num_attention_heads": heads, "head_dim": inner // heads}


def _fill(kind: type[MGKPreTrainedModel], config: MGKConfig, found: dict[str, Tensor]) -> MGKPreTrainedModel:
    """Build a model of this kind and load the weights, which must match its own one to one."""
    model = kind(config).to(found["model.embed_tokens.weight"].dtype)
    missing, unexpected = model.load_state_dict(found, strict=False)
    tied = set(model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise ValueError(f"the weights must be those of {kind.__name__}, got {unexpected} and not {missing}")
    return model
