"""The step at which a run leaves a plateau."""

import math

import pytest

from mgk.reproduction.escape import step_of_escape


def line(step, accuracy, kind="valid"):
    return {"step": step, "kind": kind, "accuracy": accuracy, "loss": 1.0}


def test_it_is_the_first_validation_above_the_threshold():
    curve = [line(50, 0.17), line(100, 0.3), line(150, 0.31), line(200, 0.2), line(250, 0.4)]
    assert step_of_escape(curve, 0.3) == 150
    assert step_of_escape(curve[::-1], 0.3) == 150
    assert step_of_escape(curve, 0.35) == 250
    assert step_of_escape(curve, 0.0) == 50


def test_a_run_that_stays_has_no_step():
    assert step_of_escape([line(50, 0.17), line(5000, 0.18)], 0.3) is None
    assert step_of_escape([], 0.3) is None


def test_only_validations_with_a_finite_accuracy_count():
    curve = [line(50, 0.9, "train"), {"step": 50, "kind": "valid", "loss": 1.0}, line(100, math.nan), line(150, 0.5)]
    assert step_of_escape(curve, 0.3) == 150


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 30, math.nan])
def test_a_threshold_in_percent_is_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold must be an accuracy in \[0, 1\), got"):
        step_of_escape([line(50, 0.17)], threshold)
