"""Summaries over trials and learning rates."""

import math

import pytest

from egop_lab.experiments.curves import (
    check_same_in_both,
    first_below,
    median,
    quartiles,
    quartiles_by_rate,
    rank_correlation,
    rate_series,
)
from egop_lab.training.batched import EGOP
from egop_lab.training.records import Record
from egop_lab.training.tuning import best_rate


def test_medians_and_quartiles_count_what_is_not_finite_as_worst():
    low, middle, high = quartiles([[1.0, math.nan], [2.0, 5.0], [3.0, math.inf], [4.0, 6.0], [5.0, math.nan]])
    assert (low, middle, high) == ([2.0, 6.0], [3.0, math.inf], [4.0, math.inf])
    assert median([math.nan, 1.0, math.inf]) == math.inf
    assert median([3.0, math.nan, 1.0]) == 3.0
    assert median([4.0, 1.0]) == 2.5
    assert quartiles([[4.0], [1.0]])[1] == [2.5]


def test_first_below():
    assert first_below([4.0, 2.0, 3.0], 2.0) == 1
    assert first_below([math.nan, 4.0], 2.0) is None


def records(losses):
    return [Record({"lr": rate, "seed": seed}, {"loss": [loss]})
            for rate, values in losses.items() for seed, loss in enumerate(values)]  # fmt: skip


def final(result):
    return result["loss"][-1]


def test_the_best_rate_has_the_smallest_median_and_ties_go_to_the_smaller():
    runs = records({0.4: [1.0, 1.0, 1.0], 0.1: [5.0, 1.0, 1.0], 0.2: [0.0, math.nan, math.nan]})
    assert best_rate(runs, final) == 0.1
    assert list(quartiles_by_rate(runs, final)) == [0.1, 0.2, 0.4]
    series = rate_series(runs, final, "Adam", EGOP, 0.1)
    assert (series.label, series.x, series.egop, series.chosen) == ("Adam, EGOP", [0.1, 0.2, 0.4], True, 0.1)
    assert list(series.median) == [1.0, math.inf, 1.0]


def test_sgd_that_differs_between_coordinates_is_an_error():
    one = [Record({"seed": 0}, {"loss": [1.0, 0.5, 0.25]})]
    passed = check_same_in_both("toy/same", "SGD on least squares", one, one, "loss", 1e-6)
    assert (passed.verdict, passed.kind) == ("holds", "check")
    assert passed.statement == "Check: SGD on least squares is the same in both coordinate systems."
    other = [Record({"seed": 0}, {"loss": [1.0, 0.6, 0.3]})]
    with pytest.raises(AssertionError, match="toy/same: SGD differs between coordinates"):
        check_same_in_both("toy/same", "SGD", one, other, "loss", 1e-6)


def test_equal_values_share_their_rank():
    assert rank_correlation([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
