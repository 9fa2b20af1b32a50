"""Loss against time: steps of the curves times the seconds of an update."""

import json

import pytest
from reproduction_cases import write_run, write_speeds

from mgk.reproduction.equal_time import at_time, curves, duration
from mgk.reproduction.results import read_results, run_name

CURVE = [(10.0, 3.0), (20.0, 2.0), (40.0, 1.0)]


@pytest.mark.parametrize(
    ("seconds", "bits"),
    [(9.9, None), (10.0, 3.0), (15.0, 2.5), (20.0, 2.0), (25.0, 1.75), (40.0, 1.0), (1000.0, 1.0)],
)
def test_between_two_validations_is_a_line_and_after_the_last_nothing_is_learned(seconds, bits):
    assert at_time(CURVE, seconds) == (None if bits is None else pytest.approx(bits))


def test_nothing_is_read_of_no_curve():
    assert at_time([], 1.0) is None


def test_steps_become_seconds(tmp_path):
    """Of runs that are finished, their validations in bits; at 1,000 tokens an update."""
    write_speeds(tmp_path, "enwik8", {"softmax-8+qk_norm": 4000.0, "smgk-4": 8000.0})
    lines = [
        {"step": 0, "kind": "valid", "loss": 5.0}, {"step": 500, "kind": "valid", "loss": 2.0},
        {"step": 500, "kind": "train", "loss": 9.0}, {"step": 1000, "kind": "valid", "loss": None},
        {"step": 2500, "kind": "valid", "loss": 1.0},
    ]  # fmt: skip
    for seed in (0, 1):
        path = tmp_path / "curves" / f"{run_name('enwik8', 'smgk-4', seed)}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, lines)))
    write_run(tmp_path, "enwik8", "smgk-4", 0)
    results = read_results(tmp_path)
    found = curves("enwik8", "enwik8", "smgk-4", results)
    assert found.keys() == {0}
    assert found[0] == [
        (pytest.approx(500 / 8), pytest.approx(2 / 0.693147)),
        (pytest.approx(2500 / 8), pytest.approx(1 / 0.693147)),
    ]
    assert duration("enwik8", "smgk-4", results) == pytest.approx(2500 / 8)
    # Without a time there is nothing to put the losses against.
    assert curves("enwik8", "enwik8", "mgk-4", results) == {}
    assert duration("enwik8", "mgk-4", results) is None
