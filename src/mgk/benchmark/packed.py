"""A training step on reviews of IMDb at their real lengths: packed one after the other, next to padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk import recipes
from mgk.benchmark.attention import Comparison, Record
from mgk.benchmark.cells import LAYOUTS
from mgk.benchmark.correctness import WrongResultError, relative_error
from mgk.benchmark.timing import Candidate, Clock, Effort, HostClock, Report, StreamClock, Timing, no_report, take_turns
from mgk.benchmark.training_step import TrainingStep, allocated_bytes
from mgk.data.batches import Samples
from mgk.data.store import Corpus
from mgk.models import MGKConfig, MGKForSequenceClassification, architecture
from mgk.training.result import device_name
from mgk.training.task import Share, choose_precision

RECIPE = "lra/text"
HEADS = 8
"""Of softmax; the others have half."""
PADDED_TO = 4096
"""As the published code does."""
CALLS = 5
"""Steps in a row that one sample is the mean of."""

# Relative errors against fp32 with materialised attention, one review at a time: of the loss, and RMS of the gradient
# of all weights together. Of an untrained model the gradients of reviews nearly cancel, and what half precision leaves
# of their sum depends on the batch: there, a layout may be off by little more than reviews one at a time are.
LOSS_CAP = {None: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
GRADIENT_CAP = 1e-3
OVER_ONE_BY_ONE = 1.25


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Which model, and how its batch lies."""

    attention: str
    """A preset."""
    heads: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.heads}, {LAYOUTS[self.layout]}"

    def configurations(self) -> tuple[Any, MGKConfig]:
        """Of the run, and of its model, without dropout: what is compared must not be random."""
        changes = ["model.dropout=0.0", "model.attention_dropout=0.0", "model.activation_dropout=0.0"]
        run = recipes.load(RECIPE).config(f"{self.attention}-{self.heads}", changes)
        return run, architecture(run.model.architecture, **run.model.changes)


