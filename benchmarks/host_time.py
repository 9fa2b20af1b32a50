"""What the three defences against a slow host bring on this GPU: replayed calls, our own launch, and CUDA graphs.

To queue a call takes the host longer than a short sequence takes the kernels. A call is therefore written down and
replayed (``replay.py``), a kernel is started without asking Triton (``launch.py``), and training is recorded as a CUDA
graph. Here the same calls are made with all of it, without replays, without replays and with Triton's own launch,
compiled, and recorded as a graph; they take turns in one process, one call after the other as in a loop::

    python benchmarks/host_time.py --output results/bench/host-h200.json      # a few minutes
    python benchmarks/host_time.py --preset smgk --tokens 128
    python benchmarks/host_time.py --write results/bench/host-h200.json       # only the table of docs/kernels.md

A defence stays in the library while the calls for which it is meant take 5 % longer without it. A step of generation
is never replayed: with and without replays it is the same call, measured twice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mgk
from mgk.benchmark.inputs import Inputs, draw
from mgk.benchmark.page import write_between
from mgk.benchmark.result import versions
from mgk.benchmark.timing import Candidate, Clock, Effort, StreamClock, take_turns
from mgk.ops.triton import launch, replay

PRESETS = ("smgk", "mgk")
BATCH, HEADS, HEAD_DIM = 8, 4, 64
TOKENS, CACHE = (128, 256, 512), 1024
WORTH = 0.05
WORKS = ("training", "inference", "step")
REPLAYED = ("training", "inference")
TITLES = {
    "replay": "without replays",
    "launch": "and without our own launch",
    "CUDA graph": "eager instead of recorded as a CUDA graph",
}
PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
MARKERS = ("<!-- written by benchmarks/host_time.py -->", "<!-- end of what host_time.py wrote -->")
EAGER, NO_REPLAY, NO_LAUNCH, COMPILED, RECORDED = "eager", "without replay", "Triton's launch", "compiled", "CUDA graph"
WAYS = (EAGER, NO_REPLAY, NO_LAUNCH, COMPILED, RECORDED)
EFFORT = Effort(rounds=21, seconds=2.0)


class Case(NamedTuple):
    """What is called."""

    work: str
    """``"training"``: forward and backward; ``"inference"``: forward; ``"step"``: one query and a cache"""
    preset: str
    tokens: int
    """the length of the sequences, or of the cache"""


def cases(presets: Sequence[str], tokens: Sequence[int]) -> Iterator[Case]:
    for preset in presets:
        for work in ("training", "inference"):
            yield from (Case(work, preset, length) for length in tokens)
        yield Case("step", preset, CACHE)


@contextmanager
def without_replay() -> Iterator[None]:
    """Calls are thought through each time."""
    is_possible = replay.is_possible
    vars(replay)["is_possible"] = lambda device: False
    try:
        yield
    finally:
        vars(replay)["is_possible"] = is_possible


@contextmanager
def without_own_launch() -> Iterator[None]:
    """And Triton looks at every argument, as it does with a version that we have not seen."""
    is_known = launch.IS_KNOWN
    vars(launch)["IS_KNOWN"] = False
    try:
        with without_replay():
            yield
    finally:
        vars(launch)["IS_KNOWN"] = is_known


CONTEXTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    NO_REPLAY: without_replay,
    NO_LAUNCH: without_own_launch,
}


def call_of(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """One call after the other of ``case``, on the same tensors."""
    inputs = draw(
        case.preset, batch=BATCH, heads=HEADS, tokens=case.tokens, head_dim=HEAD_DIM, is_causal=False, dtype=dtype,
        queries=1 if case.work == "step" else None, device=device, needs_gradients=case.work == "training",
    )  # fmt: skip
    if case.work != "training":

        @torch.no_grad()
        def infer() -> object:
            return attend(inputs)

        return infer
    leaves = list(inputs.leaves().values())
    grad = torch.randn_like(attend(inputs))
    return lambda: torch.autograd.grad(attend(inputs), leaves, grad, allow_unused=True)


def attend(inputs: Inputs) -> torch.Tensor:
    return mgk.mixture_attention(
        inputs.query, inputs.key, inputs.value, shift=inputs.shift, log_prior=inputs.log_prior,
        similarity=inputs.similarity, assignment=inputs.assignment, is_causal=inputs.is_causal, backend="triton",
    )  # fmt: skip


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def candidates(call: Callable[[], object], ways: Sequence[str]) -> list[Candidate]:
    """``call`` in every way, each called before, so that nothing is compiled or written down later."""
    made = {COMPILED: lambda: torch.compile(call), RECORDED: lambda: recorded(call)}
    found = []
    for way in ways:
        context: Any = CONTEXTS.get(way, nullcontext)
        own = made[way]() if way in made else call
        with context():
            for _ in range(3):
                own()
        found.append(Candidate(name=way, call=own, context=context))
    return found


def measure(case: Case, ways: Sequence[str], device: torch.device, clock: Clock, effort: Effort) -> dict[str, Any]:
    """What a call takes in every way, in microseconds from one to the next."""
    timings = take_turns(candidates(call_of(case, device), ways), clock, effort)
    return {**case._asdict(), "us": {way: 1e3 * timings[way].device_ms for way in ways}}


def gains(row: dict[str, Any]) -> dict[str, float]:
    """By what fraction a call takes longer without each of the defences that were measured."""
    times = row["us"]
    without = {"replay": (NO_REPLAY, EAGER), "launch": (NO_LAUNCH, NO_REPLAY), "CUDA graph": (EAGER, RECORDED)}
    if row["work"] not in REPLAYED:
        del without["replay"]
    return {
        defence: times[slow] / times[fast] - 1
        for defence, (slow, fast) in without.items()
        if slow in times and fast in times
    }


def table(rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> str:
    """Microseconds of every way, then what the defences bring, the largest gain of any case last."""
    lines = [f"{'':30}" + "".join(f"{way:>17}" for way in ways)]
    best: dict[str, float] = {}
    for row in rows:
        name = f"{row['preset']}, {row['work']}, {row['tokens']} tokens"
        lines.append(f"{name:30}" + "".join(f"{row['us'][way]:14.0f} us" for way in ways))
        for defence, gain in gains(row).items():
            best[defence] = max(gain, best.get(defence, gain))
    for defence, gain in best.items():
        verdict = "stays" if gain >= WORTH else f"brings less than {WORTH:.0%}"
        lines.append(f"{defence}: at most {gain:+.1%}, {verdict}")
    return "\n".join(lines)


def page_table(result: dict[str, Any]) -> str:
    """What the docs say of a result: how many times as long calls take without each defence, and what follows."""
    rows, versions = result["rows"], result["versions"]
    presets = " and ".join(dict.fromkeys(f"`{row['preset']}`" for row in rows))
    lengths = ", ".join(dict.fromkeys(str(row["tokens"]) for row in rows if row["work"] in REPLAYED))
    twice = [row["us"][NO_REPLAY] / row["us"][EAGER] - 1 for row in rows if row["work"] not in REPLAYED]
    lines = [
        f"{result['device']}, torch {versions['torch']}, triton {versions['triton']}. From the least to the largest of "
        f"{presets}, sequences of {lengths} tokens, a step with {CACHE:,} in the cache; bf16, batch {BATCH}, {HEADS} "
        f"heads of {HEAD_DIM}.",
        "",
        "| | training | inference | a step of generation | decision |",
        "|---|---|---|---|---|",
        f"| eager, replayed where it can be | {' | '.join(eager_times(rows))} | |",
    ]
    for defence, title in TITLES.items():
        decision = "it stays" if max(longer(rows, defence)) >= WORTH else "it goes"
        cells = [
            span([f"{1 + each:.2f}x" for each in sorted(longer(of_work(rows, work), defence))]) or "is not replayed"
            for work in WORKS
        ]
        lines.append(f"| {title} | {' | '.join(cells)} | {decision} |")
    compiled = [
        span([f"{each:.2f}x" for each in sorted(row["us"][COMPILED] / row["us"][EAGER] for row in of_work(rows, work))])
        for work in WORKS
    ]
    lines += [
        f"| compiled instead of eager | {' | '.join(compiled)} | |",
        "",
        "A step was measured with and without the replays that it does not have, so the same call was measured twice: "
        f"{max(map(abs, twice)):.0%} apart at most.".replace("%", " %"),
    ]
    return "\n".join(lines)


def of_work(rows: Sequence[dict[str, Any]], work: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["work"] == work]


def eager_times(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of every kind of work, the least and the largest."""
    times = [sorted(row["us"][EAGER] for row in of_work(rows, work)) for work in WORKS]
    return [f"{span([f'{each:,.0f}' for each in own])} µs" for own in times]


