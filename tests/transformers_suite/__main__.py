"""The tests that transformers runs on its own models, run on ours.

    python tests/transformers_suite CHECKOUT [--preset smgk] [--model decoder]

CHECKOUT is a checkout of transformers near the installed version, of which only the folder ``tests`` is used: the
models run on the transformers that is installed. Nothing is fetched. The exit status is 1 where a test fails that
``not_applicable.py`` does not name, and where one that it names does not fail, or fails with another error.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from not_applicable import entry_for

HERE = Path(__file__).resolve().parent
PRESETS = ("softmax", "smgk", "mgk", "mlk")
MODELS = ("decoder", "encoder", "seq2seq")


class Outcomes:
    """A plugin of pytest that keeps what became of every test: one that some models skip counts as skipped."""

    def __init__(self) -> None:
        self.of_test: dict[tuple[str, str], str] = {}
        self.reasons: dict[tuple[str, str], str] = {}
        self.broken: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if (report.when != "call" and report.passed) or report.outcome == "rerun":
            return
        *_, group, test = report.nodeid.split("::")
        key = group, test
        worst = max(self.of_test.get(key, "passed"), report.outcome, key=["passed", "skipped", "failed"].index)
        if worst != self.of_test.get(key):
            self.of_test[key] = worst
            self.reasons[key] = _reason(report)


def _reason(report: Any) -> str:
    """The first line of what went wrong, or why a test was skipped."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        return "a pipeline of a task that this model is not for" if "pipeline_model_mapping" in reason else reason
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message).strip().splitlines()[0]


def summary(outcomes: Outcomes) -> tuple[str, bool]:
    """What to print, and whether all is as ``not_applicable.py`` says."""
    counts: dict[str, Counter[str]] = {}
    lines: dict[str, Counter[str]] = {"not applicable": Counter(), "skipped by transformers": Counter()}
    unexpected: list[str] = []
    for (group, test), outcome in sorted(outcomes.of_test.items()):
        entry = entry_for(test, *group.split("_", 1))
        detail = outcomes.reasons[group, test]
        if entry is not None and outcome == "failed" and any(message in detail for message in entry.messages):
            outcome = "not applicable"
            lines[outcome][f"{test}: {entry.reason}"] += 1
        elif entry is not None and outcome != "failed":
            outcome = "stale"
            unexpected.append(f"STALE {group} {test}: named in not_applicable.py, and {outcomes.of_test[group, test]}")
        elif outcome == "failed":
            unexpected.append(f"FAILED {group} {test}: {detail}")
        elif outcome == "skipped":
            lines["skipped by transformers"][detail] += 1
        counts.setdefault(group, Counter())[outcome] += 1
    unexpected += [f"NOT COLLECTED {what}" for what in outcomes.broken]
    text = []
    for title, reasons in lines.items():
        text += [f"\n{title}:", *(f"  {number:4} x {reason}" for reason, number in reasons.most_common())]
    columns = ("passed", "skipped", "not applicable", "failed", "stale")
    text += ["", f"{'':20}" + "".join(f"{column:>16}" for column in columns)]
    for group, found in counts.items():
        text.append(f"{group.replace('_', ' ', 1):20}" + "".join(f"{found[column]:16}" for column in columns))
    text += ["", *unexpected] if unexpected else []
    return "\n".join(text), not unexpected and bool(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of transformers")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="more than once for several; default: all")
    parser.add_argument("--model", action="append", choices=MODELS, help="more than once for several; default: all")
    parser.add_argument("--slow", action="store_true", help="also what transformers calls slow, export among it")
    parser.add_argument("-k", metavar="EXPRESSION", help="only these tests, as in pytest")
    parser.add_argument("--traceback", action="store_true", help="show where tests failed")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    if not (checkout / "tests" / "test_modeling_common.py").is_file():
        parser.error(f"CHECKOUT must hold tests/test_modeling_common.py, got {arguments.checkout}")
    presets, models = arguments.preset or PRESETS, arguments.model or MODELS

    os.environ.update(HF_HUB_OFFLINE="1", MGK_SUITE_PRESETS=",".join(presets), MGK_SUITE_MODELS=",".join(models))
    if arguments.slow:
        os.environ["RUN_SLOW"] = "1"
    # Ours is a folder without __init__.py, which yields to a package of the same name.
    sys.path.insert(0, str(checkout))
    import pytest
    import transformers.utils

    # The tests would import the checkout's own transformers, in pieces, beside the installed one.
    transformers.utils.direct_transformers_import = lambda *_, **__: transformers
    with tempfile.TemporaryDirectory() as folder:
        from tiny_models import save_tiny_models

        save_tiny_models(Path(folder), presets)
        os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = folder
        outcomes = Outcomes()
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(HERE), "--noconftest"]
        options += ["--disable-warnings", "-r", "", "--show-capture", "no"]
        options += ["--tb", "short" if arguments.traceback else "no"]
        options += ["-k", arguments.k] if arguments.k else []
        pytest.main([*options, str(HERE / "models.py")], plugins=[outcomes])
    text, is_fine = summary(outcomes)
    print(text)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