def readers(presets: Sequence[str]) -> list[Reader]:
    """The presets with half the heads that softmax has, each in every layout."""
    return [
        Reader(attention=preset, heads=HEADS if preset == "softmax" else HEADS // 2, layout=layout)
        for preset in presets
        for layout in LAYOUTS
    ]


def reviews(corpus: Corpus, layout: str, count: int, device: torch.device) -> dict[str, Tensor]:
    """The first batch that the recipe would train on, laid out as told."""
    changes = [f"data.pack={str(layout == 'packed').lower()}"]
    run = recipes.load(RECIPE).config(f"softmax-{HEADS}", changes)
    multiple_of = Share(device=device).training_multiple_of(run)
    split = corpus.splits["train"]
    samples = Samples(
        sequences=split.sequences["text"], labels=split.numbers["labels"], batch_size=count,
        longest=run.data.longest, by_length=run.data.by_length, seed=run.seed, pack=layout == "packed",
        width=PADDED_TO if layout == "published" else None, multiple_of=multiple_of,
    )  # fmt: skip
    return {name: tensor.to(device) for name, tensor in samples.batch(0, 0).items()}


class ReaderStep(TrainingStep):
    """An update of one model on one batch.

    Raises:
        WrongResultError: if loss or gradient are not those of every review alone.
    """

    def __init__(
        self, reader: Reader, batch: dict[str, Tensor], alone: OneByOne, count: int, device: torch.device
    ) -> None:
        before = allocated_bytes(device)
        self.reader = reader
        run, config = reader.configurations()
        super().__init__(make_model(config, device), batch, count, run)
        loss, gradient = self.loss_and_gradient()
        self.loss = float(loss)
        self.loss_error = abs(self.loss - alone.loss) / abs(alone.loss)
        self.gradient_error = relative_error(gradient, alone.gradient.double())
        self.errors = {"loss": self.loss_error, "gradient": self.gradient_error, "gradient_one_by_one": alone.error}
        gradient_cap = GRADIENT_CAP + OVER_ONE_BY_ONE * alone.error
        for name, cap in (("loss", LOSS_CAP[self.precision]), ("gradient", gradient_cap)):
            if not self.errors[name] <= cap:
                reason = f"the error of the {name} must be at most {cap:.2g}, got {self.errors[name]:.2g}"
                raise WrongResultError(reason, self.errors)
        self.peak_bytes = self.measure_peak(before)
        self.is_recorded = self.record()
        self.candidate = Candidate(name=reader.name, call=self.train)


def make_model(config: MGKConfig, device: torch.device) -> MGKForSequenceClassification:
    """Always the same weights."""
    torch.manual_seed(0)
    return MGKForSequenceClassification(config).to(device)


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """What every review alone gives, with attention as the paper writes it."""

    loss: float
    """In fp32."""
    gradient: Tensor
    """Likewise."""
    error: float
    """Of the gradient in the precision of training; 0 in fp32."""


def one_by_one(reader: Reader, batch: dict[str, Tensor], count: int, device: torch.device) -> OneByOne:
    """Every review of a packed batch alone."""
    run, config = reader.configurations()
    loss, gradient = _one_by_one(config, batch, count, device, None)
    precision, error = choose_precision(run.training.precision, device), 0.0
    if precision is not None:
        error = relative_error(_one_by_one(config, batch, count, device, precision)[1], gradient.double())
    return OneByOne(loss=loss, gradient=gradient, error=error)


def _one_by_one(
    config: MGKConfig, batch: dict[str, Tensor], count: int, device: torch.device, precision: torch.dtype | None
) -> tuple[float, Tensor]:
    model = make_model(config, device).train()
    model.set_attn_implementation("eager")
    bounds, total = batch["cu_seq_lens_q"].tolist(), 0.0
    for row in range(count):
        tokens = batch["input_ids"][:, bounds[row] : bounds[row + 1]]
        with torch.autocast(device.type, precision, enabled=precision is not None):
            loss = model(input_ids=tokens, labels=batch["labels"][row : row + 1], num_items_in_batch=count).loss
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def compare(
    chosen: Sequence[Reader],
    corpus: Corpus,
    *,
    count: int,
    device: torch.device,
    effort: Effort,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Comparison:
    """Check every model in every layout, then time training steps of those that are right, in turn.

    Args:
        chosen: which models; those padded to 4,096 are what the others are compared with.
        corpus: IMDb, prepared.
        count: reviews in a batch.
        device: where.
        effort: how long it may take.
        clock: how times are taken; ``None``: as the device needs it.
        report: told how far it is.
    """
    found = Comparison()
    total = len(chosen) + effort.rounds
    batches = {layout: reviews(corpus, layout, count, device) for layout in LAYOUTS}
    alone: dict[str, OneByOne] = {}
    steps: list[ReaderStep] = []
    for number, reader in enumerate(chosen):
        report(number, total, f"checking {reader.name}")
        try:
            if reader.attention not in alone:
                alone[reader.attention] = one_by_one(reader, batches["packed"], count, device)
            step = ReaderStep(reader, batches[reader.layout], alone[reader.attention], count, device)
            step.candidate.call()
            steps.append(step)
        except WrongResultError as error:
            facts = _facts(reader, batches, count, device)
            found.failures.append({**facts, "reason": str(error), "error": error.errors})
    if clock is None:
        is_cuda = device.type == "cuda"
        clock = StreamClock(device, isolated=False, calls=CALLS) if is_cuda else HostClock()
    timings = take_turns(
        [step.candidate for step in steps], clock, effort,
        lambda done, _, text: report(len(chosen) + done, total, text),
    )  # fmt: skip
    report(total, total, "done")
    records = [_record(step, timings[step.candidate.name], batches, count) for step in steps]
    published = {record["preset"]: record for record in records if record["layout"] == "published"}
    found.baselines.extend(published.values())
    for record in records:
        usual = published.get(record["preset"])
        if record["layout"] != "published" and usual is not None:
            found.rows.append(
                {
                    **record,
                    "baseline": LAYOUTS["published"],
                    "baseline_heads": usual["heads"],
                    "baseline_ms": usual["training_ms"],
                    "baseline_loss": usual["loss"],
                    "forward_ratio": None,
                    "training_ratio": usual["training_ms"] / record["training_ms"],
                }
            )
    return found


def _facts(reader: Reader, batches: dict[str, dict[str, Tensor]], count: int, device: torch.device) -> Record:
    _, config = reader.configurations()
    # Of the reviews alone, without what fills a batch up.
    tokens = int(batches["packed"]["cu_seq_lens_q"][count])
    return {
        "device": device_name(device),
        "preset": reader.attention,
        "heads": reader.heads,
        "head_dim": config.head_dim,
        "causal": False,
        "backend": "auto",
        "layout": reader.layout,
        "batch": count,
        "tokens": tokens,
        "computed_tokens": batches[reader.layout]["input_ids"].numel(),
    }


def _record(step: ReaderStep, timing: Timing, batches: dict[str, dict[str, Tensor]], count: int) -> Record:
    return {
        **_facts(step.reader, batches, count, step.device),
        "dtype": str(step.precision or torch.float32).removeprefix("torch."),
        "training_ms": timing.ms,
        "loss": step.loss,
        "error": step.errors,
        "peak_bytes": step.peak_bytes,
        "is_recorded": step.is_recorded,
        "samples": timing.samples,
        "noise": timing.noise,
    }
