"""Counts the compiled versions of each kernel that a run of the tests asks for, and how few of them most cases use.

A plugin of pytest, for a GPU::

    MGK_TEST_DEVICE=cuda PYTHONPATH=tests pytest -p compiled_versions tests/ops/triton -n 15
"""

from __future__ import annotations

from collections import Counter

import pytest

from mgk.ops.triton import launch, replay

SUBJECT, BUSIEST = "attention_forward", 60
Versions = dict[str, list[str]]
"""Of each case, the kernels it starts, each with what it is compiled for."""

_versions: Versions = {}
_started: set[str] = set()


def pytest_sessionstart(session: pytest.Session) -> None:
    start = launch._start

    def note_and_start(kernel, programs, arguments, constants, kinds, tile):
        _started.add(f"{kernel.__name__} {constants} {tile[2:]} {kinds}")
        start(kernel, programs, arguments, constants, kinds, tile)

    launch._start = note_and_start


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    # A call that is replayed starts nothing that could be counted.
    replay._recordings.clear()
    _started.clear()
    yield
    _versions[item.nodeid] = sorted(_started)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under xdist a worker hands over what it has counted."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["versions"] = _versions


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    _versions.update(getattr(node, "workeroutput", {}).get("versions", {}))


def pytest_terminal_summary(terminalreporter) -> None:
    kernels = Counter(version.split(maxsplit=1)[0] for version in set().union(*_versions.values()))
    terminalreporter.write_sep("-", "compiled versions")
    for kernel, count in kernels.most_common():
        terminalreporter.write_line(f"{count:5} {kernel}")
    uses = {case: {each for each in found if each.startswith(SUBJECT)} for case, found in _versions.items()}
    uses = {case: found for case, found in uses.items() if found}
    busiest = {
        version for version, _ in Counter(each for found in uses.values() for each in found).most_common(BUSIEST)
    }
    served = sum(found <= busiest for found in uses.values())
    terminalreporter.write_line(f"{len(uses)} cases start {SUBJECT}, {served} of them none but its {BUSIEST} busiest")
