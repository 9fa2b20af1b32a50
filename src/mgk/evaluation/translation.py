"""Translation of a corpus by beam search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig, LogitsProcessorList

from mgk.data.batches import padded
from mgk.data.kind import Progress, no_progress
from mgk.data.store import Corpus, Sequences
from mgk.data.translation import BOS, EOS, PAD, decode
from mgk.evaluation.inference import inference
from mgk.evaluation.shares import check_ranks, reduce_sums, take_turns
from mgk.models import MGKForSeq2SeqLM


def translate(
    model: MGKForSeq2SeqLM,
    corpus: Corpus,
    split: str,
    *,
    beams: int = 5,
    length_penalty: float = 1.0,
    max_length_ratio: float = 0.0,
    max_length_offset: int = 200,
    max_tokens: int = 4096,
    device: torch.device | str,
    precision: torch.dtype | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = no_progress,
) -> list[str]:
    """Translate a split by beam search as in fairseq. Every rank gets all sentences, in the order of the corpus.

    The defaults are those of fairseq's test; its validation during training has ``max_length_ratio=1.2`` and
    ``max_length_offset=10``. As in fairseq, the score of a hypothesis is ``log p / length^length_penalty`` with
    ``<eos>`` counted, the search for a sentence ends with its ``beams``-th finished hypothesis, the first token cannot
    be ``<eos>``, padding is never chosen, and at the length limit ``<eos>`` is forced and its probability counts.

    There are two differences. The length limit depends on each sentence, where fairseq uses the longest source of the
    batch, so a translation here does not depend on the other sentences. And if more hypotheses finish in the last step
    than are missing, the best are kept, not the first.

    Args:
        model: translation model with the vocabularies of the corpus, not wrapped by DDP; ``fully_shard`` is fine.
        corpus: translation corpus.
        split: split to translate.
        beams: number of beams; 1 is greedy search.
        length_penalty: exponent in the score; larger values prefer longer translations.
        max_length_ratio: a translation has at most ``ratio * source + offset`` tokens, where the source's ``<eos>``
            counts and the translation's does not.
        max_length_offset: the offset in this limit.
        max_tokens: source tokens in a batch, with padding. Memory grows with ``beams`` times that.
        device: device of the model.
        precision: dtype of autocast; ``None`` computes in the dtype of the weights.
        rank: this rank. Every rank must call this, and all get all translations.
        ranks: number of ranks that share the work.
        progress: shows the progress.
    """
    check_ranks(rank, ranks)
    source = sentences(corpus, split, "source")
    limits = _limits(model, source, max_length_ratio, max_length_offset)
    sources = _Sources(sentences=source, limits=limits, max_tokens=max_tokens)
    settings = _settings(model, corpus, beams, length_penalty)
    tokens = _generate(model, sources, settings, torch.device(device), precision, rank, ranks, progress)
    if ranks > 1:
        # A sentence has its tokens on one rank and zeros on the others, so adding gathers them.
        reduce_sums(tokens)
    return [decode(corpus, "target", line) for line in tokens.cpu().numpy()]


def sentences(corpus: Corpus, split: str, side: str) -> Sequences:
    """Return the ``source`` or the ``target`` sentences of a split."""
    if split not in corpus.splits:
        raise ValueError(f"split must be one of {', '.join(corpus.splits)}, got {split!r}")
    found = corpus.splits[split].sequences
    if side not in found:
        raise ValueError(f"corpus must hold translations, got {corpus.name}")
    return found[side]


def _limits(model: MGKForSeq2SeqLM, source: Sequences, ratio: float, offset: int) -> NDArray[np.int64]:
    """Length limit of each translation without ``<eos>``, ``[sentences]``."""
    if not ratio >= 0 or not offset >= 0 or ratio + offset == 0:
        raise ValueError(
            f"max_length_ratio and max_length_offset must not be negative nor both 0, got {ratio} and {offset}"
        )
    limits = np.maximum((ratio * source.lengths + offset).astype(np.int64), 1)
    if model.config.positions == "learned":
        table = model.config.max_position_embeddings
        longest = int(source.lengths.max(initial=0))
        if longest > table:
            raise ValueError(
                f"source sentences must have at most max_position_embeddings={table} tokens, got {longest}"
            )
        # One position of the table is for the start token, and the last one predicts "<eos>".
        limits = np.minimum(limits, table - 1)
    return limits


def _settings(model: MGKForSeq2SeqLM, corpus: Corpus, beams: int, length_penalty: float) -> GenerationConfig:
    if beams < 1:
        raise ValueError(f"beams must be at least 1, got {beams}")
    config, size = model.config, corpus.manifest["facts"]["vocabulary"]
    for name, found in (("vocab_size", config.vocab_size), ("source_vocab_size", config.source_vocab_size)):
        if found is not None and found < size:
            raise ValueError(f"{name} of the model must be at least the {size} tokens of {corpus.name}, got {found}")
    if config.eos_token_id != EOS or config.decoder_start_token_id is None:
        got = f"{config.eos_token_id} and {config.decoder_start_token_id}"
        raise ValueError(f"the model must have eos_token_id={EOS} and a decoder_start_token_id, got {got}")
    # early_stopping ends the search with the last finished beam, as in fairseq.
    search = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": True} if beams > 1 else {}
    return GenerationConfig(
        **search,
        do_sample=False,
        use_cache=True,
        min_new_tokens=1,
        # Tokens that no target contains, which an untrained model may generate; a vocabulary may also be rounded up.
        suppress_tokens=[PAD, BOS, *range(size, config.vocab_size)],
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def _generate(
    model: MGKForSeq2SeqLM,
    sources: _Sources,
    settings: GenerationConfig,
    device: torch.device,
    precision: torch.dtype | None,
    rank: int,
    ranks: int,
    progress: Progress,
) -> Tensor:
    """Translate one rank's share: ``[sentences, longest]``, padded with 0, with zeros for sentences of other ranks."""
    # Every rank has a row for each sentence, so they are gathered by addition and nothing is pickled.
    tokens = torch.zeros(len(sources.limits), int(sources.limits.max()) + 1, dtype=torch.int64, device=device)
    is_sharded = isinstance(model, FSDPModule)
    if is_sharded and "generate" not in vars(model):
        # generate calls the encoder directly, outside of the forward call in which FSDP gathers the weights.
        register_fsdp_forward_method(model, "generate")
    with inference(model, device, precision), _own_settings(model):
        for turn, batch in take_turns(sources, rank, ranks, device, progress, "translation"):
            limits, rows = batch.pop("limits"), batch.pop("rows")
            settings.max_new_tokens = sources.longest(turn.number) + 1
            found = model.generate(
                batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=settings,
                logits_processor=LogitsProcessorList([_EndAtLimit(limits)]),
                # Sharded weights are gathered at every step, so a finished rank must continue until all have finished.
                synced_gpus=is_sharded and ranks > 1,
            )
            if turn.counts:
                # The first column is the start token.
                tokens[rows, : found.shape[1] - 1] = found[:, 1:]
    return tokens


