"""Settings that hold for every test."""

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DEVICE

# Two workers share two cores.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="only part I, from 0 on, of N: tests/on_gpu.py runs all at once")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parts by name, so that every process finds the same ones."""
    if (part := config.getoption("--part")) is None:
        return
    number, count = map(int, part.split("/"))
    if not 0 <= number < count:
        raise pytest.UsageError(f"--part must be I/N with 0 <= I < N, got {part}")
    mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(mine)])
    items[:] = mine


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Any]:
    """``mgk`` in this process, since torch takes seconds to import: what it printed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("MGK_DATA", raising=False)

    def run(*arguments: object, code: int = 0) -> Any:
        from mgk.cli import main

        monkeypatch.setattr("sys.argv", ["mgk", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert (stop.value.code or 0) == code, printed.err
        return printed

    return run


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20220717)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, so that reading any of it shows."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not torch.compiler.is_compiling():
            # Detached: a leaf that requires a gradient must not be changed in place.
            tensor.detach().fill_(float("nan"))
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: poison(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))
