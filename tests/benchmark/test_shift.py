"""`python benchmarks/shift.py gradients` and `short-lists`, smaller."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from mgk.recipes import load
from mgk.reproduction.shift_measurements import GRADIENTS, SHORT_LISTS, read_measurement

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def shift():
    spec = importlib.util.spec_from_file_location("shift", ROOT / "benchmarks" / "shift.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(folder, *changes):
    lengths = ("longer_than=5", "shorter_than=20", "batch_size=4", *changes)
    return ["--to", str(folder / "shift"), *(part for change in lengths for part in ("--set", change))]


def test_gradients_are_measured(shift, tmp_path, capsys):
    arguments = ["gradients", *small(tmp_path, "batches=2")]
    shift.main([*arguments, "--seeds", "1", "--rows", "softmax smgk"])
    assert capsys.readouterr().out.splitlines() == ["softmax-4 0", "smgk-4 0"]
    # What is there is not made again, and the rows stand in their order whatever came first.
    shift.main([*arguments, "--seeds", "2", "--rows", "smgk"])
    assert capsys.readouterr().out.splitlines() == ["smgk-4 1"]
    found = read_measurement(tmp_path, GRADIENTS)
    assert [(run["row"], run["seed"]) for run in found.runs] == [("softmax-4", 0), ("smgk-4", 0), ("smgk-4", 1)]
    for row in found.rows:
        for layer in (1, 2):
            assert 0 < found.values(row, layer, "logits_of_the_key_alone")[0] < found.values(row, layer, "logits")[0]
            assert found.values(row, layer, "k_proj_gradient")[0] > 0
            assert -1 <= found.values(row, layer, "k_proj_in_common")[0] <= 1
    # What the page says: the constant gives W_k more to do, and a step of it moves the logits further.
    for name in ("k_proj_gradient", "k_proj_step"):
        assert found.values("smgk-4", 1, name)[0] > 1.5 * found.values("softmax-4", 1, name)[0]


def test_short_lists_are_learned(shift, tmp_path, capsys):
    arguments = ["short-lists", *small(tmp_path, "steps=6", "window=2"), "--seeds", "1", "--rows", "gaussian"]
    shift.main(arguments)
    assert capsys.readouterr().out.startswith("gaussian-1 0 ")
    found = read_measurement(tmp_path, SHORT_LISTS)
    options = found.options
    assert options["largest_class"] < options["threshold"] < options["root_operator"]
    assert options["threshold"] == pytest.approx((options["largest_class"] + options["root_operator"]) / 2)
    ((step, left),) = found.escapes()["gaussian-1"]
    assert 2 <= step <= 6
    assert left or step == 6
    path = tmp_path / "shift" / "short-lists.json"
    with pytest.raises(ValueError, match="must have been made with the options of today"):
        shift.main([*arguments, "--set", "steps=7"])
    assert json.loads(path.read_text())["options"] == options


def test_a_run_leaves_where_its_window_is_above_the_threshold(shift, tmp_path):
    options = {**shift.SHORT, "longer_than": 5, "shorter_than": 20, "batch_size": 4, "steps": 4, "window": 3}
    lists = shift.draw_lists(options, 16, str(tmp_path))
    assert shift.learn("gaussian-1", 0, lists, options, -0.1) == (3, True)
    assert shift.learn("gaussian-1", 0, lists, options, 1.0) == (4, False)


def test_what_is_the_same_for_all_queries(shift):
    """By hand: a column of its own for each key, and noise of the queries that cancels over them."""
    column = torch.tensor([1.0, -1.0, 0.0])
    noise = torch.tensor([[1.0, 0.0, -1.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    logits = torch.zeros(1, 1, 4, 4)
    logits[0, 0, :3, :3] = column + noise + torch.tensor([[5.0], [6.0], [7.0]])
    logits[..., 3] = -math.inf
    whole, common = shift.spread(logits, torch.tensor([[True, True, True, False]]))
    assert common == pytest.approx(math.sqrt(2 / 3))
    assert whole == pytest.approx(math.sqrt(2 / 3 + 4 / 9))


def test_rows_are_those_of_the_recipe(shift):
    """What is measured is what is to be trained, and a control that is one of its rows written in another way."""
    rows = {shift.with_heads(row, 4) for row in shift.ROWS}
    known = {*load("lra/listops-shifts").rows, *load("lra/listops").rows}
    assert rows - known == {"gaussian-4+query_bias_init_std=1"}
