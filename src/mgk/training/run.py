"""A complete run: folder, training, test and result."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric import Fabric

from mgk.data import baselines
from mgk.data.store import Corpus
from mgk.training import card, checkpoint, result
from mgk.training.configuration import RunConfig, to_mapping
from mgk.training.distributed import on_first_rank
from mgk.training.errors import Interrupted
from mgk.training.folder import make_folder
from mgk.training.lock import RunLock
from mgk.training.loop import Trainer
from mgk.training.run_checkpoints import CHECKPOINTS, Resume
from mgk.training.signals import GracefulStop
from mgk.training.tracking import Display

CONFIG = "config.yaml"


def fit(
    config: RunConfig,
    folder: str | Path,
    corpus: Corpus,
    fabric: Fabric,
    *,
    resume: Resume = "auto",
    display: Display | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Start or resume a run: train, choose the best checkpoint, test it and write the result.

    The first SIGTERM, SIGINT or SIGUSR1 finishes the step, saves and exits with the usual code.

    Args:
        config: everything that decides the numbers.
        folder: folder of the run, which is created if it does not exist.
        corpus: prepared corpus.
        fabric: launched Fabric.
        resume: see :class:`Trainer`.
        display: shows the progress.
        command: command that the user typed, for the card of the model.

    Returns:
        The content of ``result.json``.
    """
    folder = Path(folder)
    display = display or Display(quiet=True)
    with contextlib.ExitStack() as stack:

        def take_folder() -> None:
            make_folder("the run folder", folder)
            stack.enter_context(RunLock(folder))
            checkpoint.clean(folder / CHECKPOINTS)

        on_first_rank(fabric, take_folder)
        stop = stack.enter_context(GracefulStop())
        stack.enter_context(display)
        trainer = Trainer(config, folder, corpus, fabric, resume=resume, display=display, stop=stop)
        if fabric.is_global_zero:
            write_config(folder, config)
        try:
            for _ in trainer.steps():
                pass
            return finish(trainer, command)
        except Interrupted:
            if fabric.is_global_zero:
                how = "the same command" if resume == "auto" else "--resume auto"
                display.say(f"stopped at step {trainer.state.step} and saved: {how} goes on from here")
            # If only another rank got the signal, as batch systems do, it is taken to be SIGTERM.
            raise SystemExit(143 if stop.signal is None else stop.exit_code) from None


def finish(trainer: Trainer, command: str | None = None) -> dict[str, Any]:
    """Test the best model of a finished run, and write ``result.json`` and the card beside the model."""
    best = trainer.load_best()
    tested, items = trainer.test("test")
    state, corpus = trainer.state, trainer.task.corpus
    found = result.describe(
        trainer.config,
        metrics={"valid": best.manifest["metrics"], "test": tested},
        model=trainer.task.describe_model(trainer.model),
        corpus=corpus.fingerprint,
        device=trainer.share.device,
        ranks=trainer.share.ranks,
        precision=trainer.share.precision_name,
        packed=trainer.share.packs(trainer.config),
        parameters=trainer.model.num_parameters(),
        best_step=best.step,
        steps=state.step,
        skipped=state.skipped,
        tokens=state.tokens,
        seconds=state.seconds,
        baselines=baselines.compute(corpus) if trainer.fabric.is_global_zero else {},
        **result.items({"test": items}),
        **trainer.task.facts(),
    )
    if trainer.fabric.is_global_zero:
        result.write(trainer.folder / result.RESULT, found)
        card.write(best.folder, trainer.model, found, command)
    return found


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the configuration to ``config.yaml``, for people to read."""
    temporary = folder / f".{CONFIG}"
    try:
        temporary.write_text(yaml.safe_dump(to_mapping(config), sort_keys=False), encoding="utf-8")
        temporary.replace(folder / CONFIG)
    except OSError as error:
        raise ValueError(f"the run folder {folder} must have room for {CONFIG}, got {error}") from error
