"""What a model learns: which model a corpus needs, its batches, its loss and its metrics."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from mgk.data import Samples, Translations, Windows, translation
from mgk.data.batches import Batches
from mgk.data.kind import Progress
from mgk.data.registry import KINDS
from mgk.data.store import Corpus, Sequences, Split
from mgk.evaluation import bleu, perplexity
from mgk.evaluation.accuracy import accuracy, in_order_of_length
from mgk.evaluation.items import pack_items
from mgk.models import (
    MGKForCausalLM,
    MGKForSeq2SeqLM,
    MGKForSequenceClassification,
    MGKForSequencePairClassification,
    fingerprint,
)
from mgk.models.loss import IGNORED
from mgk.models.seq2seq import one_later
from mgk.nn import update_priors
from mgk.training.clusters import ClusteredBatches, is_cluster, model_inputs
from mgk.training.configuration import RunConfig
from mgk.training.resolved_model import build_model_config, describe_model, resolve_model


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the work this process does, and where."""

    device: torch.device
    precision: torch.dtype | None = None
    """Of autocast; ``None``: fp32 throughout."""
    rank: int = 0
    ranks: int = 1
    packs_already: bool | None = None
    """Whether the run that goes on here has packed its batches so far; ``None``: it has not begun."""

    @property
    def precision_name(self) -> str:
        return str(self.precision or torch.float32).removeprefix("torch.")

    def multiple_of(self, config: RunConfig) -> int:
        """What widths of padded batches are rounded up to."""
        if config.data.multiple_of is not None:
            return config.data.multiple_of
        if self.device.type != "cuda":
            return 1
        # Sentences are short: rounded up to 64 they would be padding for the most part.
        return 8 if config.task == "translation" else 64

    def packs(self, config: RunConfig) -> bool:
        """Whether training batches are packed."""
        data = config.data
        if data.pack is not None or config.task not in ("classification", "pairs"):
            return bool(data.pack)
        if self.packs_already is not None:
            return self.packs_already
        # Where the fused kernels take packed sequences; those of EM have as many shapes as there are sums of lengths.
        is_fused = self.device.type == "cuda" and self.precision is not None
        return is_fused and data.pad_to is None and not config.model.is_linear and not config.model.has_em_prior

    def packs_evaluation(self, config: RunConfig) -> bool:
        """Whether the batches of validations and tests are packed: on a GPU, if those of training are."""
        return self.device.type == "cuda" and self.packs(config)

    def training_multiple_of(self, config: RunConfig) -> int:
        """The same of training batches, or what the tokens of a packed one are rounded up to."""
        if config.data.multiple_of is not None or not self.packs(config):
            return self.multiple_of(config)
        # EM counts every pair, those of what fills up as well.
        if self.device.type != "cuda" or config.model.has_em_prior:
            return 1
        # Few shapes to record, and little to fill up.
        return 256 if config.task == "translation" else min(1024, config.data.longest)


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """What to autocast to; ``None`` for fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


class Task(Protocol):
    """One kind of task."""

    corpus: Corpus

    def build_model(self) -> PreTrainedModel:
        """A fresh model."""

    def training_batches(self, share: Share) -> Batches:
        """Micro-batches of a rank."""

    def varying_dimension(self, name: str, tensor: Tensor) -> int | None:
        """In which dimension this part of a batch differs from one batch to the next."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], num_targets: Tensor) -> Tensor:
        """Sum over the targets of a batch divided by ``num_targets``. ``model`` may be wrapped."""

    def count_targets(self, batch: Mapping[str, Tensor]) -> int:
        """How many terms the loss of a batch has."""

    def count_tokens(self, batch: Mapping[str, Tensor]) -> int:
        """How many tokens that are not padding the model reads."""

    def evaluate(self, model: nn.Module, split: str, share: Share, progress: Progress) -> dict[str, float]:
        """The metrics of a split, the same on every rank; ``loss`` is among them."""

    def test(
        self, model: nn.Module, split: str, share: Share, progress: Progress
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """The metrics of a split, and :func:`mgk.evaluation.pack_items` of which of its items were right; ``None``
        where an item is neither right nor wrong."""

    def save_tokenizer(self, folder: Path) -> None:
        """Put what turns text into tokens beside a saved model, where there is such a thing."""

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        """What the model says of a batch, with its loss."""

    def after_update(self, model: nn.Module, skip: Tensor) -> None:
        """What follows a step of the optimiser; ``skip`` is a bool on the device: whether it was left out."""

    def describe_model(self, model: PreTrainedModel) -> dict[str, Any]:
        """Every field of the model that decides a number."""

    def facts(self) -> dict[str, Any]:
        """What else a result should say."""


class CommonTask:
    """What is the same for every model of this library."""

    widths_vary: bool
    """Whether batches have different widths."""

    def varying_dimension(self, name: str, tensor: Tensor) -> int | None:
        return 1 if self.widths_vary and tensor.ndim > 1 else None

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return model(**batch)

    def after_update(self, model: nn.Module, skip: Tensor) -> None:
        update_priors(model, skip)

    def describe_model(self, model: PreTrainedModel) -> dict[str, Any]:
        return describe_model(model.config)

    def facts(self) -> dict[str, Any]:
        return {}


def build_task(config: RunConfig, corpus: Corpus) -> Task:
    """The task of a run."""
    found = KINDS[corpus.name].task if corpus.name in KINDS else config.task
    if found != config.task:
        raise ValueError(f"data.corpus must be one for {config.task}, got {corpus.name}, which is for {found}")
    if corpus.name != config.data.corpus:
        raise ValueError(f"the corpus must be {config.data.corpus}, as data.corpus says, got {corpus.name}")
    if config.task == "uptraining":
        from mgk.training.uptraining import Uptraining

        return Uptraining(config, corpus)
    kinds: dict[str, Callable[[RunConfig, Corpus], Task]] = {
        "classification": Classification,
        "pairs": Classification,
        "language": Language,
        "translation": Translation,
    }
    return kinds[config.task](config, corpus)


def micro_batch(config: RunConfig, ranks: int) -> int:
    """Samples or tokens of one micro-batch on one rank."""
    unit = "max_tokens" if config.task == "translation" else "batch_size"
    together, pieces = getattr(config.training, unit), ranks * config.training.accumulate
    if together % pieces != 0:
        raise ValueError(
            f"training.{unit} must be a multiple of ranks * accumulate = {ranks} * {config.training.accumulate}, "
            f"got {together}"
        )
    return int(together // pieces)


class Classification(CommonTask):
    """A label for a sequence, or for a pair of them."""

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.widths_vary = config.data.pad_to is None
        # Otherwise the first validation, or the test, would end the run.
        for split in ("valid", "test"):
            if split in corpus.splits and len(corpus.splits[split].numbers["labels"]) == 0:
                raise ValueError(f"the corpus {corpus.name} must hold samples of every split, got none of {split}")

    def build_model(self) -> PreTrainedModel:
        kind = MGKForSequencePairClassification if self._has_pairs else MGKForSequenceClassification
        return kind(build_model_config(self.config))

    def training_batches(self, share: Share) -> Batches:
        split, data = self.corpus.splits["train"], self.config.data
        _check_packing(self.config, share)
        return Samples(
            sequences=self._sequences(split), labels=split.numbers["labels"], first=split.numbers.get("first"),
            second=split.numbers.get("second"), batch_size=micro_batch(self.config, share.ranks), longest=data.longest,
            width=data.pad_to, pack=share.packs(self.config), by_length=data.by_length, seed=self.config.seed,
            multiple_of=share.training_multiple_of(self.config), rank=share.rank, ranks=share.ranks,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], num_targets: Tensor) -> Tensor:
        return model(**batch, num_items_in_batch=num_targets).loss

    def count_targets(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def count_tokens(self, batch: Mapping[str, Tensor]) -> int:
        if "cu_seq_lens_q" in batch:
            bounds = [batch[name] for name in ("cu_seq_lens_q", "pair_cu_seq_lens_q") if name in batch]
            # What fills up a packed batch comes last.
            return sum(int(each[self.count_targets(batch)]) for each in bounds)
        return sum(int(batch[name].sum()) for name in ("attention_mask", "pair_attention_mask") if name in batch)

    def evaluate(self, model: nn.Module, split: str, share: Share, progress: Progress) -> dict[str, float]:
        return self.test(model, split, share, progress)[0]

    def test(
        self, model: nn.Module, split: str, share: Share, progress: Progress
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        content = self.corpus.splits[split]
        pack = share.packs_evaluation(self.config)
        batches = in_order_of_length(
            self._sequences(content), content.numbers["labels"], self.config.validation.batch_size,
            content.numbers.get("first"), content.numbers.get("second"), self.config.data.longest,
            share.training_multiple_of(self.config) if pack else share.multiple_of(self.config), pack,
        )  # fmt: skip
        score = accuracy(
            model, _limited(batches, self.config, split), device=share.device, precision=share.precision,
            rank=share.rank, ranks=share.ranks, progress=progress,
        )  # fmt: skip
        metrics = {"accuracy": score.accuracy, "loss": score.loss, "count": float(score.count)}
        return metrics, None if score.right is None else pack_items(score.right)

    def save_tokenizer(self, folder: Path) -> None:
        pass

    @property
    def _has_pairs(self) -> bool:
        return self.config.task == "pairs"

    def _sequences(self, split: Split) -> Sequences:
        return self.corpus.splits["documents"].sequences["text"] if self._has_pairs else split.sequences["text"]


class Language(CommonTask):
    """The next token of a stream."""

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus

    def build_model(self) -> PreTrainedModel:
        vocabulary = self.corpus.manifest["facts"].get("vocabulary", 256)
        return MGKForCausalLM(build_model_config(self.config, vocab_size=vocabulary))

    def training_batches(self, share: Share) -> Batches:
        # All ranks and micro-batches read the same rows in turn, so the stream has the rows of a micro-batch.
        rows = micro_batch(self.config, share.ranks) * share.ranks
        tokens = self._tokens("train")
        windows = Windows(
            tokens=tokens, batch_size=rows, length=self.config.data.longest, rank=share.rank, ranks=share.ranks
        )
        cutoffs = resolve_model(self.config).get("adaptive_cutoffs")
        if cutoffs is None:
            return windows
        return ClusteredBatches(batches=windows, cutoffs=cutoffs, multiple_of=share.training_multiple_of(self.config))

    def varying_dimension(self, name: str, tensor: Tensor) -> int | None:
        return 0 if is_cluster(name) else None

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return model(**model_inputs(batch))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], num_targets: Tensor) -> Tensor:
        return model(**model_inputs(batch), num_items_in_batch=num_targets, use_cache=False).loss

    def count_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["shift_labels"].numel()

    def count_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return batch["input_ids"].numel()

    def evaluate(self, model: nn.Module, split: str, share: Share, progress: Progress) -> dict[str, float]:
        assert isinstance(model, MGKForCausalLM)
        tokens = self._tokens(split)
        length, batch_size = self.config.data.longest, self.config.validation.batch_size
        if split == "valid" and self.config.validation.limit is not None:
            tokens = tokens[: self.config.validation.limit * length * batch_size + 1]
        found = perplexity.disjoint(
            model, tokens, length=length, batch_size=batch_size, device=share.device, precision=share.precision,
            rank=share.rank, ranks=share.ranks, progress=progress,
        )  # fmt: skip
        return {
            "loss": found.nats_per_token,
            "perplexity": found.perplexity,
            "bits_per_token": found.bits_per_token,
            "count": float(found.tokens),
        }

    def test(
        self, model: nn.Module, split: str, share: Share, progress: Progress
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        return self.evaluate(model, split, share, progress), None

    def save_tokenizer(self, folder: Path) -> None:
        pass

    def _tokens(self, split: str) -> NDArray[Any]:
        return self.corpus.splits[split].sequences["text"].tokens


class Translation(CommonTask):
    """A sentence in another language."""

    widths_vary = True
    SPECIAL: ClassVar[dict[str, int]] = {
        "pad_token_id": translation.PAD,
        "bos_token_id": translation.BOS,
        "eos_token_id": translation.EOS,
        # As fairseq: the decoder starts with the token that ends the sentence before.
        "decoder_start_token_id": translation.EOS,
    }

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus

    @functools.cached_property
    def tokenizer(self) -> Any:
        return translation.load_tokenizer(self.corpus)

    def build_model(self) -> PreTrainedModel:
        return MGKForSeq2SeqLM(
            build_model_config(
                self.config,
                vocab_size=self.corpus.manifest["facts"]["vocabulary"],
                source_vocab_size=None,
                tokenizer_sha256=fingerprint(self.tokenizer),
                **self.SPECIAL,
            )
        )

    def training_batches(self, share: Share) -> Batches:
        source, target = self._sides("train")
        _check_packing(self.config, share)
        return Translations(
            source=source, target=target, max_tokens=micro_batch(self.config, share.ranks), seed=self.config.seed,
            multiple_of=share.training_multiple_of(self.config), pack=share.packs(self.config), rank=share.rank,
            ranks=share.ranks,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], num_targets: Tensor) -> Tensor:
        smoothing = self.config.training.label_smoothing
        if smoothing == 0:
            return model(**batch, num_items_in_batch=num_targets).loss
        # Without labels, for which the model would compute a loss of its own.
        inputs = dict(batch)
        labels = inputs.pop("labels")
        late = one_later(labels, translation.EOS, translation.PAD, batch.get("decoder_cu_seq_lens_q"))
        logits = model(**inputs, decoder_input_ids=late, use_cache=False).logits.float()
        total = F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )
        return total / num_targets

    def count_targets(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def count_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["input_ids"] != translation.PAD).sum()) + self.count_targets(batch)

    def evaluate(self, model: nn.Module, split: str, share: Share, progress: Progress) -> dict[str, float]:
        assert isinstance(model, MGKForSeq2SeqLM)
        source, target = self._sides(split)
        batches = Translations(
            source=source, target=target, max_tokens=self._largest(split, share), shuffle=False,
            multiple_of=share.multiple_of(self.config),
        )  # fmt: skip
        metrics = perplexity.of_batches(
            model, _limited(batches, self.config, split), device=share.device, precision=share.precision,
            rank=share.rank, ranks=share.ranks, progress=progress,
        )  # fmt: skip
        found = {
            "loss": metrics.nats_per_token,
            "perplexity": metrics.perplexity,
            "count": float(metrics.tokens),
        }
        if self.config.validation.metric == "bleu":
            # As fairseq does during training.
            said = bleu.translate(
                model, self.corpus, split, max_length_ratio=1.2, max_length_offset=10,
                max_tokens=self._largest(split, share), device=share.device, precision=share.precision,
                rank=share.rank, ranks=share.ranks, progress=progress,
            )  # fmt: skip
            wanted = bleu.references(self.corpus, split)
            found["bleu"] = bleu.score(said, wanted, tokenised=bleu.is_tokenised(self.corpus)).bleu
        return found

    def test(
        self, model: nn.Module, split: str, share: Share, progress: Progress
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        return self.evaluate(model, split, share, progress), None

    def save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def _sides(self, split: str) -> tuple[Sequences, Sequences]:
        sequences = self.corpus.splits[split].sequences
        return sequences["source"], sequences["target"]

    def _largest(self, split: str, share: Share) -> int:
        """Tokens of a batch in evaluation: as in training, but room for the longest sentence once it is rounded up."""
        longest = max(int(side.lengths.max(initial=0)) for side in self._sides(split))
        assert self.config.training.max_tokens is not None
        return max(longest + share.multiple_of(self.config) - 1, self.config.training.max_tokens)


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """The model as it was before ``compile()``, its parts included."""
    compiled = {module: module._compiled_call_impl for module in model.modules()}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


class _First:
    """The first few batches of many."""

    def __init__(self, batches: Batches, count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return min(self.count, len(self.batches))

    def batch(self, epoch: int, step: int) -> dict[str, Tensor]:
        return self.batches.batch(epoch, self._place(step))

    def rows(self, epoch: int, step: int) -> NDArray[np.int64]:
        return self.batches.rows(epoch, self._place(step))

    def _place(self, step: int) -> int:
        # Spread out: they are sorted by length.
        return step * len(self.batches) // len(self)


def _check_packing(config: RunConfig, share: Share) -> None:
    """Where the fused kernels do not take packed sequences, one after the other would be slower than padding."""
    if share.packs(config) and share.device.type == "cuda" and share.precision is None:
        raise ValueError("data.pack must be false or left out with training.precision=fp32 on a GPU, got true")


def _limited(batches: Batches, config: RunConfig, split: str) -> Batches:
    """All batches, but for validation only as many as the configuration says."""
    limit = config.validation.limit
    return batches if limit is None or split != "valid" else _First(batches, limit)
