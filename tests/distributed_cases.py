"""Runs of two processes, shared by the tests of `mgk.training.distributed`; as a script, what one of the two does.

To import everything takes a process longer than to train one of these models, so all cases share one pair of processes:
`python distributed_cases.py FOLDER`, started once for each rank as torchrun would start it, makes them one after the
other and leaves what it saw in `FOLDER/CASE/rank-N.json` and `.safetensors`.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import mgk.data
import mgk.recipes
from mgk.data.store import Corpus
from mgk.training.configuration import RunConfig, from_mapping, merge
from mgk.training.distributed import build_fabric, whole
from mgk.training.errors import CheckpointError
from mgk.training.loop import Trainer
from mgk.training.run import finish, fit
from mgk.training.task import Classification

STEPS = 20
VALID, TEST = 37, 7
"""Samples: 5 batches of 8, which two ranks cannot share evenly, and 1 batch, which is fewer than ranks."""

LISTOPS = {"train": 300, "valid": VALID, "test": TEST, "minimum": 5, "maximum": 30}

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 24, "num_hidden_layers": 2}
QUIET = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}

CLASSIFICATION = {
    "name": "pair", "task": "classification", "data": {"corpus": "listops", "longest": 64},
    "model": {"architecture": "lra-listops", "attention": "smgk", "max_position_embeddings": 64, **SMALL, **QUIET},
    "optimizer": {"lr": 3e-3, "weight_decay": 0.01}, "schedule": {"kind": "onecycle", "warmup": 5},
    "training": {"steps": STEPS, "batch_size": 16, "log_every": 1000, "checkpoint_every": 10, "clip_norm": 0.5},
    "validation": {"every": 10, "batch_size": 8, "metric": "accuracy"},
}  # fmt: skip
LANGUAGE = merge(CLASSIFICATION, {
    "task": "language", "data": {"corpus": "enwik8", "longest": 24},
    # No byte lies in the last cluster, and on one rank perhaps none in the second.
    "model": {"architecture": "wikitext103-small", "adaptive_cutoffs": [100, 120, 200]},
    "training": {"accumulate": 2}, "validation": {"metric": "loss", "batch_size": 5},
})  # fmt: skip
TRANSLATION = merge(CLASSIFICATION, {
    "task": "translation", "data": {"corpus": "iwslt14"},
    "model": {"architecture": "iwslt14", "decoder_layers": 1, "max_position_embeddings": 128},
    # A rank's half holds two sentences or three, of 2 to 20 tokens.
    "training": {"batch_size": None, "max_tokens": 80, "label_smoothing": 0.1}, "validation": {"metric": "bleu"},
})  # fmt: skip
TRANSLATION["training"].pop("batch_size")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    values: dict[str, Any]
    strategy: str = "ddp"
    accumulate_alone: int = 1
    """Micro-batches of one process for every one of two ranks: the batches of translation are made for a rank."""
    is_double: bool = True
    """fp64: nothing hides behind rounding, which Adam would blow up where a gradient is nearly zero."""
    damage: str = ""
    """What becomes not a number at step 5, on the last rank only."""
    goes_on: str = ""
    """The case whose checkpoint of step 10 it starts from."""

    def config(self, ranks: int) -> RunConfig:
        config = from_mapping(RunConfig, self.values)
        pieces = config.training.accumulate * (self.accumulate_alone if ranks == 1 else 1)
        return replace(config, training=replace(config.training, accumulate=pieces))


def _with(base: dict[str, Any], **model: Any) -> dict[str, Any]:
    return merge(base, {"model": model})


_EQUAL = {
    "smgk": Case(values=CLASSIFICATION),
    "smgk-em": Case(values=_with(CLASSIFICATION, attention="smgk-em")),
    "softmax": Case(values=merge(_with(CLASSIFICATION, attention="softmax"), {"training": {"accumulate": 2}})),
    "language": Case(values=_with(LANGUAGE, attention="mgk-em")),
    "translation": Case(values=TRANSLATION, accumulate_alone=2),
}
EQUAL = {f"{name}-{strategy}": replace(case, strategy=strategy) for name, case in _EQUAL.items()
         for strategy in ("ddp", "fsdp2")}  # fmt: skip
"""Must give what one process gives."""

DAMAGED = {
    "nan-loss-ddp": replace(EQUAL["smgk-em-ddp"], damage="loss"),
    "nan-loss-fsdp2": replace(EQUAL["smgk-em-fsdp2"], damage="loss"),
    "nan-gradient-fsdp2": replace(EQUAL["smgk-em-fsdp2"], damage="gradient"),
}
"""Equal to one process as well, which has the same damage in its whole batch."""

_DROPOUT = _with(CLASSIFICATION, attention="smgk-em", dropout=0.2, attention_dropout=0.1)
RESUMED = {
    "whole-fsdp2": Case(values=_DROPOUT, strategy="fsdp2", is_double=False),
    "resumed-fsdp2": Case(values=_DROPOUT, strategy="fsdp2", is_double=False, goes_on="whole-fsdp2"),
    # Nobody promises the same bits here: rounding differs.
    "ddp-goes-on-as-fsdp2": replace(EQUAL["smgk-fsdp2"], goes_on="smgk-ddp"),
}

CASES = {**EQUAL, **DAMAGED, **RESUMED}

RECIPE = {
    "title": "A small run", "task": "classification",
    **{key: CLASSIFICATION[key] for key in ("optimizer", "schedule")},
    "data": {**CLASSIFICATION["data"], "options": LISTOPS},
    "model": {**_DROPOUT["model"]},
    "training": {**CLASSIFICATION["training"], "steps": 100, "checkpoint_every": 5},
    "validation": {**CLASSIFICATION["validation"], "every": 20},
}  # fmt: skip
RECIPE_FILE = "small.yaml"
UNDISTURBED, ELSEWHERE, STOPPED = "undisturbed", "elsewhere", "stopped"


def make_corpora(folder: Path) -> None:
    """Every corpus that the cases read, and the recipe."""
    folder.mkdir(parents=True)
    # By way of JSON: no anchors for what stands there twice.
    (folder / RECIPE_FILE).write_text(yaml.safe_dump(json.loads(json.dumps(RECIPE))))
    mgk.data.prepare("listops", folder=folder / "listops", **LISTOPS)
    raw = folder / "raw"
    raw.mkdir()
    words = ["the", "a", "dog", "cat", "runs", "sleeps", "over", "under", "street", "house", "and", "then", "it"]
    random = np.random.default_rng(0)
    (raw / "enwik8").write_text(" ".join(random.choice(words, 1500)))
    mgk.data.prepare("enwik8", raw, folder / "enwik8", size=6000)
    for split, count in (("train", 240), ("valid", 9), ("test", 5)):
        # Word for word, in another order and other letters.
        lines = [random.choice(words, random.integers(1, 9)) for _ in range(count)]
        (raw / f"{split}.de").write_text("".join(f"{' '.join(line[::-1]).upper()}\n" for line in lines))
        (raw / f"{split}.en").write_text("".join(f"{' '.join(line)}\n" for line in lines))
    mgk.data.prepare("iwslt14", raw, folder / "iwslt14", vocabulary=300, lowercase=False)


def open_corpus(folder: Path, case: Case) -> Corpus:
    name = case.values["data"]["corpus"]
    return mgk.data.open_corpus(name, folder / name)


def run_case(name: str, corpora: Path, folder: Path, *, ranks: int = 1) -> None:
    """Train, and keep what this rank saw. A case that goes on finds its checkpoint beside its folder."""
    case = CASES[name]
    fabric = build_fabric(device="cpu", devices=ranks, strategy=case.strategy if ranks > 1 else "auto")  # type: ignore[arg-type]
    fabric.launch()
    if case.goes_on and fabric.is_global_zero:
        for found in (folder.parent / case.goes_on / "checkpoints").glob("*-00000010"):
            shutil.copytree(found, folder / "checkpoints" / found.name)
    folder.mkdir(parents=True, exist_ok=True)
    fabric.barrier()
    with _precision(case):
        trainer = Trainer(case.config(ranks), folder, open_corpus(corpora, case), fabric)
        if case.damage and fabric.global_rank == ranks - 1:
            _DAMAGES[case.damage](trainer)
        losses, validated = [], []
        validate = trainer.validate
        trainer.validate = lambda: validated.append(validate()) or validated[-1]  # type: ignore[method-assign]
        for _ in trainer.steps():
            losses.append(trainer.state.losses[-1] if trainer.state.skipped_in_a_row == 0 else None)
        # Cloned before the best is loaded in their place.
        tensors = {name: whole(tensor).clone() for name, tensor in trainer.model.state_dict().items()}
        tensors["logits"] = compute_logits(trainer.model)
        result = finish(trainer)
    seen = {"losses": losses, "validated": validated, "metrics": result["metrics"], "skipped": trainer.state.skipped,
            "tokens": trainer.state.tokens, "step": trainer.state.step, "items": result.get("items")}  # fmt: skip
    save_file(tensors, folder / f"rank-{fabric.global_rank}.safetensors")
    (folder / f"rank-{fabric.global_rank}.json").write_text(json.dumps(seen))


def compute_logits(model: Any) -> Tensor:
    """Of some tokens, the same for everybody."""
    tokens = torch.arange(3, 27).view(2, 12)
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens[:, 1:6]} if model.config.is_encoder_decoder else {})}
    model.eval()
    with torch.no_grad():
        logits = model(**inputs).logits
    model.train()
    return logits.contiguous()


@contextlib.contextmanager
def _precision(case: Case) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if case.is_double else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _damage_loss(trainer: Trainer) -> None:
    """The loss of step 5 is not a number."""
    loss = trainer.task.loss

    def damaged(*arguments: Any) -> Tensor:
        return loss(*arguments) * (float("nan") if trainer.state.step == 4 else 1.0)

    trainer.task.loss = damaged  # type: ignore[method-assign]


def _damage_gradient(trainer: Trainer) -> None:
    """At step 5 the gradient of one row of the embeddings is not a number: that row is in the shard of one rank."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = float("nan")
        return gradient

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        if trainer.state.step == 4 and output.requires_grad:
            output.register_hook(spoil)

    trainer.model.get_input_embeddings().register_forward_hook(hook)


