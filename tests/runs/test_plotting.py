import math
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from egop.runs import Panel, Picture, Series, plotting
from egop.runs.records import Curve, Run

RUNS = [
    Run("Adam", "original", 0.1, Curve(loss=(2.0, 1.0, 0.5))),
    Run("Adam", "EGOP", 0.1, Curve(loss=(2.0, 0.1, 0.01))),
    Run("Lion", "original", 0.1, Curve(loss=(2.0, math.nan), diverged=True)),
]
SPECTRA = {"0.weight": (4.0, 1.0, 1e-20, 0.0), "2.weight": (3.0, 2.0)}


def test_losses_have_a_colour_an_optimizer_and_dashes_in_egop_coordinates():
    axes = Figure().subplots()
    plotting.plot_losses(axes, RUNS)
    original, reparameterized, other = axes.lines
    assert original.get_color() == reparameterized.get_color() != other.get_color()
    assert original.get_linestyle() == "-"
    assert reparameterized.get_linestyle() == "--"
    assert axes.get_yscale() == "log"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["Adam", "Lion", "original coordinates", "EGOP coordinates"]


def test_spectra_are_relative_and_end_at_the_numerical_rank():
    axes = Figure().subplots()
    plotting.plot_spectra(axes, SPECTRA)
    first, second = axes.lines
    assert first.get_ydata().tolist() == [1.0, 0.25]
    assert first.get_xdata().tolist() == [1, 2]
    assert second.get_ydata().tolist() == pytest.approx([1.0, 2 / 3])
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_records_give_the_same_bytes(tmp_path, kind):
    contents = []
    for name in ("a", "b"):
        path = tmp_path / name / f"picture.{kind}"
        plotting.save(plotting.loss_and_spectra(RUNS, SPECTRA), path)
        contents.append(path.read_bytes())
        assert list(path.parent.iterdir()) == [path]
    assert contents[0] == contents[1]


def test_the_picture_is_an_svg_of_two_panels(tmp_path):
    path = tmp_path / "picture.svg"
    plotting.save(plotting.loss_and_spectra(RUNS, SPECTRA), path)
    identifiers = {element.get("id") for element in ElementTree.parse(path).iter()}
    assert {"axes_1", "axes_2"} <= identifiers
    assert "axes_3" not in identifiers


def test_plotting_changes_no_global_setting(tmp_path):
    before = dict(matplotlib.rcParams)
    plotting.save(plotting.loss_and_spectra(RUNS, SPECTRA), tmp_path / "picture.svg")
    assert dict(matplotlib.rcParams) == before


def test_an_ending_nobody_knows_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="xyz"):
        plotting.save(plotting.loss_and_spectra(RUNS, SPECTRA), tmp_path / "picture.xyz")
    assert list(tmp_path.iterdir()) == []


def test_cells_have_rows_with_names_and_numbers_where_there_are_some():
    rows = [Series("one", ["a", "b"], [1.0, math.nan]), Series("two", ["a", "b"], [2.0, math.inf])]
    figure = plotting.draw(Picture("grid", "", [Panel("Grid", "", "", rows, kind="cells")]))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["1.000", "–", "2.000", "–"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    assert axes.yaxis_inverted(), "the first row is at the top"
