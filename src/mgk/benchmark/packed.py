"""A training step on reviews of IMDb at their real lengths: packed one after the other, next to padded ones, and next
to softmax with all the heads in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk import recipes
from mgk.benchmark.attention import Comparison
from mgk.benchmark.cells import LAYOUTS
from mgk.benchmark.correctness import WrongResultError, relative_error
from mgk.benchmark.timing import Candidate, Clock, Effort, HostClock, Report, StreamClock, Timing, no_report, take_turns
from mgk.benchmark.training_step import TrainingStep, allocated_bytes
from mgk.benchmark.yardstick import Record, fastest, ratios_of_all
from mgk.data.batches import Samples
from mgk.data.store import Corpus
from mgk.models import MGKConfig, MGKForSequenceClassification, architecture
from mgk.ops import softmax_kernel
from mgk.training.result import device_name
from mgk.training.task import Share, choose_precision

RECIPE = "lra/text"
HEADS = 8
"""Of softmax; the others have half."""
PADDED_TO = 4096
"""As the published code does."""
OWN_KERNEL = "triton"
"""Of softmax on a GPU, as transformers calls it."""
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
    implementation: str | None = None
    """What transformers calls the backend; ``None``: what `auto` picks."""

    @property
    def name(self) -> str:
        through = "" if self.implementation is None else f" through {self.implementation}"
        return f"{self.attention}-{self.heads}{through}, {LAYOUTS[self.layout]}"

    @property
    def is_softmax(self) -> bool:
        """Whether it has all the heads, and is what the others are compared with."""
        return self.attention == "softmax" and self.heads == HEADS

    def is_stock(self, device: torch.device) -> bool:
        """Whether a softmax goes through stock kernels: `auto` gives packed sequences to our own on a GPU."""
        return self.implementation is None and not (device.type == "cuda" and self.layout == "packed")

    def configurations(self) -> tuple[Any, MGKConfig]:
        """Of the run, and of its model, without dropout: what is compared must not be random."""
        changes = ["model.dropout=0.0", "model.attention_dropout=0.0", "model.activation_dropout=0.0"]
        run = recipes.load(RECIPE).config(f"{self.attention}-{self.heads}", changes)
        return run, architecture(run.model.architecture, **run.model.changes)


def readers(presets: Sequence[str], device: torch.device) -> list[Reader]:
    """Softmax, and the presets with half its heads, each in every layout; padded softmax on a GPU through our own
    kernel as well."""
    names = dict.fromkeys(["softmax", *presets])
    own = [layout for layout in LAYOUTS if layout != "packed" and device.type == "cuda"]
    return [
        *(
            Reader(attention=preset, heads=HEADS if preset == "softmax" else HEADS // 2, layout=layout)
            for preset in names
            for layout in LAYOUTS
        ),
        *(Reader(attention="softmax", heads=HEADS, layout=layout, implementation=OWN_KERNEL) for layout in own),
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
        model = make_model(config, device)
        if reader.implementation is not None:
            model.set_attn_implementation(reader.implementation)
        super().__init__(model, batch, count, run)
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


@softmax_kernel.ignored()
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
        chosen: which models; those padded to 4,096 are what the others are compared with, and softmax.
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
    softmax = [
        {**record, "way": f"{LAYOUTS[record['layout']]}, {record['backend']}"}
        for record in records
        if record["is_softmax"]
    ]
    for record in records:
        if not record["is_softmax"]:
            stock = fastest([each for each in softmax if each["is_stock"]], "training_ms")
            record |= ratios_of_all(record, softmax, {"training": "training_ms"})
            record["training_ratio_stock"] = None if stock is None else stock["training_ms"] / record["training_ms"]
    published = {_way(record): record for record in records if record["layout"] == "published"}
    found.baselines.extend(published.values())
    for record in records:
        usual = published.get(_way(record))
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


def _way(record: Record) -> tuple[str, str]:
    return record["preset"], record["backend"]


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
        "backend": reader.implementation or "auto",
        "is_softmax": reader.is_softmax,
        "is_stock": reader.is_softmax and reader.is_stock(device),
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
