"""Benchmark of the Retrieval model end to end: softmax with 8 heads, on stock kernels and ours, and mixtures with 4."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from mgk.benchmark.attention import Comparison
from mgk.benchmark.correctness import WrongResultError
from mgk.benchmark.document_matcher import Matcher, MatcherStep, random_pairs
from mgk.benchmark.entry import why_refused
from mgk.benchmark.timing import Clock, Effort, HostClock, Report, StreamClock, Timing, no_report, take_turns
from mgk.benchmark.training_step import many_versions
from mgk.benchmark.yardstick import Record, fastest, is_stock, ratios_of_all
from mgk.nn.presets import LINEAR_PRESETS
from mgk.ops import softmax_kernel
from mgk.training.result import device_name

HEADS = 8
"""Number of heads of the softmax model; the others have half."""
PRESETS = ("smgk", "mgk")
TIMES = {"training": "training_ms", "evaluation": "evaluation_ms"}
CALLS = 5
"""Steps in a row that one sample is the mean of."""


def matchers(presets: Sequence[str], device: torch.device) -> list[Matcher]:
    """Return the models: softmax on every stock kernel and our own, and the presets, without dropout and then with it.

    Linear presets are joined by linear attention with all heads, which has no attention dropout. Materialised softmax
    is left out on a GPU: at 4,096 bytes it needs the paper's 50 GB.
    """
    kernels = ("cudnn", "flash", "efficient") if device.type == "cuda" else ("flash", "math")
    dropping = ("cudnn", "flash") if device.type == "cuda" else ("math",)
    own = ("triton",) if device.type == "cuda" else ()
    linear = [preset for preset in presets if preset in LINEAR_PRESETS]
    return [
        *(Matcher(attention="softmax", heads=HEADS, kernel=kernel) for kernel in kernels),
        *(Matcher(attention="softmax", heads=HEADS, implementation=each) for each in own),
        *([Matcher(attention="linear", heads=HEADS)] if linear else []),
        *(Matcher(attention=preset, heads=HEADS // 2) for preset in presets),
        *(Matcher(attention="softmax", heads=HEADS, kernel=kernel, drops_out=True) for kernel in dropping),
        *(Matcher(attention="softmax", heads=HEADS, implementation=each, drops_out=True) for each in own),
        *(Matcher(attention=preset, heads=HEADS // 2, drops_out=True) for preset in presets if preset not in linear),
    ]


@softmax_kernel.ignored()
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
    """Check every model, then time training steps and evaluations of the correct ones in turn.

    Args:
        chosen: models to time.
        pairs: document pairs in a batch.
        tokens: tokens of each document.
        device: device of the models.
        effort: time that the measurement may take.
        clock: how times are taken; ``None`` is the usual clock of the device.
        report: called with the progress.
    """
    found = Comparison()
    batch = random_pairs(pairs, tokens, device)
    steps: list[MatcherStep] = []
    total = len(chosen) + effort.rounds
    with many_versions(device):
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
            except (RuntimeError, ValueError) as error:
                if not matcher.is_baseline:
                    raise
                reason = why_refused(error, heard) if isinstance(error, RuntimeError) else str(error)
                found.skipped.append({**facts, "reason": reason})
        if clock is None:
            is_cuda = device.type == "cuda"
            clock = StreamClock(device, isolated=False, calls=CALLS) if is_cuda else HostClock()
        timings = take_turns(
            [candidate for step in steps for candidate in step.candidates()], clock, effort,
            lambda done, _, text: report(len(chosen) + done, total, text),
        )  # fmt: skip
    report(total, total, "done")
    ours: list[Record] = []
    for step in steps:
        (found.baselines if step.matcher.is_baseline else ours).append(_record(step, timings, pairs, tokens))
    found.rows.extend(_beside(record, ours, found.baselines) for record in ours)
    return found


def _facts(matcher: Matcher, pairs: int, tokens: int, device: torch.device) -> Record:
    _, config = matcher.configurations()
    return {
        "device": device_name(device),
        "preset": matcher.attention,
        "heads": matcher.heads,
        **({"backend": matcher.implementation or "auto"} if matcher.kernel is None else {"kernel": matcher.kernel}),
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


def _beside(record: Record, ours: Sequence[Record], baselines: Sequence[Record]) -> Record:
    """Return a record with its ratios to softmax on cuDNN, on the fastest stock kernel, and to the fastest of all."""
    softmax = [each for each in baselines if each["attention_dropout"] == record["attention_dropout"]]
    rivals = [each for each in softmax if is_stock(each)]
    quickest = fastest(rivals, "training_ms")
    if quickest is None:
        raise RuntimeError(f"softmax must run on a stock kernel beside {record['preset']}, got none that does")
    usual = next((each for each in rivals if each["kernel"] == "cudnn"), quickest)
    undropped = [each for each in ours if each["preset"] == record["preset"] and each["attention_dropout"] == 0]
    ratios: Record = {
        "baseline": usual["kernel"],
        "baseline_heads": usual["heads"],
        "baseline_training_ms": usual["training_ms"],
        "training_ratio": usual["training_ms"] / record["training_ms"],
        "fastest_baseline": quickest["kernel"],
        "fastest_training_ratio": quickest["training_ms"] / record["training_ms"],
        "evaluation_ratio": None,
        "fastest_evaluation_ratio": None,
        "training_over_no_dropout": None,
        **ratios_of_all(record, softmax, TIMES),
    }
    if record["evaluation_ms"] is not None:
        ratios["evaluation_ratio"] = usual["evaluation_ms"] / record["evaluation_ms"]
        least = min(each["evaluation_ms"] for each in rivals)
        ratios["fastest_evaluation_ratio"] = least / record["evaluation_ms"]
    if record["attention_dropout"] > 0 and undropped:
        ratios["training_over_no_dropout"] = record["training_ms"] / undropped[0]["training_ms"]
    return {**record, **ratios}
