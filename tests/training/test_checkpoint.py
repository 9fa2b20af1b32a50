"""Checkpoints under fire: killed, without power, on full and broken disks, damaged. They are whole or not there."""

import errno
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from training_cases import (
    Lines,
    checkpoints_of,
    exit_code,
    files_of,
    hear,
    make_config,
    make_trainer,
    make_values,
    process,
    save_and_die,
    save_for_ever,
    save_under_limit,
    take_steps,
    write_random,
)

from mgk.training import CheckpointError, CheckpointWriteError, checkpoint
from mgk.training.checkpoint import MANIFEST, REMOVING, WRITING
from mgk.training.loop import CHECKPOINTS, STEP

SIZES = (4096, 64, 20_000)


def save(folder, step, sizes=SIZES):
    return checkpoint.save(folder, STEP, step, {"seed": step, "share": 0.1}, write_random(step, sizes, lambda: None))


def check_whole(folder, sizes):
    """The newest checkpoint, whose every byte is what was written; nothing visible is damaged."""
    complaints = []
    found = checkpoint.newest(folder, STEP, complaints.append)
    assert complaints == []
    if found is not None:
        generator = random.Random(found.manifest["seed"])
        for number, size in enumerate(sizes):
            expected = b"".join(generator.randbytes(size // 4) for _ in range(4))
            assert (found.folder / f"file{number}.bin").read_bytes() == expected
    return found


def strays(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith((WRITING, REMOVING))]


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path, kills):
    generator = random.Random(kills)
    sizes = (1 << 20, 4096, 300_000)
    last, has_stray = 0, 0
    for _ in range(kills):
        with process(save_for_ever, tmp_path, sizes) as (child, pipe):
            time.sleep(generator.uniform(0, 3) * hear(pipe))
            child.kill()
            assert exit_code(child) == -9
        found = check_whole(tmp_path, sizes)
        assert found.step > last
        last = found.step
        has_stray += bool(strays(tmp_path))
        checkpoint.clean(tmp_path)
        assert not strays(tmp_path)
        assert len(checkpoint.candidates(tmp_path, STEP)) <= 3
    assert has_stray > 0


@pytest.mark.parametrize("loses_power", [False, True])
def test_death_before_every_single_operation(tmp_path, loses_power):
    """Also before the first, and after the last: then nothing has happened, or all."""
    sizes, dead, seen = (64, 40), True, set()
    moment = 0
    while dead:
        moment += 1
        folder = tmp_path / str(moment)
        for step in (1, 2):
            save(folder, step, sizes)
        with process(save_and_die, folder, 3, sizes, moment, loses_power) as (child, pipe):
            dead = exit_code(child) == -9
            if not dead:
                assert child.exitcode == 0
                assert pipe.recv() == moment - 1
        found = check_whole(folder, sizes)
        assert found.step in (2, 3)
        names = {path.name for path in folder.iterdir()}
        seen.add((found.step, any(WRITING in name for name in names), any(REMOVING in name for name in names)))
        checkpoint.clean(folder)
        assert not strays(folder)
        # The next process can do it again.
        save(folder, 3, sizes)
        checkpoint.prune(folder, STEP, 1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        check_whole(folder, sizes)
    assert moment > 30
    # Before anything, while it is written, done, and while the old one goes: that comes back where power is lost.
    assert seen >= {(2, False, False), (2, True, False), (3, False, False), (3, False, not loses_power)}


def test_a_whole_one_is_kept_and_a_damaged_one_replaced(tmp_path):
    save(tmp_path, 1)
    before = (tmp_path / "step-00000001").stat().st_ino
    assert save(tmp_path, 1).step == 1
    assert (tmp_path / "step-00000001").stat().st_ino == before
    (tmp_path / "step-00000001" / "file1.bin").write_bytes(b"")
    save(tmp_path, 1)
    check_whole(tmp_path, SIZES)
    assert (tmp_path / "step-00000001").stat().st_ino != before


class Unwritable:
    """Makes one kind of operation fail from a certain time on."""

    def __init__(self, monkeypatch, number, operation, count=1):
        self.calls = 0
        owner, name = {
            "fsync": (os, "fsync"), "rename": (Path, "rename"), "write_text": (Path, "write_text"),
            "mkdir": (Path, "mkdir"),
        }[operation]  # fmt: skip
        real = getattr(owner, name)

        def fail(*args, **options):
            self.calls += 1
            if self.calls >= count:
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("operation", ["fsync", "rename", "write_text"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failing_disk_is_named_and_harms_nothing(tmp_path, monkeypatch, operation, number):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        Unwritable(patch, number, operation)
        with pytest.raises(CheckpointWriteError, match=errno.errorcode[number]) as caught:
            save(tmp_path, 2)
    assert caught.value.errno == number
    assert re.search(r"after (24,\d\d\d|25,\d\d\d) bytes, with [\d,]+ free", str(caught.value))
    assert check_whole(tmp_path, SIZES).step == 1
    assert not strays(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_nothing(tmp_path, monkeypatch, number):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        Unwritable(patch, number, "mkdir", count=2)
        with pytest.raises(CheckpointWriteError, match=f"must be writable, got .*{os.strerror(number)}") as caught:
            save(tmp_path, 2)
    assert caught.value.errno == number
    assert check_whole(tmp_path, SIZES).step == 1


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path):
    def write(folder):
        raise KeyError("not a matter of the disk")

    with pytest.raises(KeyError, match="not a matter of the disk"):
        checkpoint.save(tmp_path, STEP, 1, {}, write)
    assert checkpoint.newest(tmp_path, STEP, str) is None


@pytest.mark.parametrize("limit", [4000, 9000, 20_000])
def test_no_room_for_a_file(tmp_path, corpus, limit):
    """The system itself refuses to write on, in the middle of the weights or of the moments."""
    with process(save_under_limit, tmp_path, limit, make_values(), corpus.folder) as (child, pipe):
        kind, number, text = hear(pipe)
        assert exit_code(child) == 0
    assert kind == "CheckpointWriteError"
    assert number == errno.EFBIG
    assert re.search(r"must take a checkpoint, got EFBIG after [\d,]+ bytes, with [\d,]+ free", text)
    assert checkpoints_of(tmp_path) == []


def test_a_run_goes_on_without_a_checkpoint_but_not_without_the_last(tmp_path, corpus, monkeypatch):
    lines = Lines()
    config = make_config(training={"steps": 6, "checkpoint_every": 2}, validation={"every": 100})
    trainer = make_trainer(config, tmp_path, corpus, display=lines.display)
    steps = trainer.steps()
    assert [next(steps) for _ in range(3)] == [1, 2, 3]
    assert checkpoints_of(tmp_path) == ["step-00000002"]
    before = files_of(tmp_path / CHECKPOINTS / "step-00000002")
    with monkeypatch.context() as patch:
        Unwritable(patch, errno.ENOSPC, "fsync")
        assert [next(steps), next(steps)] == [4, 5]
    assert [line for line in lines.said if "no checkpoint at step 4" in line and "ENOSPC" in line]
    assert checkpoints_of(tmp_path) == ["step-00000002"]
    assert files_of(tmp_path / CHECKPOINTS / "step-00000002") == before
    with monkeypatch.context() as patch:
        Unwritable(patch, errno.ENOSPC, "fsync")
        assert next(steps) == 6
        with pytest.raises(CheckpointWriteError, match="ENOSPC"):
            next(steps)
    assert "step-00000002" in checkpoints_of(tmp_path)


def test_an_old_checkpoint_that_cannot_be_removed_stops_nothing(tmp_path, corpus, monkeypatch):
    lines = Lines()
    config = make_config(training={"steps": 8, "checkpoint_every": 1, "keep_checkpoints": 1}, validation={"every": 100})
    trainer = make_trainer(config, tmp_path, corpus, display=lines.display)
    steps = trainer.steps()
    assert [next(steps) for _ in range(2)] == [1, 2]
    with monkeypatch.context() as patch:
        # The first rename is that of the new one.
        Unwritable(patch, errno.EIO, "rename", count=2)
        assert next(steps) == 3
    assert checkpoints_of(tmp_path) == ["step-00000001", "step-00000002"]
    assert "an old checkpoint could not be removed: [Errno 5] Input/output error" in lines.said
    assert next(steps) == 4
    assert checkpoints_of(tmp_path) == ["step-00000003"]


def test_every_truncation_is_found(tmp_path):
    found = save(tmp_path, 1)
    for path in found.folder.iterdir():
        content = path.read_bytes()
        for part in range(64):
            path.write_bytes(content[: len(content) * part // 64])
            with pytest.raises(CheckpointError, match=re.escape(str(found.folder))):
                checkpoint.read(found.folder)
        path.write_bytes(content + b"\0")
        with pytest.raises(CheckpointError):
            checkpoint.read(found.folder)
        path.write_bytes(content)
        assert checkpoint.read(found.folder) == found


@pytest.mark.parametrize("flips", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(tmp_path, corpus, flips):
    """In every file of a real checkpoint."""
    trainer = make_trainer(make_config(), tmp_path, corpus)
    take_steps(trainer, 2)
    trainer.save(must=True)
    (folder,) = checkpoint.candidates(tmp_path / CHECKPOINTS, STEP)
    generator = random.Random(flips)
    paths = sorted(folder.iterdir())
    assert len(paths) == 6
    for path in paths:
        content = bytearray(path.read_bytes())
        for _ in range(flips // len(paths)):
            place, bit = generator.randrange(len(content)), 1 << generator.randrange(8)
            content[place] ^= bit
            path.write_bytes(content)
            with pytest.raises(CheckpointError):
                checkpoint.read(folder)
            content[place] ^= bit
        path.write_bytes(content)
    assert checkpoint.read(folder).step == 2


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_a_manifest(tmp_path, stride):
    """Each of them, since some say the same in another way: 1e-05 and 1E-05 are one number."""
    content = {"seconds": 12.345678901234567, "eps": 1e-05, "metrics": {"loss": float("nan"), "lr": -0.0}, "text": "ä"}
    found = checkpoint.save(tmp_path, STEP, 1, content, write_random(1, (4,), lambda: None))
    path = found.folder / MANIFEST
    text = path.read_bytes()
    interesting = {text.index(b"1e-05") + 1, text.index(b"12.34") + 17, text.index(b"NaN")}
    for place in sorted({*range(0, len(text), stride), *interesting}):
        for bit in range(8):
            changed = bytearray(text)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(CheckpointError):
                checkpoint.read(found.folder)
    path.write_bytes(text)
    assert repr(checkpoint.read(found.folder).manifest["metrics"]) == repr(found.manifest["metrics"])


def test_swapped_and_missing_files_are_found(tmp_path):
    one, other = save(tmp_path, 1).folder, save(tmp_path, 2).folder

    def swap(first, second):
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)

    pairs = [(one / "file0.bin", one / "file2.bin")] + [
        (one / name, other / name) for name in ("file0.bin", "file1.bin", MANIFEST)
    ]
    for first, second in pairs:
        swap(first, second)
        with pytest.raises(CheckpointError):
            checkpoint.read(one)
        swap(first, second)
    for path in sorted(one.iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=f"got FileNotFoundError.*{re.escape(path.name)}"):
            checkpoint.read(one)
        path.write_bytes(content)
    assert checkpoint.read(one).step == 1
    # Under the name of another step it would be taken for that one, and kept when that one is to be written.
    shutil.rmtree(other)
    one.rename(other)
    with pytest.raises(CheckpointError, match="step-00000002 must hold step 2, got 1"):
        checkpoint.read(other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"text"',
        "{}",
        '{"content": 3, "sha256": "x"}',
        '{"content": {}, "sha256": null}',
        "[" * 9999,
    ],
)
def test_strange_manifests(tmp_path, text):
    folder = save(tmp_path, 1).folder
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError):
        checkpoint.read(folder)


def test_another_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 7)
    folder = save(tmp_path, 1).folder
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"must have format 1, got 7"):
        checkpoint.read(folder)


def test_the_newest_whole_one_is_found_and_damaged_ones_named(tmp_path):
    for step in (1, 9, 20, 100_000_000):
        save(tmp_path, step)
    assert checkpoint.newest(tmp_path, STEP, pytest.fail).step == 100_000_000
    (tmp_path / "step-100000000" / MANIFEST).unlink()
    (tmp_path / "step-00000020" / "file0.bin").write_bytes(b"x")
    said = []
    assert checkpoint.newest(tmp_path, STEP, said.append).step == 9
    assert [re.search(r"damaged checkpoint (\S+):", line)[1] for line in said] == ["step-100000000", "step-00000020"]
    assert "file0.bin must have 4096 bytes" in said[1]
    assert checkpoint.newest(tmp_path, "best", pytest.fail) is None
    assert checkpoint.newest(tmp_path / "none", STEP, pytest.fail) is None


def test_a_run_falls_back_to_the_one_before(tmp_path, corpus):
    config = make_config(training={"steps": 9, "checkpoint_every": 3}, validation={"every": 100})
    take_steps(make_trainer(config, tmp_path, corpus), 7)
    path = tmp_path / CHECKPOINTS / "step-00000006" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    lines = Lines()
    trainer = make_trainer(config, tmp_path, corpus, display=lines.display)
    assert trainer.state.step == 3
    assert "skipped the damaged checkpoint step-00000006" in lines.said[0]
    assert lines.said[1] == "going on from step-00000003"
    take_steps(trainer, 9)
    # The damaged one has been written anew.
    assert checkpoint.read(path.parent).step == 6


def test_strays_are_nobodys_checkpoint(tmp_path):
    save(tmp_path, 1)
    for name in (f"{WRITING}step-00000009-77", f"{REMOVING}step-00000008-77"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / "step-00000007").write_text("a file, not a folder")
    (tmp_path / "notes").mkdir()
    assert [path.name for path in checkpoint.candidates(tmp_path, STEP)] == ["step-00000007", "step-00000001"]
    assert checkpoint.newest(tmp_path, STEP, lambda _: None).step == 1
    checkpoint.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000001", "step-00000007"]
    checkpoint.clean(tmp_path / "none")


def test_a_manifest_reads_as_json(tmp_path):
    found = save(tmp_path, 5)
    assert json.loads((found.folder / MANIFEST).read_text())["content"]["step"] == 5
    assert found.manifest["files"].keys() == {"file0.bin", "file1.bin", "file2.bin"}
