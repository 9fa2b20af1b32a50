"""Bins of whole numbers."""

import itertools

import pytest

from mgk.reproduction.rank_histograms import BINS, edges


@pytest.mark.parametrize(("low", "high"), [(5, 5), (93, 96), (0, 23), (0, 24), (10, 1034), (1, 4096)])
def test_every_rank_is_inside_one_bin(low, high):
    found = edges(low, high)
    widths = {after - before for before, after in itertools.pairwise(found)}
    assert found[0] == low - 0.5
    assert found[-1] > high
    assert len(found) - 1 <= BINS
    assert len(widths) == 1
    assert all(edge % 1 == 0.5 for edge in found)
    assert found[-2] < high + 0.5
