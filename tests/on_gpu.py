"""The test suite on a GPU, by many processes at a time: most of its time goes into compiling kernels, on one core each.

    python tests/on_gpu.py                                     # all that compute
    python tests/on_gpu.py tests/ops/triton --processes 8 --seconds 500 --logs logs

Slow tests run as well. Needs pytest alone. Each process takes the tests of one part (``--part`` of pytest here); what
each printed is in ``--logs``. Whatever has not ended after ``--seconds`` is stopped, and the tests that are left are
counted, so that nobody takes a run that was cut for a whole one. The exit status is 1 where a test failed, 2 where some
were left.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USUAL = ("tests/ops", "tests/nn", "tests/models", "tests/training", "tests/evaluation", "tests/benchmark")
OUTCOMES = ("passed", "failed", "skipped", "error")
TOLD = re.compile(r"^(?:collecting ... )?collected (\d+) items(?: / (\d+) deselected)?")
DONE = re.compile(r" (PASSED|FAILED|SKIPPED|ERROR)\b")


def read(log: Path) -> tuple[int, Counter[str], list[str]]:
    """How many tests a part has, what became of them, and which failed."""
    count, outcomes, failed = 0, Counter[str](), []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if told := TOLD.match(line):
            count = int(told[1]) - int(told[2] or 0)
        elif line.startswith("tests/") and (done := DONE.search(line)):
            outcome = done[1].lower()
            outcomes[outcome] += 1
            if outcome in ("failed", "error"):
                failed.append(line.split(" ")[0])
    return count, outcomes, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help=f"default: {' '.join(USUAL)}")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) * 2 // 3))
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes print; default: a new one")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="mgk-tests-"))
    logs.mkdir(parents=True, exist_ok=True)
    end = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no"]
    environment = {**os.environ, "MGK_TEST_DEVICE": arguments.device, "PYTHONUNBUFFERED": "1"}
    running = []
    for number in range(arguments.processes):
        log = logs / f"part-{number}.txt"
        with log.open("wb") as file:
            part = [*command, "--part", f"{number}/{arguments.processes}", *(arguments.paths or USUAL)]
            process = subprocess.Popen(part, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        running.append((log, process))
    together, left, failed, broken = Counter[str](), 0, [], []
    for log, process in running:
        try:
            code = process.wait(None if end is None else max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        count, outcomes, names = read(log)
        together += outcomes
        failed += names
        left += count - sum(outcomes.values())
        # 5: none of the tests is in this part.
        if code not in (None, 0, 1, 5) or (code is None and count == 0):
            broken.append(log.name)
    print("".join(f"FAILED {name}\n" for name in sorted(failed)), end="")
    print("".join(f"{name} ended before its tests: see there\n" for name in broken), end="")
    counts = ", ".join(f"{together[outcome]:,} {outcome}" for outcome in OUTCOMES if together[outcome])
    print(f"{counts or 'no test'}, {left:,} left; logs in {logs}")
    return 1 if failed else 2 if left or broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
