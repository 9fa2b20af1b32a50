"""One shape: who is right, who gets a number, and what the numbers are."""

import cases
import pytest
import torch
from benchmark_cases import Script
from rich.console import Console

import mgk
from mgk.benchmark import correctness, table
from mgk.benchmark.attention import compare
from mgk.benchmark.contestants import Contestant, baselines, mixtures
from mgk.benchmark.correctness import Judge
from mgk.benchmark.shape import Shape
from mgk.benchmark.sweep import lengths, sweep
from mgk.benchmark.timing import Effort

CPU = torch.device("cpu")
SHAPE = Shape(batch=1, heads=4, tokens=40, head_dim=8, is_causal=True)
EFFORT = Effort(rounds=2, seconds=1.0, fewest=2)
FIELDS = {
    "device", "dtype", "batch", "heads", "baseline_heads", "tokens", "head_dim", "causal", "preset", "backend",
    "baseline", "baseline_ms", "baseline_training", "baseline_training_ms", "forward_ms", "training_ms",
    "forward_ratio", "training_ratio", "forward_over_softmax_head", "training_over_softmax_head", "peak_bytes", "noise",
    "error",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_gradients(monkeypatch):
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})


def run(presets=("softmax", "smgk"), backends=("sdpa", "chunked"), clock=None, effort=EFFORT, dtype=torch.float32):
    contestants = [*baselines(CPU), *mixtures(presets, backends)]
    return compare(SHAPE, contestants, Judge(dtype, CPU), effort, clock=clock)


def printed(found):
    console = Console(width=140, record=True)
    console.print(table.attention_table(found))
    return console.export_text()


def test_rows_have_what_a_reader_needs():
    found = run(backends=("sdpa", "chunked", "eager"))
    assert [(row["preset"], row["backend"]) for row in found.rows] == [
        (preset, backend) for preset in ("softmax", "smgk") for backend in ("sdpa", "chunked", "eager")
    ]
    assert not found.failures
    assert not found.skipped
    for row in found.rows:
        assert row.keys() >= FIELDS
        assert (row["heads"], row["baseline_heads"], row["tokens"], row["causal"]) == (2, 4, 40, True)
        assert row["error"].keys() >= {"output", "query", "key", "value"}
    assert {record["kernel"] for record in found.baselines} == {"flash", "math"}
    assert all(record["heads"] == 4 for record in found.baselines)


def test_ratios_are_those_to_the_fastest_kernel_of_each_direction():
    clock = Script(
        **{
            "softmax_through_SDPA_flash,_forward": 6.0, "softmax_through_SDPA_flash,_training": 20.0,
            "softmax_through_SDPA_math,_forward": 8.0, "softmax_through_SDPA_math,_training": 18.0,
            "softmax_through_sdpa,_forward": 2.0, "softmax_through_sdpa,_training": 9.0,
            "smgk_through_sdpa,_forward": 3.0, "smgk_through_sdpa,_training": 12.0,
        }
    )  # fmt: skip
    row = run(backends=("sdpa",), clock=clock).rows[1]
    assert (row["baseline"], row["baseline_ms"]) == ("flash", 6.0)
    assert (row["baseline_training"], row["baseline_training_ms"]) == ("math", 18.0)
    assert (row["forward_ratio"], row["training_ratio"]) == (2.0, 1.5)
    assert (row["forward_over_softmax_head"], row["training_over_softmax_head"]) == (1.5, pytest.approx(4 / 3))
    assert row["noise"] == 0


def test_a_table_of_one_shape():
    out = printed(run())
    assert "causal, batch 1, 4 heads, 40 tokens, head_dim 8, float32" in out
    lines = [line.split() for line in out.splitlines()]
    smgk = next(line for line in lines if line[:2] == ["smgk", "chunked"])
    assert [cell[-1] for cell in (smgk[4], smgk[5], smgk[7], smgk[8])] == ["x"] * 4
    assert ["softmax", "SDPA", "flash", "4"] in [line[:4] for line in lines]