@contextmanager
def _own_settings(model: MGKForSeq2SeqLM) -> Iterator[None]:
    """Context without the model's own generation settings, with which generate would fill up ours."""
    saved = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved


class _EndAtLimit:
    """Logits processor that allows only ``<eos>``, with its own score, when a sentence has reached its length limit."""

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process scores ``[B * beams, V]`` after tokens ``[B * beams, N]``, which include the start token."""
        limits = self.limits.repeat_interleave(len(scores) // len(self.limits))
        is_over = input_ids.shape[1] - 1 >= limits
        forbidden = is_over[:, None] & (torch.arange(scores.shape[1], device=scores.device) != EOS)
        return scores.masked_fill(forbidden, -torch.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sources:
    """Source sentences in batches of similar length, the longest first.

    ``batch`` returns ``input_ids``, ``attention_mask``, the ``rows`` of the split, and their length ``limits``.
    """

    sentences: Sequences
    limits: NDArray[np.int64]
    max_tokens: int
    _order: NDArray[np.int64] = field(init=False)
    _cuts: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        lengths = self.sentences.lengths
        if len(lengths) == 0:
            raise ValueError("split must hold at least one sentence, got none")
        if lengths.max() > self.max_tokens:
            raise ValueError(
                f"max_tokens must hold the longest sentence of {lengths.max()} tokens, got {self.max_tokens}"
            )
        order = np.argsort(-lengths, kind="stable")
        cuts: list[tuple[int, int]] = []
        while (begin := cuts[-1][1] if cuts else 0) < len(order):
            # Sentences are padded to the first one of the batch, which is the longest.
            cuts.append((begin, min(begin + self.max_tokens // max(int(lengths[order[begin]]), 1), len(order))))
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_cuts", cuts)

    def __len__(self) -> int:
        return len(self._cuts)

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        begin, end = self._cuts[step]
        return self._order[begin:end]

    def longest(self, step: int) -> int:
        """Largest length limit in the batch."""
        return int(self.limits[self.rows(0, step)].max())

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        rows = self.rows(epoch, step)
        tokens, mask = padded(self.sentences, rows, self.max_tokens)
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "rows": torch.from_numpy(rows),
            "limits": torch.from_numpy(self.limits[rows]),
        }