_DAMAGES = {"loss": _damage_loss, "gradient": _damage_gradient}


def _run_undisturbed(corpora: Path, folder: Path) -> None:
    """What torchrun's run must come to, however often it starts anew."""
    config = mgk.recipes.load(corpora / RECIPE_FILE).config()
    fabric = build_fabric(device="cpu", devices=2)
    fabric.launch()
    fit(config, folder, mgk.data.open_corpus("listops", corpora / "listops"), fabric)


def _look_elsewhere(corpora: Path, folder: Path) -> None:
    """The last rank sees another disk, without the checkpoint that the first one has."""
    case = RESUMED["resumed-fsdp2"]
    fabric = build_fabric(device="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    if fabric.is_global_zero:
        shutil.copytree(folder.parent / case.goes_on, folder / "0")
    fabric.barrier()
    try:
        Trainer(case.config(2), folder / f"{fabric.global_rank}", open_corpus(corpora, case), fabric)
    except CheckpointError as error:
        (folder / f"error-{fabric.global_rank}").write_text(str(error))


def _stop_one(corpora: Path, folder: Path) -> None:
    """The last rank gets SIGTERM within step 7."""
    case = EQUAL["smgk-ddp"]
    fabric = build_fabric(device="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loss, calls = Classification.loss, []

    def signalled(*arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 7 and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    Classification.loss = signalled  # type: ignore[method-assign]
    fit(case.config(2), folder, open_corpus(corpora, case), fabric)


def environment(**more: str) -> dict[str, str]:
    """Of a child process: one thread, the library and these cases in its path, nothing of another launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_", "SLURM_"))}
    path = os.pathsep.join([str(Path(mgk.__file__).parents[1]), str(Path(__file__).parent)])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def start_pair(script: list[str]) -> list["subprocess.Popen[str]"]:
    """The two processes that torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"}  # fmt: skip
    return [
        subprocess.Popen([sys.executable, *script], env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip


def read_rank(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a rank saw."""
    return json.loads((folder / f"rank-{rank}.json").read_text()), load_file(folder / f"rank-{rank}.safetensors")


def main(folder: Path) -> None:
    """All cases, on one of two ranks. The last one ends the process by a signal."""
    corpora = folder / "corpora"
    for name in CASES:
        run_case(name, corpora, folder / name, ranks=2)
    _run_undisturbed(corpora, folder / UNDISTURBED)
    _look_elsewhere(corpora, folder / ELSEWHERE)
    _stop_one(corpora, folder / STOPPED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