def longer(rows: Sequence[dict[str, Any]], defence: str) -> list[float]:
    """What a defence brings, of the rows that have it."""
    return [found[defence] for found in map(gains, rows) if defence in found]


def span(texts: Sequence[str]) -> str:
    """From the first to the last; nothing of nothing."""
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) if texts else ""


def write_page(result: dict[str, Any], page: Path = PAGE) -> None:
    write_between(page, *MARKERS, page_table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=PRESETS, help="again for more; default: all")
    parser.add_argument("--tokens", type=int, action="append", help="again for more; default: 128, 256, 512")
    parser.add_argument("--way", action="append", choices=WAYS, help="again for more; default: all")
    parser.add_argument("--output", type=Path, help="write the times there as JSON")
    parser.add_argument("--write", type=Path, metavar="JSON", help=f"only make the table of {PAGE.name} of this result")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write_page(json.loads(arguments.write.read_text(encoding="utf-8")))
        return
    if not torch.cuda.is_available():
        parser.error("a GPU is expected, got a machine without one")
    device, ways = torch.device("cuda", torch.cuda.current_device()), arguments.way or WAYS
    clock, rows = StreamClock(device, isolated=False, calls=20), []
    for case in cases(arguments.preset or PRESETS, arguments.tokens or TOKENS):
        rows.append(measure(case, ways, device, clock, EFFORT))
        print(table(rows[-1:], ways), flush=True)
    print("\n" + table(rows, ways))
    if arguments.output is not None:
        written = {"device": torch.cuda.get_device_name(device), "versions": versions(), "rows": rows}
        arguments.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
