"""Benchmark of a training step on IMDb reviews at their real lengths, packed and padded, for presets and softmax."""

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
"""Number of heads of softmax; the others have half."""
PADDED_TO = 4096
"""Padded length of the published code."""
OWN_KERNEL = "triton"
"""Transformers' name of our kernel for softmax on a GPU."""
CALLS = 5
"""Number of consecutive steps that are averaged in one sample."""

# Largest relative errors against fp32 with materialised attention, one review at a time: of the loss, and RMS of the
# gradient of all weights together. In an untrained model the gradients of reviews nearly cancel, so the precision of
# their sum in half precision depends on the batch. There a layout may have a slightly larger error than single reviews.
LOSS_CAP = {None: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
GRADIENT_CAP = 1e-3
OVER_ONE_BY_ONE = 1.25


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The kind of a model, and the layout of its batch."""

    attention: str
    """A preset."""
    heads: int
    layout: str
    implementation: str | None = None
    """Transformers' name of the backend; ``None`` is the choice of `auto`."""

    @property
    def name(self) -> str:
        through = "" if self.implementation is None else f" through {self.implementation}"
        return f"{self.attention}-{self.heads}{through}, {LAYOUTS[self.layout]}"

    @property
    def is_softmax(self) -> bool:
        """Whether it has all heads and the others are compared with it."""
        return self.attention == "softmax" and self.heads == HEADS

    def is_stock(self, device: torch.device) -> bool:
        """Whether a softmax runs on stock kernels; on a GPU `auto` runs packed sequences on our own."""
        return self.implementation is None and not (device.type == "cuda" and self.layout == "packed")

    def configurations(self) -> tuple[Any, MGKConfig]:
        """Return the configurations of the run and of its model, without dropout, so that results can be compared."""
        changes = ["model.dropout=0.0", "model.attention_dropout=0.0", "model.activation_dropout=0.0"]
        run = recipes.load(RECIPE).config(f"{self.attention}-{self.heads}", changes)
        return run, architecture(run.model.architecture, **run.model.changes)


def readers(presets: Sequence[str], device: torch.device) -> list[Reader]:
    """Softmax, and the presets with half its heads, each in every layout.

    On a GPU padded softmax also runs on our own kernel.
    """
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
    """Return the first training batch of the recipe in a layout."""
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
    """A training step of one model on one batch.

    Raises:
        WrongResultError: if loss or gradient disagree with those of single reviews.
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
    """Build a model, always with the same weights."""
    torch.manual_seed(0)
    return MGKForSequenceClassification(config).to(device)


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """Loss and gradient of single reviews, with attention written like the paper's equations."""

    loss: float
    """Loss in fp32."""
    gradient: Tensor
    """Gradient in fp32."""
    error: float
    """Error of the gradient in the precision of training; 0 in fp32."""


def one_by_one(reader: Reader, batch: dict[str, Tensor], count: int, device: torch.device) -> OneByOne:
    """Compute every review of a packed batch alone."""
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
    """Check every model in every layout, then time training steps of the correct ones in turn.

    Args:
        chosen: models to time; the others are compared with those padded to 4,096, and with softmax.
        corpus: prepared IMDb.
        count: number of reviews in a batch.
        device: device of the models.
        effort: time that the measurement may take.
        clock: how times are taken; ``None`` is the usual clock of the device.
        report: called with the progress.
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
    # Only tokens of reviews are counted, without those that fill up a batch.
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
