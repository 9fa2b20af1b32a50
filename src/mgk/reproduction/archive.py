"""Archives with the results of many runs, for transfer between machines. Names are those in the folder of results.

Neither names nor content of an archive are trusted: nothing is written outside of a temporary folder, and every file
must be a result or belong to one.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from mgk.reproduction.results import ANALYSIS, CURVES, EVALUATIONS, run_name
from mgk.training import result

ROOT = "results"
MODES = {".tar.xz": "xz", ".tar.gz": "gz", ".tgz": "gz", ".tar": ""}
"""Compression by the suffix of the file."""

BYTES_PER_SECOND = 5e6
"""Lowest speed of packing, from which a sweep estimates the time that it must leave for it."""

_PARTS = (CURVES, EVALUATIONS, ANALYSIS)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]*")


def is_archive(path: Path) -> bool:
    """Whether a file has the suffix of an archive."""
    return path.name.endswith(tuple(MODES))


def check(path: Path) -> None:
    """Raise an error for an archive that could not be written or extended, before there is anything to pack."""
    check_name(path)
    if path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            _extract(path, Path(folder))


def check_name(path: Path) -> None:
    """Raise an error for a name without the suffix of an archive."""
    if not is_archive(path):
        raise ValueError(f"--archive must end in {', '.join(MODES)}, got {path}")
    if path.is_dir():
        raise ValueError(f"--archive must be a file, got the folder {path}")


def pack(path: Path, files: Mapping[PurePosixPath, Path]) -> None:
    """Write an archive atomically. Other runs in an earlier archive of this name are kept.

    Args:
        path: path of the archive.
        files: files by their names below the folder of results.
    """
    check_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        earlier = _extract(path, Path(folder)) if path.is_file() else {}
        try:
            with _open_new(temporary, _mode(path)) as archive:
                for name, source in sorted({**earlier, **files}.items()):
                    archive.add(source, str(PurePosixPath(ROOT, name)), recursive=False, filter=_plain)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """Context with the content of an archive, after checking all of it, in a temporary folder of results."""
    with tempfile.TemporaryDirectory() as folder:
        files = _extract(path, Path(folder))
        _check_owners(path, files, _check_results(path, files))
        yield Path(folder) / ROOT


def _mode(path: Path) -> str:
    return next(mode for end, mode in MODES.items() if path.name.endswith(end))


def _open_new(path: Path, mode: str) -> tarfile.TarFile:
    if mode == "xz":
        # Most of the content is pictures, which a higher compression level would not make smaller.
        return tarfile.open(path, "w:xz", preset=1)
    return tarfile.open(path, "w:gz") if mode == "gz" else tarfile.open(path, "w")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the user and other traces of the machine from a member."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode, member.mtime = 0o644, int(member.mtime)
    return member


def _extract(path: Path, folder: Path) -> dict[PurePosixPath, Path]:
    """Extract an archive into a folder, and return the files by their names below the results."""
    try:
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            for member in members:
                _check_member(member, path)
            archive.extractall(folder, members, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        # For a file of another kind the message has a line for every kind of compression.
        what = f"{error}".partition("\n")[0].removesuffix(":")
        raise ValueError(
            f"{path} must be an archive of mgk sweep --archive, got one that cannot be read: {what}"
        ) from error
    names = sorted(PurePosixPath(member.name) for member in members if member.isfile())
    return {name.relative_to(ROOT): folder / name for name in names}


def _check_member(member: tarfile.TarInfo, path: Path) -> None:
    parts = PurePosixPath(member.name).parts
    is_below = parts[:1] == (ROOT,) and all(_NAME.fullmatch(part) for part in parts)
    if not is_below or not (member.isdir() or (member.isfile() and len(parts) >= 3)):
        raise ValueError(f"{path} must hold plain files below {ROOT}/ only, got {member.name!r}")
    if member.isfile() and not member.name.endswith((".json", ".jsonl", ".png")):
        raise ValueError(f"{path} must hold JSON and pictures only, got {member.name!r}")


def _check_results(path: Path, files: Mapping[PurePosixPath, Path]) -> dict[PurePosixPath, str]:
    """Return the results of runs with the names of the runs, after checking that each is in its place."""
    runs = {}
    for name in files:
        if name.parts[0] in _PARTS:
            continue
        found = result.read(files[name])
        own = PurePosixPath(str(found["recipe"]), f"{found['row']}-seed-{found['seed']}.json")
        if own != name:
            raise ValueError(f"{path} must have each result under its own name, got that of {own} as {name}")
        runs[name] = run_name(found["recipe"], found["row"], found["seed"])
    return runs


def _check_owners(path: Path, files: Iterable[PurePosixPath], runs: Mapping[PurePosixPath, str]) -> None:
    """Check that every other file belongs to a result in the archive."""
    owners = set(runs.values())
    for name in files:
        if name.parts[0] not in _PARTS:
            continue
        kind, own = name.parts[0], name.parts[1]
        if kind == EVALUATIONS:
            own = own.rpartition("-")[0]
        elif kind == CURVES:
            own = own.removesuffix(".jsonl")
        if own not in owners:
            raise ValueError(f"{path} must hold the result of every run that it has files of, got {name} without")
