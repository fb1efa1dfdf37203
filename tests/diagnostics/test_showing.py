"""What a diagnosis and a found rate show in a line, in a notebook, and as a picture."""

from __future__ import annotations

import math

import pytest

import egop
import pages

HOSTILE = "<script>alert(1)</script>"


def test_a_diagnosis_is_short_in_a_line():
    assert repr(pages.diagnosis()) == "Diagnosis(2 blocks, 2048 draws: EGOP)"
    assert repr(pages.diagnosis(partial="interrupted")).endswith(": EGOP, partial)")
    assert repr(pages.block()) == "BlockDiagnosis('0.weight', Full, stable rank 52.0 of 2048, 'promising')"
    assert repr(pages.left()) == "BlockDiagnosis('2.weight', left, 'leave')"


def test_a_notebook_shows_verdict_table_advice_and_code():
    made = pages.Page(pages.diagnosis(partial="interrupted")._repr_html_())
    diagnosis = pages.diagnosis()
    for words in (diagnosis.verdict, "PARTIAL: interrupted", "52.0 of 2048", "50 %", diagnosis.code.splitlines()[0]):
        assert words in made.text
    for block in diagnosis.blocks:
        assert block.advice in made.text
    assert made.count("tr") == 1 + len(diagnosis.forms) + 1 + len(diagnosis.blocks)


def test_every_name_is_escaped():
    diagnosis = pages.diagnosis(pages.block(HOSTILE, advice=HOSTILE))
    found = egop.diagnostics.FoundRate(0.1, (0.1,), (1.0,), HOSTILE)
    for shown in (diagnosis._repr_html_(), found._repr_html_()):
        assert "<script" not in shown
        assert HOSTILE in pages.Page(shown).text


def test_a_found_rate_shows_all_that_were_tried():
    found = egop.diagnostics.FoundRate(0.02, (0.01, 0.02, 0.05), (0.7, 0.4, math.inf), "lr 0.02.")
    made = pages.Page(found._repr_html_())
    assert made.count("tr") == 4
    for words in ("lr 0.02.", "0.01", "0.7", "proposed", "diverged"):
        assert words in made.text


def test_a_diagnosis_is_plotted():
    (axes,) = pages.diagnosis().plot().axes
    (line,) = axes.lines[:1]
    assert line.get_ydata()[0] == 1.0
    with pytest.raises(ValueError, match="no spectrum to plot"):
        pages.diagnosis(pages.left()).plot()
