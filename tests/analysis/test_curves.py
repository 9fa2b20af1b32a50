"""Learning curves from the lines of a run."""

import json
from pathlib import Path

import pytest

from mgk.analysis import learning_curves

CURVES = Path(__file__).parents[2] / "results" / "curves"


def test_points_in_order(tmp_path):
    lines = [
        {"step": 20, "kind": "train", "loss": 1.5, "lr": 0.1, "tokens": 99.0, "seconds": 3.0},
        {"step": 10, "kind": "train", "loss": 2.0, "lr": 0.2, "gpu_gib": 1.0},
        {"step": 20, "kind": "valid", "accuracy": 0.25, "loss": None, "count": 12.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = learning_curves(tmp_path)
    assert found.points == {
        "training loss": [(10, 2.0), (20, 1.5)],
        "training lr": [(10, 0.2), (20, 0.1)],
        "validation accuracy": [(20, 0.25)],
    }
    assert found.left_out == 1
    assert found.name == tmp_path.name
    assert learning_curves(tmp_path / "metrics.jsonl", name="mine").name == "mine"


def test_the_curves_that_are_kept():
    found = learning_curves(CURVES / "lra-listops-no-activation-dropout-softmax-2-seed-0.jsonl")
    steps = [step for step, _ in found.points["validation accuracy"]]
    assert steps == sorted(steps)
    assert found.points["training loss"][0][1] > found.points["training loss"][-1][1]
    assert found.name == "lra-listops-no-activation-dropout-softmax-2-seed-0"


def test_a_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "curve.jsonl"
    path.write_text('{"step": 1, "kind": "train", "loss": 3.0}\n{"step": 2, "kind": "tr')
    assert learning_curves(path).points == {"training loss": [(1, 3.0)]}


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match=r"must be the folder of a run.*got no metrics\.jsonl there"):
        learning_curves(tmp_path)
    with pytest.raises(ValueError, match=r"got no none\.jsonl there"):
        learning_curves(tmp_path / "none.jsonl")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(b"\x00\xff\n{]\n\n")
    with pytest.raises(
        ValueError, match=r"damaged\.jsonl must have a measurement as JSON in every line, got .* in line 1"
    ):
        learning_curves(damaged)
    damaged.write_bytes(b'{"step": 1, "kind": "train", "loss": null}\n')
    with pytest.raises(ValueError, match="must hold a measurement as JSON on each line, got 1 and none that is finite"):
        learning_curves(damaged)


def test_a_hole_in_a_curve_is_not_passed_over(tmp_path):
    path = tmp_path / "curve.jsonl"
    path.write_text(
        '{"step": 1, "kind": "train", "loss": 3.0}\n{"step": 2, "kin\n{"step": 3, "kind": "train", "loss": 1}\n'
    )
    with pytest.raises(ValueError, match="in line 2"):
        learning_curves(path)
