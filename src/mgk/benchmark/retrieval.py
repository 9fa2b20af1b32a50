"""The Retrieval model end to end: softmax with 8 heads on stock kernels against mixtures with 4."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mgk.benchmark.attention import Comparison, Record
from mgk.benchmark.correctness import WrongResultError
from mgk.benchmark.document_matcher import Matcher, MatcherStep, random_pairs
from mgk.benchmark.entry import why_refused
from mgk.benchmark.timing import Clock, Effort, HostClock, Report, StreamClock, Timing, no_report, take_turns
from mgk.nn.presets import LINEAR_PRESETS
from mgk.training.result import device_name

HEADS = 8
"""Of the softmax model; the others have half."""
PRESETS = ("smgk", "mgk")
CALLS = 5
"""Steps in a row that one sample is the mean of."""


def matchers(presets: Sequence[str], device: torch.device) -> list[Matcher]:
    """Softmax on every stock kernel and the presets, all without dropout; then those that train with it. Beside linear
    presets stands linear attention with all heads; it has no dropout of its own.

    Materialised softmax is left out on a GPU: at 4,096 bytes it is the paper's 50 GB.
    """
    kernels = ("cudnn", "flash", "efficient") if device.type == "cuda" else ("flash", "math")
    dropping = ("cudnn", "flash") if device.type == "cuda" else ("math",)
    linear = [preset for preset in presets if preset in LINEAR_PRESETS]
    return [
        *(Matcher(attention="softmax", heads=HEADS, kernel=kernel) for kernel in kernels),
        *([Matcher(attention="linear", heads=HEADS)] if linear else []),
        *(Matcher(attention=preset, heads=HEADS // 2) for preset in presets),
        *(Matcher(attention="softmax", heads=HEADS, kernel=kernel, drops_out=True) for kernel in dropping),
        *(Matcher(attention=preset, heads=HEADS // 2, drops_out=True) for preset in presets if preset not in linear),
    ]


def compare(
    chosen: Sequence[Matcher],
    *,
    pairs: int,
    tokens: int,
    device: torch.device,
    effort: Effort,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Comparison:
    """Check every model, then time training steps and evaluations of those that are right, in turn.

    Args:
        chosen: which models.
        pairs: of documents in a batch.
        tokens: of each document.
        device: where.
        effort: how long it may take.
        clock: how times are taken; ``None``: as the device needs it.
        report: told how far it is.
    """
    found = Comparison()
    batch = random_pairs(pairs, tokens, device)
    steps: list[MatcherStep] = []
    total = len(chosen) + effort.rounds
    with _many_versions(device):
        for number, matcher in enumerate(chosen):
            report(number, total, f"checking {matcher.name}")
            facts = _facts(matcher, pairs, tokens, device)
            try:
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    step = MatcherStep(matcher, batch, device)
                    for candidate in step.candidates():
                        with candidate.context():
                            candidate.call()
                steps.append(step)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                found.skipped.append({**facts, "reason": "it ran out of memory"})
            except WrongResultError as error:
                found.failures.append({**facts, "reason": str(error), "error": error.errors})
            except RuntimeError as error:
                if matcher.kernel is None:
                    raise
                found.skipped.append({**facts, "reason": why_refused(error, heard)})
        if clock is None:
            is_cuda = device.type == "cuda"
            clock = StreamClock(device, isolated=False, calls=CALLS) if is_cuda else HostClock()
        timings = take_turns(
            [candidate for step in steps for candidate in step.candidates()], clock, effort,
            lambda done, _, text: report(len(chosen) + done, total, text),
        )  # fmt: skip
    report(total, total, "done")
    records = [_record(step, timings, pairs, tokens) for step in steps]
    found.baselines.extend(record for record in records if "kernel" in record)
    found.rows.extend(_beside(record, records) for record in records if "kernel" not in record)
    return found


def _many_versions(device: torch.device) -> AbstractContextManager[Any]:
    """The compiler counts versions over all models of a process, and would give up at the eighth."""
    if device.type != "cuda":
        return nullcontext()
    import torch._dynamo.config

    return torch._dynamo.config.patch(recompile_limit=64)


def _facts(matcher: Matcher, pairs: int, tokens: int, device: torch.device) -> Record:
    _, config = matcher.configurations()
    return {
        "device": device_name(device),
        "preset": matcher.attention,
        "heads": matcher.heads,
        **({"backend": "auto"} if matcher.kernel is None else {"kernel": matcher.kernel}),
        "pairs": pairs,
        "tokens": tokens,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }


def _record(step: MatcherStep, timings: dict[str, Timing], pairs: int, tokens: int) -> Record:
    training = timings[f"{step.matcher.name}, training"]
    evaluation = timings.get(f"{step.matcher.name}, evaluation")
    both = [training] if evaluation is None else [training, evaluation]
    return {
        **_facts(step.matcher, pairs, tokens, step.device),
        "dtype": str(step.precision or torch.float32).removeprefix("torch."),
        "training_ms": training.ms,
        "evaluation_ms": None if evaluation is None else evaluation.ms,
        "peak_bytes": step.peak_bytes,
        "parameters": step.num_parameters(),
        "is_recorded": step.is_recorded,
        "gradient_error": step.error,
        "samples": min(each.samples for each in both),
        "noise": max(each.noise for each in both),
    }


def _beside(record: Record, records: Sequence[Record]) -> Record:
    """A record with its ratios: softmax on cuDNN, or on the fastest kernel where there is none, over this."""
    rivals = [each for each in records if "kernel" in each and each["attention_dropout"] == record["attention_dropout"]]
    if not rivals:
        raise RuntimeError(f"softmax must run on a stock kernel beside {record['preset']}, got none that does")
    fastest = min(rivals, key=lambda each: each["training_ms"])
    usual = next((each for each in rivals if each["kernel"] == "cudnn"), fastest)
    undropped = [
        each
        for each in records
        if "kernel" not in each and each["preset"] == record["preset"] and each["attention_dropout"] == 0
    ]
    ratios: Record = {
        "baseline": usual["kernel"],
        "baseline_heads": usual["heads"],
        "baseline_training_ms": usual["training_ms"],
        "training_ratio": usual["training_ms"] / record["training_ms"],
        "fastest_baseline": fastest["kernel"],
        "fastest_training_ratio": fastest["training_ms"] / record["training_ms"],
        "evaluation_ratio": None,
        "fastest_evaluation_ratio": None,
        "training_over_no_dropout": None,
    }
    if record["evaluation_ms"] is not None:
        ratios["evaluation_ratio"] = usual["evaluation_ms"] / record["evaluation_ms"]
        quickest = min(each["evaluation_ms"] for each in rivals)
        ratios["fastest_evaluation_ratio"] = quickest / record["evaluation_ms"]
    if record["attention_dropout"] > 0 and undropped:
        ratios["training_over_no_dropout"] = record["training_ms"] / undropped[0]["training_ms"]
    return {**record, **ratios}
