"""Evaluation of a finished run with the paper's protocol."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mgk.data import baselines
from mgk.data.kind import Progress, no_progress
from mgk.evaluation import bleu, perplexity
from mgk.training import checkpoint, result, snapshot
from mgk.training.configuration import RunConfig, from_mapping, read_yaml
from mgk.training.corpora import open_or_prepare
from mgk.training.distributed import build_fabric
from mgk.training.errors import CheckpointError
from mgk.training.resolved_model import model_of_record, with_model_of_record
from mgk.training.run import CONFIG
from mgk.training.run_checkpoints import BEST, CHECKPOINTS
from mgk.training.task import Share, Task, build_task, choose_precision


def evaluate_run(
    folder: Path,
    split: str = "test",
    *,
    stride: int | None = 1,
    beams: int = 5,
    length_penalty: float = 1.0,
    source: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Test the best model of a run, and write the metrics to ``evaluation-SPLIT.json`` in its folder.

    Classification has the accuracy over all samples. A language model has the perplexity of disjoint windows, and that
    of a sliding window, which the paper reports. Translation has the loss, sacreBLEU with its signature, and tokenised
    lower-case BLEU.

    Args:
        folder: folder of the run.
        split: split of the corpus.
        stride: stride of the sliding window; ``None`` leaves it out.
        beams: number of beams in translation.
        length_penalty: power of the length by which the scores of beam search are divided.
        source: folder of the raw files, needed if the corpus is not prepared yet.
        device: ``cpu``, ``cuda`` or ``auto``.
        precision: precision of the forward pass; ``auto`` is that of the recipe on this device.
        progress: shows the progress.
    """
    config, task, found = open_run(folder, source=source, progress=progress)
    stride = None if stride is None else min(stride, config.data.longest)
    if split not in task.corpus.splits or split == "documents":
        known = ", ".join(name for name in task.corpus.splits if name != "documents")
        raise ValueError(f"--split must be one of {known}, got {split!r}")
    # build_fabric also checks the name of the device.
    place = build_fabric(device=device).device
    named = config.training.precision if precision == "auto" else precision
    if named not in ("auto", "fp32", "bf16", "fp16"):
        raise ValueError(f"--precision must be one of auto, fp32, bf16, fp16, got {named!r}")
    share = Share(device=place, precision=choose_precision(named, place))
    if found.manifest["corpus"] != task.corpus.fingerprint:
        raise CheckpointError(
            f"{found.folder} must come from this corpus, whose fingerprint is {task.corpus.fingerprint[:12]}..., "
            f"got {found.manifest['corpus'][:12]}...: was it prepared anew?"
        )
    model = task.build_model()
    snapshot.restore_weights(found, model)
    model.to(place).eval()
    tested, items = task.test(model, split, share, progress)
    metrics: dict[str, Any] = dict(tested)
    where: dict[str, Any] = {"device": share.device, "precision": share.precision, "progress": progress}
    if config.task == "language" and stride is not None:
        tokens = task.corpus.splits[split].sequences["text"].tokens
        slid = perplexity.sliding(
            model, tokens, length=config.data.longest, stride=stride,
            batch_size=config.validation.batch_size, **where,
        )  # fmt: skip
        metrics |= {"sliding_perplexity": slid.perplexity, "sliding_bits_per_token": slid.bits_per_token}
    if config.task == "translation":
        said = bleu.translate(model, task.corpus, split, beams=beams, length_penalty=length_penalty, **where)
        wanted = bleu.references(task.corpus, split)
        scored = bleu.score(said, wanted, tokenised=bleu.is_tokenised(task.corpus))
        metrics |= {
            "bleu": scored.bleu,
            "signature": scored.signature,
            "tokenised_lowercase_bleu": scored.tokenised_lowercase_bleu,
            "tokenised_signature": scored.tokenised_signature,
            "brevity_penalty": scored.brevity_penalty,
        }
    facts: dict[str, Any] = {}
    if config.task == "language":
        facts = {"stride": stride}
    elif config.task == "translation":
        facts = {"beams": beams, "length_penalty": length_penalty}
    written = result.describe(
        config, metrics=metrics, model=model_of_record(found.manifest), corpus=task.corpus.fingerprint, device=place,
        split=split, best_step=found.step, precision=share.precision_name,
        baselines=baselines.compute(task.corpus, split), **facts, **result.items({split: items}),
    )  # fmt: skip
    result.write(folder / f"evaluation-{split}.json", written)
    return written


def open_run(
    folder: Path, *, source: Path | None = None, progress: Progress = no_progress
) -> tuple[RunConfig, Task, checkpoint.Checkpoint]:
    """Return the configuration of a run, its task with the corpus, and the checkpoint of its best model."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} must be the folder of a run, got no {CONFIG} there")
    config = from_mapping(RunConfig, read_yaml(folder / CONFIG))
    found = newest_best(folder)
    # Rebuild the model of the run, even if the name of its architecture means another one today.
    config = with_model_of_record(config, found.manifest)
    # The limit applies only to validation during training; here every batch counts. BLEU is measured here with other
    # settings, so the task measures only the loss.
    changes: dict[str, Any] = {"metric": "loss"} if config.task == "translation" else {}
    whole = dataclasses.replace(config, validation=dataclasses.replace(config.validation, limit=None, **changes))
    return config, build_task(whole, open_or_prepare(config.data, source=source, progress=progress)), found


def newest_best(folder: Path) -> checkpoint.Checkpoint:
    """Return the checkpoint with the best validation metric."""
    damaged: list[str] = []
    found = checkpoint.newest(folder / CHECKPOINTS, BEST, damaged.append)
    if found is None:
        said = f" ({'; '.join(damaged)})" if damaged else ""
        raise CheckpointError(f"{folder} must hold the best model of a run, got none{said}: has it validated yet?")
    return found
