"""Tiny runs, and processes that may be killed, shared by the tests of `mgk.training`."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tarfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import mgk.data
from mgk.data import store
from mgk.training import checkpoint, run, signals, snapshot
from mgk.training.configuration import RunConfig, from_mapping, merge
from mgk.training.distributed import build_fabric, random_state
from mgk.training.loop import CHECKPOINTS, STEP, Trainer
from mgk.training.run import fit
from mgk.training.tracking import Display

TESTS = Path(__file__).parent
FIXTURES = TESTS / "data" / "fixtures"

ECHO = 0.3
"""Seconds within which a child takes a second signal for the first: less than usual, for tests to take less."""

SMALL = {
    "num_attention_heads": 2, "hidden_size": 16, "head_dim": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "max_position_embeddings": 64, "dropout": 0.1,
}  # fmt: skip

COMMON = {
    "name": "tiny", "optimizer": {"lr": 1e-3, "weight_decay": 0.01}, "schedule": {"kind": "onecycle", "warmup": 4},
    "training": {"steps": 80, "log_every": 7, "checkpoint_every": 1000}, "validation": {"every": 40, "batch_size": 16},
}  # fmt: skip

KINDS = {
    "classification": {
        "data": {"corpus": "listops", "longest": 64},
        "model": {"architecture": "lra-listops", "attention": "smgk", "classifier_size": 16, **SMALL},
        "training": {"batch_size": 8}, "validation": {"metric": "accuracy"},
    },
    "pairs": {
        "data": {"corpus": "peerread", "longest": 64},
        "model": {"architecture": "lra-retrieval", "attention": "mgk", "classifier_size": 16, **SMALL},
        "training": {"batch_size": 2}, "validation": {"metric": "accuracy"},
    },
    "language": {
        "data": {"corpus": "enwik8", "longest": 16},
        "model": {"architecture": "modern", "attention": "smgk", **SMALL},
        "training": {"batch_size": 4}, "validation": {"metric": "loss"},
    },
    "translation": {
        "data": {"corpus": "tatoeba"},
        "model": {"architecture": "iwslt14", "attention": "mgk", "decoder_layers": 1, **SMALL},
        "training": {"max_tokens": 64, "label_smoothing": 0.1, "clip_norm": 0.5}, "validation": {"metric": "loss"},
        "schedule": {"kind": "inverse_sqrt"},
    },
}  # fmt: skip

GERMAN = ["Ein Hund", "Der Hund läuft", "Ja", "Zwei Katzen", "Nein, danke", "Gut", "Am Meer", "Im Haus", "Er ist da"]
ENGLISH = ["A dog", "The dog runs", "Yes", "Two cats", "No, thanks", "Good", "At the sea", "In the house", "He is here"]


def make_values(task="classification", **changes):
    """A tiny run as nested mappings; ``changes`` are laid over it."""
    return merge(merge({"task": task, **COMMON}, KINDS[task]), changes)


def make_config(task="classification", **changes):
    return from_mapping(RunConfig, make_values(task, **changes))


def make_corpus(task, folder):
    """The corpus of a tiny run, prepared in a folder."""
    if task == "classification":
        return mgk.data.prepare("listops", folder=folder, train=100, valid=24, test=24, minimum=5, maximum=24)
    source = folder.with_name(f"{folder.name}-source")
    source.mkdir()
    if task == "language":
        content = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)
        (source / "enwik8").write_bytes(content.tobytes())
        return mgk.data.prepare("enwik8", source, folder, size=4000)
    if task == "pairs":
        documents = FIXTURES / "peerread" / "peerread_docs_4k.jsonl"
        (source / documents.name).write_bytes(documents.read_bytes())
        with tarfile.open(source / "peerread_pairs.tar.xz", "w:xz") as archive:
            for path in sorted((FIXTURES / "peerread").glob("*.tsv")):
                archive.add(path, path.name)
        return mgk.data.prepare("peerread", source, folder)
    with tarfile.open(source / "tatoeba_deen.tar.xz", "w:xz") as archive:
        for split in ("train", "valid", "test"):
            for language, text in (("de", GERMAN), ("en", ENGLISH)):
                content = "".join(f"{line}\n" for line in text).encode()
                member = tarfile.TarInfo(f"tatoeba_deen.{split}.{language}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return mgk.data.prepare("tatoeba", source, folder, vocabulary=270, clean_ratio=9)


class Recorded(Trainer):
    """Remembers what every update said, and its learning rate."""

    def __init__(self, *args, **options):
        self.records = {}
        super().__init__(*args, **options)

    def _read(self, report):
        super()._read(report)
        group = self.optimizer.param_groups[0]
        # As text: NaN is equal to itself there. The last value is whether a signal came.
        self.records[report.step] = repr([*report.values.tolist()[:4], group["lr"], group["betas"]])


def make_trainer(config, folder, corpus, kind=Recorded, **options):
    return kind(config, folder, corpus, build_fabric(device="cpu"), **options)


def take_steps(trainer, until):
    """Make updates until there are so many; to the end, if that is it."""
    for step in trainer.steps():
        if step == until < trainer.config.training.steps:
            return
    assert trainer.state.step == until


def contents(trainer):
    """Weights, buffers, moments and generators, as bytes by name."""
    found = {f"model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        found |= {f"optimizer.{name}.{key}": value for key, value in trainer.optimizer.state[parameter].items()}
    found |= {f"random.{name}": state for name, state in random_state(torch.device("cpu")).items()}
    return {name: tensor.detach().cpu().numpy().tobytes() for name, tensor in found.items()}


def different(one, other):
    """Names whose bytes differ."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def files_of(folder):
    """The content of every file of a checkpoint but the manifest, which has the time in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != checkpoint.MANIFEST}


class Lines:
    """Stands for a display, and remembers what was said."""

    def __init__(self):
        self.said = []
        self.display = Display(quiet=True)
        self.display.say = self.said.append


# Children come from a server that has imported everything and started no thread: a fork of it takes milliseconds, and
# is a real process to kill.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["training_cases"])


@contextmanager
def process(target, *args):
    """A process, and our end of a pipe whose other end is its first argument. It does not outlive the context."""
    ours, theirs = _CONTEXT.Pipe()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), *([before] if before else [])])
    try:
        child = _CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
        child.start()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    theirs.close()
    try:
        yield child, ours
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        ours.close()


def exit_code(child, seconds=60):
    child.join(seconds)
    assert child.exitcode is not None, "the process must end, and did not"
    return child.exitcode


def run_in_process(*args):
    """A whole run in a process of its own; what it ends with."""
    with process(train, *args) as (child, _):
        return exit_code(child)


def hear(pipe, seconds=60):
    assert pipe.poll(seconds), "the process must say something, and did not"
    return pipe.recv()


def train(pipe, folder, corpus, values, phase=None):
    """A run. In its phase, such as ``step``, it says so and waits; while it waits it says when a signal comes."""
    torch.set_num_threads(1)

    class Watched(Recorded):
        split = ""
        waited = False

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.model.register_forward_pre_hook(lambda *_: self.wait_in_forward())
            if phase == "start":
                self.wait()
            if phase == "save":
                save_file = snapshot.save_file
                snapshot.save_file = lambda *args: (self.wait(), save_file(*args))

        def wait_in_forward(self):
            is_step = self.model.training and self.state.step == 5
            if (phase == "step" and is_step) or (not self.model.training and phase == self.split):
                self.wait()

        def evaluate(self, split):
            self.split = split
            return super().evaluate(split)

        def test(self, split):
            self.split = split
            return super().test(split)

        def wait(self):
            if self.waited:
                return
            self.waited = True
            pipe.send("here")
            has_said = False
            while not pipe.poll(0.005):
                if self.stop.signal is not None and not has_said:
                    pipe.send("signalled")
                    has_said = True
            pipe.recv()

        def _read(self, report):
            super()._read(report)
            with (folder / "updates.jsonl").open("a") as file:
                file.write(json.dumps([report.step, self.records[report.step]]) + "\n")
            if phase == "steps":
                pipe.send(report.step)

    run.Trainer = Watched
    signals.ECHO = ECHO
    fit(from_mapping(RunConfig, values), folder, store.load(corpus), build_fabric(device="cpu"))


def updates_of(folder):
    """All that updates said, by step; processes that did the same update must agree."""
    found = {}
    for line in (folder / "updates.jsonl").read_text().splitlines():
        step, said = json.loads(line)
        assert found.setdefault(step, said) == said, f"step {step} was another one the second time"
    return found


def write_random(seed, sizes, tick):
    """What puts random files into a folder; ``tick`` is called between pieces of them."""

    def write(folder):
        generator = random.Random(seed)
        for number, size in enumerate(sizes):
            with (folder / f"file{number}.bin").open("wb", buffering=0) as file:
                for _ in range(4):
                    file.write(generator.randbytes(size // 4))
                    tick()

    return write


def save_for_ever(pipe, folder, sizes):
    """Checkpoints of random content one after the other, until somebody kills this; says how long the first took."""
    found = checkpoint.newest(folder, STEP, str)
    first = 1 if found is None else found.step + 1
    started = time.perf_counter()
    for step in itertools.count(first):
        checkpoint.save(folder, STEP, step, {"seed": step}, write_random(step, sizes, lambda: None))
        checkpoint.prune(folder, STEP, 2)
        if step == first:
            pipe.send(time.perf_counter() - started)


def save_and_die(pipe, folder, step, sizes, moment, loses_power):
    """Save and prune once, and die right before operation number ``moment``: an opening, a piece of a file written, a
    flush, a rename, a removal.

    With ``loses_power`` all that was not flushed is gone as well: the content of files, and renames in the folder.
    """
    count = 0
    flushed, renamed = set(), []
    old = set(folder.glob("*/*"))

    def die():
        if loses_power:
            for path in folder.glob("*/*"):
                if path not in old and path.stat().st_ino not in flushed:
                    os.truncate(path, 0)
            for before, after in reversed(renamed):
                if after.exists():
                    rename(after, before)
        os.kill(os.getpid(), signal.SIGKILL)

    def tick():
        nonlocal count
        count += 1
        if count == moment:
            # Not counted themselves.
            count = sys.maxsize // 2
            die()

    def audit(event, args):
        # Those of a removal name no folder: they are relative to one that is open.
        is_ours = event in ("open", "os.mkdir", "os.rename", "shutil.rmtree") and str(folder) in str(args[0])
        if is_ours or event in ("os.remove", "os.rmdir"):
            tick()

    fsync, rename, write_text = os.fsync, Path.rename, Path.write_text

    def flush(handle):
        tick()
        fsync(handle)
        found = os.fstat(handle)
        flushed.add(found.st_ino)
        if found.st_ino == folder.stat().st_ino:
            renamed.clear()

    def rename_and_note(self, target):
        found = rename(self, target)
        renamed.append((Path(self), Path(target)))
        return found

    def write_in_halves(self, text, **options):
        write_text(self, text[: len(text) // 2], **options)
        tick()
        return write_text(self, text, **options)

    os.fsync, Path.rename, Path.write_text = flush, rename_and_note, write_in_halves
    sys.addaudithook(audit)
    checkpoint.save(folder, STEP, step, {"seed": step}, write_random(step, sizes, tick))
    checkpoint.prune(folder, STEP, 1)
    pipe.send(count)


def save_under_limit(pipe, folder, limit, values, corpus):
    """A checkpoint of a real model where no file may grow beyond a limit; says which error came."""
    import resource

    torch.set_num_threads(1)
    trainer = make_trainer(from_mapping(RunConfig, values), folder, store.load(corpus), Trainer)
    take_steps(trainer, 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        trainer.save(must=True)
    except Exception as error:
        pipe.send((type(error).__name__, getattr(error, "errno", None), str(error)))
    else:
        pipe.send(None)


def hold_lock(pipe, folder):
    """Hold the lock of a run folder until killed."""
    from mgk.training.lock import RunLock

    with RunLock(folder):
        pipe.send(os.getpid())
        time.sleep(600)


def checkpoints_of(folder):
    """Names of what stands in the folder of the checkpoints of a run."""
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())
