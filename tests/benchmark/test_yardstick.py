"""`x` and `x stock`: softmax with all the heads as the fastest of all computes it, and as the stock kernels do."""

from pathlib import Path

import pytest
import torch
from benchmark_cases import Script
from rich.console import Console

from mgk.benchmark import cells, correctness, decode, linear, markdown, packed, result, retrieval, table
from mgk.benchmark.attention import compare
from mgk.benchmark.contestants import baselines, linears, mixtures, own_softmax
from mgk.benchmark.correctness import Judge
from mgk.benchmark.document_matcher import Matcher
from mgk.benchmark.generation import Setting, writers
from mgk.benchmark.shape import Shape
from mgk.benchmark.timing import Effort
from mgk.benchmark.yardstick import LACKS, PREDATES, summary

ROOT = Path(__file__).parent.parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape(batch=1, heads=4, tokens=40, head_dim=8, is_causal=True)
EFFORT = Effort(rounds=2, seconds=1.0, fewest=2)


@pytest.fixture(autouse=True)
def _small_gradients(monkeypatch):
    monkeypatch.setattr(correctness, "SMALL", {"batch": 1, "heads": 4, "tokens": 27})


def measured():
    """Our own kernel is faster forward, the stock one in training."""
    clock = Script(
        **{
            "softmax_through_SDPA_flash,_forward": 6.0, "softmax_through_SDPA_flash,_training": 18.0,
            "softmax_through_SDPA_math": 30.0,
            "softmax_with_all_heads_through_chunked,_forward": 5.0,
            "softmax_with_all_heads_through_chunked,_training": 19.0,
            "smgk_through_sdpa,_forward": 4.0, "smgk_through_sdpa,_training": 12.0,
        }
    )  # fmt: skip
    contestants = [*baselines(CPU), own_softmax(CPU), *mixtures(("smgk",), ("sdpa",))]
    return compare(SHAPE, contestants, Judge(torch.float32, CPU), EFFORT, clock=clock)


def test_the_fastest_of_all_and_the_fastest_stock_kernel():
    found = measured()
    (row,) = found.rows
    assert (row["forward_ratio_of_all"], row["forward_ratio"]) == (1.25, 1.5)
    assert (row["training_ratio_of_all"], row["training_ratio"]) == (1.5, 1.5)
    assert (row["forward_fastest_of_all"], row["training_fastest_of_all"]) == ("chunked", "SDPA flash")
    assert (row["forward_fastest_of_all_ms"], row["training_fastest_of_all_ms"]) == (5.0, 18.0)
    own = found.baselines[-1]
    assert (own["preset"], own["backend"], own["heads"], "kernel" in own) == ("softmax", "chunked", 4, False)
    # What stock kernels are asked for has not changed its meaning.
    assert (row["baseline"], row["baseline_ms"]) == ("flash", 6.0)


def test_the_table_has_its_row():
    found = measured()
    console = Console(width=160, record=True)
    console.print(table.attention_table(found))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "softmax fastest of all: chunked / SDPA flash 4 5.00 18.0" in lines
    assert "smgk sdpa 2 4.00 1.25x 1.50x 12.0 1.50x 1.50x" in lines
    assert summary([each for each in found.baselines if "kernel" in each], {"forward": "forward_ms"}) is None


def test_a_step_of_generation():
    clock = Script(softmax_through_SDPA=6.0, softmax_with_all_heads_through_chunked=4.0, smgk=2.0, copy=2.0)
    contestants = [*baselines(CPU), own_softmax(CPU), *mixtures(("smgk",), ("chunked",))]
    shape = Shape(batch=2, heads=4, tokens=40, head_dim=8)
    found = decode.compare(shape, contestants, Judge(torch.float32, CPU), EFFORT, clock=clock)
    (row,) = found.rows
    assert (row["forward_ratio_of_all"], row["forward_ratio"], row["baseline"]) == (2.0, 3.0, "flash")
    lines = cells.decode_cells([*found.baselines, *found.rows])
    assert lines[-2][:4] == ["softmax", "fastest of all: chunked", "4", "4.00"]
    assert lines[-1][:6] == ["smgk", "chunked", "2", "2.00", "2.00x", "3.00x"]


