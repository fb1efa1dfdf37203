import math
from dataclasses import replace

import pytest

from egop_lab.experiments import demo
from egop_lab.experiments.demo import Run
from egop_lab.training.loop import Curve


@pytest.fixture(scope="module")
def shown():
    return []


@pytest.fixture(scope="module")
def found(shown):
    return demo.run(epochs=2, seed=1, progress=False, show=shown.append)


def test_every_optimizer_runs_in_both_coordinates_at_one_learning_rate(found):
    assert [(run.optimizer, run.coordinates) for run in found.runs] == [
        (name, coordinates) for name in ("Adam", "Adagrad", "SGD") for coordinates in ("original", "EGOP")
    ]
    for original, reparameterized in found.pairs():
        assert original.lr == reparameterized.lr == demo.LEARNING_RATES[original.optimizer]


def test_the_starts_are_equivalent(found):
    starts = [run.curve.loss[0] for run in found.runs]
    assert starts == pytest.approx([starts[0]] * 6, rel=1e-5)


def test_sgd_is_the_same_in_both_coordinates_and_the_others_are_not(found):
    for original, reparameterized in found.pairs():
        same = original.curve.loss == pytest.approx(reparameterized.curve.loss, rel=1e-3)
        assert same == (original.optimizer == "SGD")


def test_every_run_learns(found):
    for run in found.runs:
        assert len(run.curve.loss) == 3
        assert run.curve.final < 0.7 * run.curve.loss[0]
        assert run.curve.metrics["test accuracy"][-1] > run.curve.metrics["test accuracy"][0]


def test_there_is_a_spectrum_of_each_weight(found):
    assert {name: len(values) for name, values in found.spectra.items()} == {"0.weight": 2048, "2.weight": 320}
    for values in found.spectra.values():
        assert list(values) == sorted(values, reverse=True)


def test_the_basis_is_shown_once(found, shown):
    assert len(shown) == 1
    assert all(name in shown[0] for name in found.spectra)


def pair(before, after, name="Adam"):
    return tuple(
        Run(name, coordinates, 0.1, Curve(loss=loss, seconds=seconds, diverged=not math.isfinite(loss[-1])))
        for coordinates, loss, seconds in (("original", before, 2.0), ("EGOP", after, 7.0))
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            (4.0, 2.0, 1.0),
            (4.0, 1.0, 0.25),
            "reaches the original's final loss after 1 of 2 epochs and ends 4 times lower",
        ),
        (
            (4.0, 2.0, 1.0),
            (4.0, 3.0, 2.0),
            "does not reach the original's final loss in 2 epochs and ends 2 times higher",
        ),
        (
            (4.0, 2.0, 1.0),
            (4.0, 0.5, 3.0),
            "reaches the original's final loss after 1 of 2 epochs and ends 3 times higher",
        ),
        (
            (4.0, 2.0, 1.0),
            (4.0, 2.002, 1.001),
            "is the same in both coordinate systems (in the median epoch, losses differ by 0.001 of",
        ),
        ((4.0, 2.0, 1.0), (4.0, math.nan), "Adam diverged in EGOP coordinates."),
        ((4.0, math.inf), (4.0, math.nan), "Adam diverged in original and EGOP coordinates."),
    ],
)
def test_the_closing_words_say_what_the_numbers_say(before, after, expected):
    found = demo.Demo(epochs=2, seed=7, estimation_seconds=1.0, spectra={}, runs=pair(before, after))
    assert expected in demo.summary(found)
    assert "takes 3.5 times as long. One seed (7)" in demo.summary(found)


def test_the_picture_says_how_much_of_the_training_is_saved():
    runs = pair((4.0, 2.0, 1.0), (4.0, 1.0, 0.25)) + pair((4.0, 2.0, 1.0), (4.0, 2.0, 1.0), "SGD")
    found = demo.Demo(epochs=2, seed=7, estimation_seconds=1.0, spectra={}, runs=runs)
    (panel,) = demo.picture(found, None).panels
    assert [span.label for span in panel.spans] == ["the same loss after 1 of 2 epochs"]
    assert [series.label for series in panel.series] == ["Adam", "Adam, EGOP", "SGD", "SGD, EGOP"]
    never = replace(found, runs=pair((4.0, 2.0, 1.0), (4.0, 3.0, 2.0)))
    assert demo.panel(never).spans == []


def test_a_loss_of_zero_does_not_break_the_closing_words():
    found = demo.Demo(epochs=1, seed=0, estimation_seconds=1.0, spectra={}, runs=pair((1.0, 0.5), (0.9, 0.0)))
    assert "ends at zero" in demo.summary(found)
    assert "is the same" in demo.summary(replace(found, runs=pair((1.0, 0.0), (1.0, 0.0))))
