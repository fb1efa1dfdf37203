import math

import pytest

from egop_lab.training.records import Record
from egop_lab.training.tuning import doublings, powers_of_ten, search_rates, search_two_stage


def search(function, lowest=-3, highest=2):
    calls = []

    def evaluate(rates):
        calls.append(list(rates))
        return {rate: function(rate) for rate in rates}

    best, scores = search_two_stage(evaluate, lowest, highest)
    return best, scores, calls


def distance(target):
    return lambda rate: abs(math.log10(rate / target))


def test_the_grids_are_the_papers():
    assert powers_of_ten(-3, 2) == [0.001, 0.01, 0.1, 1.0, 10.0, 100.0]
    assert doublings(0.01, 1.0) == [0.01, 0.02, 0.04, 0.08, 0.1, 0.2, 0.4, 0.8, 1.0]


@pytest.mark.parametrize("target", [0.02, 0.04, 0.8, 1.0, 2.0, 80.0])
def test_the_best_rate_of_the_grid_is_found(target):
    best, _, _ = search(distance(target))
    assert best == target


def test_first_all_decades_then_doublings_around_the_best_and_no_rate_twice():
    _, scores, calls = search(distance(0.1))
    assert calls == [powers_of_ten(-3, 2), [0.02, 0.04, 0.08, 0.2, 0.4, 0.8]]
    assert list(scores) == sorted(set(calls[0] + calls[1]))


def test_the_search_stays_between_its_ends():
    best, scores, _ = search(distance(1e5))
    assert best == max(scores) == 100.0
    best, scores, _ = search(distance(1e-9))
    assert best == min(scores) == 0.001


def test_of_equal_scores_the_smaller_rate():
    best, _, calls = search(lambda rate: 1.0)
    assert best == 0.001
    assert calls[1] == [0.002, 0.004, 0.008]


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
def test_rates_that_diverge_are_never_chosen(bad):
    best, scores, _ = search(lambda rate: bad if rate > 0.1 else -rate)
    assert best == 0.1
    assert scores[1.0] == math.inf


def test_when_every_rate_diverges_the_search_ends_after_the_decades():
    best, scores, calls = search(lambda rate: math.nan)
    assert len(calls) == 1
    assert best == 0.001
    assert set(scores.values()) == {math.inf}


LADDER = [1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("target", "tried", "expected"),
    [
        (4.0, [2.0, 4.0], (None, [8.0])),
        (4.0, [2.0, 4.0, 8.0], (4.0, [])),
        (16.0, [2.0, 4.0, 8.0], (None, [16.0])),
        (16.0, [2.0, 4.0, 8.0, 16.0], (16.0, [])),
        (1.0, [2.0, 4.0, 8.0], (None, [1.0])),
    ],
)
def test_a_ladder_is_searched_outward_while_the_best_rate_is_at_an_end(target, tried, expected):
    runs = [Record({"lr": rate}, {"loss": distance(target)(rate)}) for rate in tried]
    best, left = search_rates(LADDER, [2.0, 4.0, 8.0], runs, lambda result: result["loss"])
    assert (None if math.isnan(best) else best, left) == expected