def off_by_a_little(out):
    return out * 1.001


def not_a_number_somewhere(out):
    out = out.clone()
    out[..., -1, :] = float("nan")
    return out


def with_a_wrong_gradient(out):
    return out.detach() + 1.1 * (out - out.detach())


def in_another_dtype(out):
    return out.double()


def that_crashes(out):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (off_by_a_little, "error of the output must be at most 1e-05, got 0.001"),
        (not_a_number_somewhere, "error of the output must be at most 1e-05, got nan"),
        (with_a_wrong_gradient, "error of the gradient of query must be at most 2.5e-05, got 0.1"),
        (in_another_dtype, "error of the output must be at most 1e-05, got nan"),
        (that_crashes, "it stopped with RuntimeError: no kernel image is available"),
    ],
)
def test_a_wrong_attention_gets_no_number(mistake, reason, monkeypatch):
    """Only the one that is wrong, and only it."""
    right = mgk.mixture_attention

    def attention(*args, backend, shift=None, **options):
        out = right(*args, backend=backend, shift=shift, **options)
        return mistake(out) if backend == "chunked" and shift is not None else out

    monkeypatch.setattr(mgk, "mixture_attention", attention)
    found = run()
    assert [(each["preset"], each["backend"]) for each in found.failures] == [("smgk", "chunked")]
    assert reason in found.failures[0]["reason"]
    assert not any(name.endswith(("_ms", "_ratio", "_bytes")) for name in found.failures[0])
    assert [(row["preset"], row["backend"]) for row in found.rows] == [
        ("softmax", "sdpa"), ("softmax", "chunked"), ("smgk", "sdpa"),
    ]  # fmt: skip
    line = next(line.split() for line in printed(found).splitlines() if line.split()[:2] == ["smgk", "chunked"])
    assert line == ["smgk", "chunked", "2", "wrong"]
    assert any(reason in line for line in table.wrongs(found))


def test_a_stock_kernel_that_is_wrong_is_no_baseline():
    flash, math = baselines(CPU)
    wrong = Contestant(preset="softmax", backend="flash", attention=lambda i: 2 * flash.attention(i), is_baseline=True)
    found = compare(SHAPE, [wrong, math], Judge(torch.float32, CPU), EFFORT)
    assert [record["kernel"] for record in found.baselines] == ["math"]
    assert [record["kernel"] for record in found.failures] == ["flash"]
    with pytest.raises(RuntimeError, match=r"a stock kernel must run .*got none: the error of the output"):
        compare(SHAPE, [wrong], Judge(torch.float32, CPU), EFFORT)


def test_what_a_backend_cannot_do_is_no_failure(monkeypatch):
    found = run(presets=("softmax", "mgk-hard"))
    assert not found.failures
    assert [(each["preset"], each["backend"]) for each in found.skipped] == [("mgk-hard", "sdpa")]
    assert table.notes(found)[0].startswith("left out: sdpa for mgk-hard: backend='sdpa' cannot do assignment='hard'")

    def not_there(*args, **options):
        raise ValueError("backend='triton' is not part of this version")

    monkeypatch.setattr(mgk, "mixture_attention", not_there)
    found = run(backends=("triton",))
    assert not found.failures
    assert not found.rows
    assert table.notes(found) == ["left out: triton for softmax, smgk: backend='triton' is not part of this version"]


