"""`mgk bench`, as a user runs it."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mgk
from mgk.benchmark import correctness, markdown, page, result
from mgk.cli import app

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Default files go to the folder that one stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})


def run(*arguments, status=0):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A quick run with a sweep, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    out = run("attention", "--quick", "--sweep", "--output", folder / "attention-cpu.json", "--plot", folder / "a.png")
    return folder, out


def test_attention_from_the_command_line(measured):
    folder, out = measured
    times = r"[\d.]+ +[\d.]+x +[\d.]+x"
    assert re.search(rf"^ *smgk +chunked +2 +{times} +{times} +[\d.]+ / [\d.]+ *$", out, re.MULTILINE)
    assert re.search(r"^ *softmax +fastest of all: \S.* +4 +[\d.]+ +[\d.]+ *$", out, re.MULTILINE)
    assert "against the length" in out
    # Without a terminal, plain lines say how far it is.
    assert "step 0 of" in out
    found = json.loads((folder / "attention-cpu.json").read_text())
    assert found["benchmark"] == "attention"
    assert found["device"].startswith("CPU")
    assert found["versions"]["torch"] == torch.__version__
    assert found["config"]["quick"] is True
    assert not found["failures"]
    assert {row["tokens"] for row in found["rows"] if row.get("sweep")} == {64, 128, 256}
    assert {row["preset"] for row in found["rows"] if not row.get("sweep")} == {"softmax", "smgk", "mgk"}
    for row in found["rows"]:
        assert 0 < row["forward_ratio_of_all"] <= row["forward_ratio"]
        assert 0 < row["training_ratio_of_all"] <= row["training_ratio"]
    lengths = [record["tokens"] for record in found["baselines"] if record.get("backend") == "chunked"]
    assert lengths == [256, 64, 128, 256]
    assert (folder / "a.png").read_bytes()[1:4] == b"PNG"


def test_what_is_chosen_is_measured():
    out = run(
        "attention", "--quick", "--preset", "gaussian", "--shape", "1,2,24,8", "--shape", "1,2,24,8,causal",
        "--backend", "chunked", "--dtype", "bfloat16",
    )  # fmt: skip
    # A quick result does not stand where a real one does.
    path = Path("runs/bench/attention-cpu.json")
    assert out.rstrip().endswith(str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["preset"], row["backend"], row["causal"], row["dtype"]) for row in rows] == [
        (preset, "chunked", causal, "bfloat16") for causal in (False, True) for preset in ("softmax", "gaussian")
    ]
    first, second = markdown.tables(result.read(path)).split("**Causal, batch 1, 2 heads, 24 tokens, head_dim 8**")
    # All kernels once, then the winners.
    assert first.count("| SDPA ") == 2
    assert 1 <= second.count("| SDPA ") <= 2
    assert all(text.count("| gaussian | chunked | 1 |") == 1 for text in (first, second))


def test_a_wrong_result_ends_with_an_error(monkeypatch):
    right = mgk.mixture_attention
    monkeypatch.setattr(mgk, "mixture_attention", lambda *args, **options: 1.01 * right(*args, **options))
    arguments = ("--quick", "--preset", "smgk", "--shape", "1,2,24,8", "--backend", "chunked")
    out = run("attention", *arguments, status=1)
    assert re.search(r"^ *smgk +chunked +1 +wrong *$", out, re.MULTILINE)
    assert "the error of the output must be at most 1e-05, got 0.01" in out
    found = json.loads(Path("runs/bench/attention-cpu.json").read_text())
    assert not found["rows"]
    # Softmax with all the heads and with half of them, and the mixture.
    assert [record["heads"] for record in found["failures"]] == [2, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--preset", "mlk"], "--preset must not be linear attention, got 'mlk'"),
        (["attention", "--preset", "sgmk"], "--preset must be one of softmax, gaussian, .*got 'sgmk'"),
        (["retrieval", "--preset", "sgmk"], "--preset must be one of softmax, gaussian, .*got 'sgmk'"),
        (["attention", "--backend", "cuda"], "--backend must be one of auto, .*eager, flex, got 'cuda'"),
        (["attention", "--dtype", "float64"], "--dtype must be auto or one of float32, .*got 'float64'"),
        (["attention", "--shape", "1,2,3"], "--shape must look like"),
        (["attention", "--quick", "--plot", "a.png"], "--plot needs a sweep to draw"),
        (["attention", "--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (["plot", "missing.json"], "missing.json must be the JSON of a benchmark, got"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_retrieval_from_the_command_line(tmp_path):
    out = run("retrieval", "--quick", "--preset", "smgk", "--tokens", "32", "--output", tmp_path / "retrieval-cpu.json")
    assert re.search(r"^ *smgk-4 +auto +0\.1 +[\d.]+ +[\d.]+x +[\d.]+x +[\d.]+x *$", out, re.MULTILINE)
    found = json.loads((tmp_path / "retrieval-cpu.json").read_text())
    assert [(row["preset"], row["heads"], row["attention_dropout"]) for row in found["rows"]] == [
        ("smgk", 4, 0.0), ("smgk", 4, 0.1),
    ]  # fmt: skip
    plain, dropping = found["rows"]
    assert markdown.tables(found).count("\n| smgk-4 | auto |") == 2
    assert plain["training_ratio"] == plain["baseline_training_ms"] / plain["training_ms"]
    assert dropping["training_over_no_dropout"] == dropping["training_ms"] / plain["training_ms"]
    assert plain["gradient_error"] < 1e-4
    assert (plain["evaluation_ratio"] > 0, dropping["evaluation_ratio"]) == (True, None)
    assert {(each["kernel"], each["attention_dropout"]) for each in found["baselines"]} == {
        ("flash", 0.0), ("math", 0.0), ("math", 0.1),
    }  # fmt: skip


def test_what_is_made_of_a_result(measured):
    folder, _ = measured
    assert run("plot", folder / "attention-cpu.json", "--to", "b.png").strip() == "b.png"
    assert Path("b.png").read_bytes()[1:4] == b"PNG"

    text = "before\n<!-- results/attention-cpu.json, written by mgk bench table -->\nold\n<!-- end -->\nafter\n"
    written = Path("page.md")
    written.write_text(text)
    for _ in range(2):
        run("table", folder / "attention-cpu.json", "--page", written)
    part = page.parts(written)["results/attention-cpu.json"]
    assert part == markdown.tables(result.read(folder / "attention-cpu.json"))
    assert re.search(r"^\| smgk \| sdpa \| 2 \| [\d.]+ \| [\d.]+x \| [\d.]+x \|", part, re.MULTILINE)
    assert "old" not in written.read_text()
    written.write_text(text + text.replace("results/", "headline of results/"))
    run("table", folder / "attention-cpu.json", "--page", written)
    assert page.parts(written)["results/attention-cpu.json"] == part
    headline = page.parts(written, headline=True)["results/attention-cpu.json"]
    assert re.search(r"^\| `smgk` \| [\d.]+x / [\d.]+x \|$", headline, re.MULTILINE)
    written.write_text(text)
    assert written.read_text().startswith("before\n")
    assert written.read_text().endswith("<!-- end -->\nafter\n")
    Path("other.md").write_text(text.replace("attention", "retrieval"))
    with pytest.raises(ValueError, match=r"must have a part for attention-cpu.json, got parts for .*retrieval-cpu"):
        run("table", folder / "attention-cpu.json", "--page", "other.md")


def test_a_plot_needs_a_sweep(measured):
    folder, _ = measured
    found = result.read(folder / "attention-cpu.json")
    Path("short.json").write_text(json.dumps({**found, "rows": [row for row in found["rows"] if not row.get("sweep")]}))
    with pytest.raises(ValueError, match="a plot needs a result with a sweep, got one without"):
        run("plot", "short.json")


NAMES = ("attention", "retrieval", "decode", "packed", "linear")


def test_numbers_of_the_page_come_from_results():
    parts = page.parts(ROOT / "docs" / "benchmarks.md")
    assert set(parts) == {f"results/bench/{name}-h200.json" for name in NAMES}
    for file, text in parts.items():
        path = ROOT / file
        assert text == (markdown.tables(result.read(path)) if path.exists() else ""), f"run mgk bench table {file}"


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_the_headline_is_that_of_the_committed_run(name):
    file = "results/bench/attention-h200.json"
    expected = {file: markdown.headline(result.read(ROOT / file))}
    assert page.parts(ROOT / name, headline=True) == expected, f"run mgk bench table {file} --page {name}"
