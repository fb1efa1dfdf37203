import math

import pytest

from egop_lab.experiments import demo_language
from egop_lab.experiments.demo_language import Language, LanguageRun


@pytest.fixture(scope="module")
def found():
    return demo_language.run(steps=12, seed=1, progress=False)


def test_both_start_alike_and_learn(found):
    adamw, rotated = found.runs
    assert (adamw.optimizer, rotated.optimizer) == ("AdamW", "EGOP")
    assert adamw.loss[0] == rotated.loss[0] == pytest.approx(math.log(256), rel=0.02)
    assert adamw.steps == rotated.steps == (0, 10, 12)
    for run in found.runs:
        assert run.lr == demo_language.LEARNING_RATES[run.optimizer]
        assert run.loss[-1] < run.loss[0] - 0.3
        assert list(run.seconds) == sorted(run.seconds)


def test_the_text_is_egops_own_source(found):
    text = demo_language.read_own_source()
    assert found.characters == len(text.train) + len(text.validation)
    assert b"class Basis(" in bytes(text.train.tolist())


def test_the_learning_rate_warms_up_stays_and_ends():
    factors = [demo_language._factor(step, 200) for step in range(200)]
    assert factors[0] == pytest.approx(1 / 40)
    assert factors[39:121] == [1.0] * 82
    assert factors[-1] == pytest.approx(1 / 80)


def language(adamw, rotated, slower=1.5):
    steps = tuple(10 * k for k in range(len(adamw)))
    return Language(
        100,
        1000,
        (
            LanguageRun("AdamW", 0.1, adamw, tuple(map(float, steps)), steps),
            LanguageRun("EGOP", 0.2, rotated, tuple(slower * step for step in steps), steps),
        ),
    )


@pytest.mark.parametrize(
    ("given", "expected", "spans"),
    [
        (
            language((5.0, 4.0, 3.0), (5.0, 3.0, 2.0)),
            "after 10 of 20 steps, in 15.0 s; AdamW took 20.0 s, 1.3 times as long. It ends at 2.00",
            ["the same loss in 15.0 of 20.0 s"],
        ),
        (language((5.0, 4.0, 3.0), (5.0, 4.0, 2.9)), "30.0 s; AdamW took 20.0 s, which is no gain by the clock.", []),
        (language((5.0, 4.0, 3.0), (5.0, 4.0, 3.5)), "EGOP does not reach AdamW's last loss in 20 steps.", []),
    ],
)
def test_words_and_picture_say_what_the_numbers_say(given, expected, spans):
    assert expected in demo_language.summary(given)
    assert "A step of EGOP takes 1.50 times AdamW's here." in demo_language.summary(given)
    panel = demo_language.panel(given)
    assert [span.label for span in panel.spans] == spans
    assert [series.label for series in panel.series] == ["AdamW, lr 0.1", "EGOP, lr 0.2"]
    assert panel.xlabel == "seconds of training"
