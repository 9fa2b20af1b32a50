"""The table by which `auto` gives plain softmax to our own kernel: made of a result, by a command."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mgk.benchmark import result
from mgk.benchmark.softmax_choice import LEAST_GAIN, choose
from mgk.cli import app
from mgk.ops import softmax_kernel

ROOT = Path(__file__).parent.parent.parent


def softmax(way, batch, tokens, forward, training, **other):
    record = {
        "preset": "softmax", "dtype": "bfloat16", "batch": batch, "heads": 8, "tokens": tokens, "head_dim": 64,
        "causal": True, "forward_ms": forward, "training_ms": training,
    }  # fmt: skip
    return {**record, **way, **other}


def measured(*sizes, **other):
    """A result of an H200, from (batch, tokens, our forward, our training); the stock kernels take 10 and 20 ms."""
    baselines = []
    for batch, tokens, forward, training in sizes:
        baselines += [
            softmax({"kernel": "cudnn"}, batch, tokens, 10.0, 30.0),
            softmax({"kernel": "flash"}, batch, tokens, 15.0, 20.0),
            softmax({"backend": "triton"}, batch, tokens, forward, training),
        ]
    return {
        "benchmark": "attention", "device": "NVIDIA H200", "architecture": "sm90", "written": "2026-11-18",
        "versions": {"torch": "2.11"}, "baselines": baselines, "rows": [], "skipped": [], "failures": [], **other,
    }  # fmt: skip


def chosen(*sizes, **other):
    return [
        (each["direction"], each["tokens"], each["queries"], round(each["gain"], 3))
        for each in choose(measured(*sizes, **other), "a.json")["faster"]
    ]


def test_from_the_smallest_size_on_which_nothing_is_lost():
    """Short sequences are slower, the longest in training, too."""
    sizes = [(1, 512, 12.0, 25.0), (1, 1024, 8.0, 16.0), (1, 2048, 5.0, 10.0), (1, 4096, 5.0, 21.0)]
    assert chosen(*sizes) == [("forward", 1024, 8192, 1.25)]


def test_what_has_less_to_do_speaks_for_what_has_more():
    sizes = [(1, 4096, 8.0, 25.0), (32, 4096, 5.0, 10.0), (16, 8192, 5.0, 10.0)]
    assert chosen(*sizes) == [("forward", 4096, 32768, 1.25), ("training", 4096, 2**20, 2.0)]
    # Neither has as many tokens and as many queries as the other.
    assert chosen((4, 1024, 5.0, 25.0), (1, 2048, 5.0, 25.0)) == [
        ("forward", 1024, 32768, 2.0), ("forward", 2048, 16384, 2.0),
    ]  # fmt: skip


def test_a_little_is_not_enough():
    assert f"at least {LEAST_GAIN - 1:.0%} faster".replace("%", " %") in (ROOT / "docs" / "benchmarks.md").read_text()
    assert chosen((1, 1024, 9.9, 19.9)) == []
    assert chosen((1, 1024, 9.6, 19.9)) == [("forward", 1024, 8192, 1.042)]


def test_what_says_nothing_of_our_kernel_on_a_gpu_chooses_nothing():
    assert chosen((1, 1024, 5.0, 10.0), architecture=None) == []
    old = measured((1, 1024, 5.0, 10.0))
    del old["architecture"]
    assert choose(old, "a.json")["faster"] == []
    stock = [record for record in old["baselines"] if "kernel" in record]
    assert choose({**old, "architecture": "sm90", "baselines": stock}, "a.json")["faster"] == []
    with pytest.raises(ValueError, match="must be that of mgk bench attention, got mgk bench decode"):
        choose({**old, "benchmark": "decode"}, "a.json")


def test_the_command_writes_what_the_library_reads(tmp_path):
    file, table = tmp_path / "attention-h200.json", tmp_path / "table.json"
    file.write_text(json.dumps(measured((1, 1024, 5.0, 10.0))))
    done = CliRunner().invoke(app, ["bench", "choose", str(file), "--to", str(table)])
    assert done.exit_code == 0, done.output
    assert json.loads(table.read_text())["source"] == "attention-h200.json"
    forward, training = softmax_kernel.read(table)
    assert (forward.architecture, forward.head_dim, forward.is_causal, forward.tokens) == ("sm90", 64, True, 1024)
    assert (forward.needs_gradient, training.needs_gradient) == (False, True)


def test_the_table_of_the_library_is_that_of_the_committed_run():
    table = json.loads(softmax_kernel.PATH.read_text())
    run = ROOT / "results" / "bench" / table["source"]
    padded = json.loads((ROOT / "results" / "bench" / "padded-softmax-h200.json").read_text())
    assert table == choose(result.read(run), run.name, padded), "run mgk bench choose as docs/benchmarks.md says"


def test_padded_batches_are_measured_by_themselves():
    """A call takes its host's time at least, and the faster one of the stock ways is what we compare with."""
    forward, training = {"fused": 4.0, "mask": 8.0, "columns": 9.0}, {"fused": 9.0, "mask": 18.0, "columns": 10.0}
    ms = {f"{way} {name}": each[way] for name, each in (("forward", forward), ("training", training)) for way in each}
    size = {"batch": 2, "heads": 8, "tokens": 1024, "head_dim": 64}
    host = {**dict.fromkeys(ms, 0.1), "fused training": 9.9}
    padded = {"device": "NVIDIA H200", "dtype": "bfloat16", "rows": [{**size, "ms": ms, "host_ms": host}]}
    found = choose(measured((1, 1024, 20.0, 30.0)), "a.json", padded)["faster"]
    assert [(each["padded"], each["direction"], each["tokens"], each["gain"]) for each in found] == [
        (True, "forward", 1024, 2.0)
    ]
    with pytest.raises(ValueError, match="padded batches must be measured on NVIDIA H200, too, got another"):
        choose(measured((1, 1024, 20.0, 30.0)), "a.json", {**padded, "device": "another"})
    for other in ({}, {**padded, "rows": [size]}):
        with pytest.raises(ValueError, match=r"must be that of benchmarks/padded_softmax\.py, got another"):
            choose(measured((1, 1024, 20.0, 30.0)), "a.json", other)


def test_the_docs_have_the_table_of_padded_batches(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import padded_softmax

    table = padded_softmax.table(json.loads(padded_softmax.RESULT.read_text()))
    assert table in padded_softmax.PAGE.read_text(), "run python benchmarks/padded_softmax.py --write"


def test_the_table_of_padded_batches_is_written(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import padded_softmax

    page, text = tmp_path / "page.md", padded_softmax.PAGE.read_text()
    page.write_text(text.replace("| 128, 8, 1,024, 32 | forward |", "| old |"))
    padded_softmax.write_table(page)
    assert page.read_text() == text
    page.write_text("no comments")
    with pytest.raises(ValueError, match=r"page\.md must have a part from <!-- written by benchmarks/padded_softmax"):
        padded_softmax.write_table(page)


@pytest.mark.parametrize("way", ["mask", "columns"])
def test_padded_candidates_are_right(way, monkeypatch):
    """And a wrong one would be found."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import padded_softmax

    shape, cpu = (2, 2, 96, 32), torch.device("cpu")
    assert padded_softmax.error(padded_softmax.WAYS[way], shape, cpu) < padded_softmax.CAP
    assert padded_softmax.error(lambda q, k, v, valid: padded_softmax.mask(q, k, v, valid | True), shape, cpu) > 0.1