def test_linear_attention():
    clock = Script(softmax_through_SDPA=12.0, softmax_with_all_heads_through_chunked=8.0, linear=6.0, mlk=4.0)
    contestants = [*linears(("mlk",), "chunked"), *baselines(CPU), own_softmax(CPU)]
    found = linear.compare(SHAPE, contestants, Judge(torch.float32, CPU), EFFORT, clock=clock)
    (row,) = found.rows
    assert (row["forward_over_softmax_of_all"], row["forward_over_softmax"], row["forward_ratio"]) == (2.0, 3.0, 1.5)
    assert found.baselines[-1]["forward_over_softmax_of_all"] is None
    lines = cells.linear_cells([*found.baselines, *found.rows])
    assert [line[:3] for line in lines[-2:]] == [["softmax", "fastest of all: chunked", "4"], ["mlk", "chunked", "2"]]
    assert lines[-1][-3:-1] == ["2.00 / 2.00", "3.00 / 3.00"]
    # Softmax is overtaken where its fastest is.
    swept = []
    for tokens, stock, of_all in ((512, 1.2, 0.9), (1024, 2.0, 1.1)):
        record = {"preset": "mlk", "causal": True, "tokens": tokens}
        for direction in ("forward", "training"):
            record |= {f"{direction}_over_softmax": stock, f"{direction}_over_softmax_of_all": of_all}
        swept.append(record)
    assert [each["tokens"] for each in linear.crossovers(swept)] == [1024, 1024]


def test_a_model_end_to_end():
    """On a CPU the models' materialised attention stands for a kernel of our own."""
    clock = Script(
        **{
            "softmax-8_through_SDPA_math": 12.0, "softmax-8_through_eager,_training": 8.0,
            "softmax-8_through_eager,_evaluation": 16.0, "smgk-4": 4.0,
        }
    )  # fmt: skip
    chosen = [
        Matcher(attention="softmax", heads=8, kernel="math"),
        Matcher(attention="softmax", heads=8, implementation="eager"),
        Matcher(attention="smgk", heads=4),
    ]
    found = retrieval.compare(chosen, pairs=2, tokens=16, device=CPU, effort=EFFORT, clock=clock)
    assert [each.get("kernel", each.get("backend")) for each in found.baselines] == ["math", "eager"]
    (row,) = found.rows
    assert (row["training_ratio_of_all"], row["fastest_training_ratio"]) == (2.0, 3.0)
    assert (row["evaluation_ratio_of_all"], row["fastest_evaluation_ratio"]) == (3.0, 3.0)
    lines = cells.retrieval_cells(found.baselines, found.rows)
    assert lines[2][:2] == ["softmax-8", "fastest of all: eager / SDPA math"]
    assert lines[3][3:9] == ["4.00", "2.00x", "3.00x", "4.00", "3.00x", "3.00x"]


def test_on_a_gpu_padded_reviews_go_through_our_own_kernel_too():
    chosen = packed.readers(["smgk"], CUDA)
    softmax = [reader for reader in chosen if reader.is_softmax]
    assert [(reader.name, reader.is_stock(CUDA)) for reader in softmax] == [
        ("softmax-8, packed", False), ("softmax-8, padded to the longest", True), ("softmax-8, padded to 4,096", True),
        ("softmax-8 through triton, padded to the longest", False),
        ("softmax-8 through triton, padded to 4,096", False),
    ]  # fmt: skip
    assert own_softmax(CUDA).name == "softmax with all heads through triton"
    setting = Setting(batch=1, prompt=8, new_tokens=2)
    assert [writer.backend for writer in writers(("smgk",), setting, CUDA)] == ["sdpa", "triton", "auto"]


@pytest.mark.parametrize("name", LACKS)
def test_old_results_still_make_tables(name):
    """They know the fastest stock kernel. What they do not know is not made up."""
    path = ROOT / "results" / "bench" / f"{name}-h200.json"
    found = result.read(path)
    text = markdown.tables(found)
    if any(key.endswith("_of_all") for row in found["rows"] for key in row):
        assert PREDATES not in text
        return
    assert PREDATES + LACKS[name] in text
    # But for models that write, which had both from the start.
    assert "fastest of all" not in text.partition("prompts of")[0]
    if name == "attention":
        smgk = next(line for line in text.splitlines() if line.startswith("| smgk | triton |")).split(" | ")
        row = next(row for row in found["rows"] if row["preset"] == "smgk")
        assert smgk[4:6] == ["", f"{row['forward_ratio']:.2f}x"]
        assert smgk[7:9] == ["", f"{row['training_ratio']:.2f}x"]


def test_models_that_write_had_both_from_the_start():
    found = result.read(ROOT / "results" / "bench" / "decode-h200.json")
    writing = [record for record in (*found["baselines"], *found["rows"]) if "prompt" in record]
    stock, row = (
        next(each for each in writing if each.get(key) == value)
        for key, value in (("kernel", "sdpa"), ("preset", "smgk"))
    )
    line = cells.generation_cells(writing)[-1]
    assert [each[1] for each in cells.generation_cells(writing)] == ["sdpa", "triton", "fastest of all: triton", "auto"]
    assert line[3] == f"{row['forward_ratio']:.2f}x"
    assert line[4] == f"{stock['forward_ms'] / row['forward_ms']:.2f}x"