def test_what_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr("mgk.benchmark.memory.CPU_LIMIT", 10_000)
    found = run(backends=("chunked", "eager"))
    assert {each.get("backend", each.get("kernel")) for each in found.skipped} == {"eager", "math"}
    assert all("needs about 0.0 GB for its pairs" in each["reason"] for each in found.skipped)
    found = run(effort=Effort(rounds=2, seconds=1.0, fewest=2, slowest=100.0))
    assert len(found.rows) == 4
    with pytest.raises(RuntimeError, match="forward and backward take"):
        run(effort=Effort(rounds=2, seconds=1.0, fewest=2, slowest=0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_held_to_its_own_caps(dtype):
    found = run(presets=("softmax", "smgk", "mgk"), backends=("chunked", "eager"), dtype=dtype)
    assert not found.failures
    assert all(1e-6 < row["error"]["output"] < cases.OUTPUT_CAP[dtype] for row in found.rows)


@pytest.mark.gpu
def test_on_a_gpu_host_and_memory_are_measured_too():
    device = torch.device("cuda")
    shape = Shape(batch=2, heads=4, tokens=512, head_dim=64)
    contestants = [*baselines(device), *mixtures(("softmax", "smgk"), ("sdpa", "chunked", "eager"))]
    found = compare(shape, contestants, Judge(torch.bfloat16, device), EFFORT)
    assert not found.failures
    assert {"cudnn", "flash"} <= {record["kernel"] for record in found.baselines}
    for record in (*found.baselines, *found.rows):
        # At least the gradients of query, key and value.
        assert record["peak_bytes"] >= 3 * 2 * 512 * 64 * 2 * record["heads"]
        assert record["forward_ms"] == max(record["forward_device_ms"], record["forward_host_ms"])
        assert record["forward_device_ms"] < record["training_device_ms"]


def test_the_caps_are_those_of_the_tests():
    assert {dtype: cases.OUTPUT_CAP[dtype] for dtype in correctness.OUTPUT_CAP} == correctness.OUTPUT_CAP


def test_a_sweep_leaves_behind_who_cannot_follow(monkeypatch):
    shapes = lengths(Shape(batch=1, heads=2, tokens=16, head_dim=8), 100)
    assert [shape.tokens for shape in shapes] == [16, 32, 64]
    contestants = [*baselines(CPU), *mixtures(("smgk",), ("sdpa", "chunked"))]
    right = mgk.mixture_attention

    def attention(*args, backend, **options):
        if backend == "sdpa" and args[0].shape[2] == 32:
            raise ValueError("not at this length")
        return right(*args, backend=backend, **options)

    monkeypatch.setattr(mgk, "mixture_attention", attention)
    found = list(sweep(shapes, contestants, Judge(torch.float32, CPU), EFFORT))
    assert [[row["backend"] for row in each.rows] for each in found] == [["sdpa", "chunked"], ["chunked"], ["chunked"]]
    assert all(record["sweep"] for each in found for record in (*each.rows, *each.baselines, *each.skipped))
    assert [each["reason"] for each in found[1].skipped] == ["not at this length"]


def test_a_sweep_foresees_what_would_take_too_long(monkeypatch):
    clock = Script(**{"softmax": 1.0, "smgk_through_sdpa": 2.0, "smgk_through_chunked": 3000.0})
    monkeypatch.setattr("mgk.benchmark.timing.HostClock", lambda: clock)
    contestants = [*baselines(CPU), *mixtures(("smgk",), ("sdpa", "chunked"))]
    shapes = lengths(Shape(batch=1, heads=2, tokens=16, head_dim=8), 32)
    found = list(sweep(shapes, contestants, Judge(torch.float32, CPU), EFFORT))
    assert [[row["backend"] for row in each.rows] for each in found] == [["sdpa", "chunked"], ["sdpa"]]
    reason = "forward and backward would take about 12.0 s, and may take 10 s"
    assert [(each["backend"], each["tokens"], each["reason"]) for each in found[0].skipped] == [("chunked", 32, reason)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "--shape must look like 32,8,4096,64"),
        ("1,2,3,x", "--shape must look like"),
        ("1,2,3,4,casual", "--shape must look like"),
        ("1,3,16,8", "heads of a shape must be even, since the mixtures get half of them, got 3"),
        ("1,2,0,8", "tokens of a shape must be at least 1, got 0"),
    ],
)
def test_shapes_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        Shape.parse(text)


def test_shapes():
    assert Shape.parse("32,8,4096,64") == Shape(batch=32, heads=8, tokens=4096, head_dim=64)
    assert Shape.parse("32,8,4096,64,causal").is_causal
    assert not Shape.parse("32,8,4096,64,full").is_causal
