"""Checkpoints that are written atomically and verified when they are read.

A checkpoint is a folder::

    step-00001500/  manifest.json  config.json  modeling_mgk.py
                    model.safetensors  optimizer.safetensors  random.safetensors

It is written under a temporary name, every file and the folder are flushed to the disk, and then it is renamed. A
process that dies at any moment leaves the old checkpoints and perhaps a stray ``.writing-*``, which the next run
removes. The manifest has the SHA-256 of every file, so damage is found before a checkpoint is used. No file is a
pickle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk.data.store import checksum
from mgk.training.errors import CheckpointError, CheckpointWriteError

FORMAT = 1
MANIFEST = "manifest.json"
WRITING, REMOVING = ".writing-", ".removing-"

Write = Callable[[Path], None]
"""A function that writes files into a folder."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, whose files have been verified."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def save(folder: Path, kind: str, step: int, content: Mapping[str, Any], write: Write) -> Checkpoint:
    """Write the checkpoint ``folder/kind-step``. An identical one is kept, and a different one is replaced.

    Args:
        folder: folder of the checkpoints.
        kind: prefix of its name.
        step: step of the checkpoint.
        content: content of the manifest.
        write: writes the files into a folder.
    """
    target = place(folder, kind, step)
    temporary = folder / f"{WRITING}{target.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with _typed_errors(folder, temporary):
            write(temporary)
            files = {path.name: _describe(path) for path in sorted(temporary.iterdir())}
            manifest = {"format": FORMAT, "step": step, **content, "files": files}
            (temporary / MANIFEST).write_text(_with_checksum(manifest), encoding="utf-8")
            for path in temporary.iterdir():
                _flush(path)
            _flush(temporary)
            # An identical checkpoint is kept, because between removing and renaming there would be none.
            with contextlib.suppress(CheckpointError):
                found = read(target)
                if found.manifest["files"] == files:
                    shutil.rmtree(temporary)
                    return found
            remove(target)
            temporary.rename(target)
            _flush(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointWriteError):
            raise
        raise CheckpointWriteError(error.errno, f"{folder} must be writable, got {error}") from error
    return Checkpoint(target, manifest)


def read(folder: Path) -> Checkpoint:
    """Read the checkpoint in a folder, and verify every byte of it."""
    manifest = _manifest(folder)
    with _typed_damage(folder):
        for name, expected in manifest["files"].items():
            found = _describe(folder / name)
            if found != expected:
                raise CheckpointError(
                    f"{folder / name} must have {expected['bytes']} bytes with SHA-256 {expected['sha256'][:12]}..., "
                    f"got {found['bytes']} with {found['sha256'][:12]}..."
                )
    return Checkpoint(folder, manifest)


def _manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and verify its checksum."""
    with _typed_damage(folder):
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest: dict[str, Any] = json.loads(text)["content"]
        # The text is compared, not the parsed content: 1e-05 and 1E-05 are one number, but differ in a bit.
        if _with_checksum(manifest) != text:
            raise CheckpointError(f"{folder / MANIFEST} must have the checksum that it names, got another")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder} must have format {FORMAT}, got {manifest['format']}")
        named = re.search(r"-(\d{8,})$", folder.name)
        if named is not None and int(named[1]) != manifest["step"]:
            raise CheckpointError(f"{folder} must hold step {int(named[1])}, got {manifest['step']}")
        return manifest


@contextlib.contextmanager
def _typed_damage(folder: Path) -> Iterator[None]:
    """Convert every error that reading a damaged checkpoint can raise to :class:`CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder} must be a whole checkpoint, got {type(error).__name__}: {error}") from error


def place(folder: Path, kind: str, step: int) -> Path:
    """Path of the checkpoint of a step, which need not exist."""
    return folder / f"{kind}-{step:08d}"


def step_of(path: Path) -> int:
    """Step in the name of a checkpoint."""
    return int(path.name.rsplit("-", 1)[1])


def candidates(folder: Path, kind: str) -> list[Path]:
    """Paths of all checkpoints of a kind, not verified, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(rf"{re.escape(kind)}-\d{{8,}}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest(folder: Path, kind: str, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint; damaged ones are reported and skipped."""
    for path in candidates(folder, kind):
        try:
            return read(path)
        except CheckpointError as error:
            report(f"skipped the damaged checkpoint {path.name}: {error}")
    return None


def prune(folder: Path, kind: str, keep: int) -> list[Checkpoint]:
    """Remove all but the newest ``keep`` and the leftovers of dead processes. Return the undamaged remaining ones."""
    found = candidates(folder, kind)
    for path in found[keep:]:
        remove(path)
    clean(folder)
    kept = []
    for path in found[:keep]:
        with contextlib.suppress(CheckpointError):
            kept.append(Checkpoint(path, _manifest(path)))
    return kept


def clean(folder: Path) -> None:
    """Remove what a dead process was writing or removing. Call it only while holding the lock."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((WRITING, REMOVING)):
                shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no reader sees a part of it."""
    if path.exists():
        aside = path.with_name(f"{REMOVING}{path.name}-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _with_checksum(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest file, with its checksum."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "content": manifest}, sort_keys=True)


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def _flush(path: Path) -> None:
    """Flush a file to the disk, or the entries of a folder where the system supports it."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    # Windows flushes only files that are open for writing.
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot flush a folder.
        if not (is_folder and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _typed_errors(folder: Path, temporary: Path) -> Iterator[None]:
    """Convert errors of writing to :class:`CheckpointWriteError`, with the free space in the message."""
    try:
        yield
    except Exception as error:
        text = str(error)
        # safetensors wraps the error of the system into its own.
        wrapped = re.search(r"os error (\d+)", text)
        number = getattr(error, "errno", None) or (int(wrapped.group(1)) if wrapped is not None else 0)
        if number not in errno.errorcode:
            raise
        free = shutil.disk_usage(folder).free
        written = sum(path.stat().st_size for path in temporary.iterdir()) if temporary.is_dir() else 0
        raise CheckpointWriteError(
            number,
            f"{folder} must take a checkpoint, got {errno.errorcode[number]} after {written:,} bytes, "
            f"with {free:,} free: {text}",
        ) from error
