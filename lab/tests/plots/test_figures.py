import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import matplotlib
import pytest

from egop_lab.plots.bars import add_direction
from egop_lab.plots.colors import BACK, COLORS, INK, get_family_color
from egop_lab.plots.figures import draw_picture, save_figure
from egop_lab.plots.picture import Mark, Panel, Picture, Series, Span

X = (0, 1, 2)
PAIR = (
    Series("Adam", X, (2.0, 1.0, 0.5), method="Adam"),
    Series("Adam, EGOP", X, (2.0, 0.1, 0.01), method="Adam", egop=True),
)
LION = Series("Lion", X, (2.0, math.inf, math.nan))


def panel(*series, **options):
    return Panel("Training loss", "epoch", "loss", series, **options)


def drawn(*panels):
    return draw_picture(Picture("picture", "", panels))


def words(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_lines_have_a_colour_per_method_and_dashes_for_egop():
    (axes,) = drawn(panel(*PAIR, LION)).axes
    original, reparameterized, other = axes.lines
    assert original.get_color() == reparameterized.get_color() == COLORS["Adam"] != other.get_color()
    assert original.get_linestyle() == "-"
    assert reparameterized.get_linestyle() == "--"
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "loss (lower is better)"


def test_lines_are_labelled_at_their_ends_without_overlap():
    close = [Series(f"line {k}", X, (1.0, 1.0, 1.0 + k / 1000)) for k in range(5)]
    figure = drawn(panel(*close))
    (axes,) = figure.axes
    assert words(axes) == [series.label for series in close]
    assert axes.get_legend() is None
    assert figure.legends == []
    places = [text.get_position()[1] for text in axes.texts]
    height = axes.bbox.height / figure.dpi * 72
    assert places == sorted(places)
    assert min(b - a for a, b in pairwise(places)) * height > 10.9
    assert places[0] >= 0
    assert places[-1] <= 1
    assert [text.get_color() for text in axes.texts] == [line.get_color() for line in axes.lines]


def test_line_without_finite_values_has_no_label():
    never = Series("never", X, (math.nan, math.inf, math.nan))
    (axes,) = drawn(panel(PAIR[0], never)).axes
    assert words(axes) == ["Adam"]


def test_panels_with_the_same_lines_share_a_legend():
    three = [*PAIR, Series("SGD", X, (2.0, 1.5, 1.2), method="SGD")]
    figure = drawn(panel(*three), panel(*three))
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["Adam", "SGD", "original coordinates", "EGOP coordinates"]
    assert [words(axes) for axes in figure.axes] == [[], []]


def test_legend_lists_all_lines_that_are_not_pairs():
    named = [Series(f"form {k}", X, (1.0, 0.5, 0.2), egop=k > 3) for k in range(11)]
    (legend,) = drawn(panel(*named)).legends
    assert [text.get_text() for text in legend.get_texts()] == [f"form {k}" for k in range(11)]


def test_logarithmic_axis_is_cut_far_below_the_start():
    (axes,) = drawn(panel(Series("a", X, (1.0, 1e-8, 1e-30)))).axes
    assert axes.get_ylim()[0] == pytest.approx(1e-16)
    assert "cut at 1e-16 of the start" in words(axes)
    label = next(text for text in axes.texts if text.get_text() == "a")
    assert label.xy == pytest.approx((15 / 11, 1e-16), rel=1e-3), "where it leaves the picture"
    (axes,) = drawn(panel(Series("a", X, (1.0, 1e-10, 1e8)))).axes  # high ends cut nothing off
    assert "cut at 1e-16 of the start" not in words(axes)


def test_quartiles_lie_behind_all_lines():
    banded = Series("a", X, (3.0, 2.0, 1.0), (2.0, 1.5, 0.5), (4.0, 3.0, 2.0))
    (axes,) = drawn(panel(banded)).axes
    (band,) = axes.collections
    assert band.get_zorder() < min(line.get_zorder() for line in axes.lines)
    assert band.get_alpha() < 0.2


def test_marks_spans_and_reference_lines_are_labelled():
    given = panel(
        PAIR[0], marks=[Mark("start", 0, 2.0)], spans=[Span("saved", 2, 1, 0.5, "Adam")], horizontal={"goal": 1.0}
    )
    (axes,) = drawn(given).axes
    assert {"start", "saved", "goal"} <= set(words(axes))


def test_faint_lines_have_no_label():
    (axes,) = drawn(panel(PAIR[0], Series("behind", X, (1.0, 1.0, 1.0), faint=True))).axes
    assert words(axes) == ["Adam"]


def test_bars_have_family_colours_and_numbers():
    names = ["AdamW", "EGOP online", "Muon", "NorMuon", "something"]
    bars = Series("steps", names, [800.0, math.inf, 380.0, 400.0, math.nan])
    (axes,) = drawn(Panel("Steps", "", "steps", [bars], yscale="linear", kind="bar")).axes
    assert [text.get_text() for text in axes.texts] == ["800", "never", "380", "400", ""]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    colors = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in axes.patches]
    assert colors[:2] == [COLORS["AdamW"], COLORS["EGOP"]]
    assert colors[2] == colors[3] == COLORS["Muon"]
    assert axes.yaxis_inverted(), "the first is at the top"
    assert axes.get_xlabel() == "steps (lower is better)"


def test_adjacent_bar_panels_share_row_names():
    series = Series("steps", ["a", "b"], [1.0, 2.0])
    first, second = drawn(*(Panel("x", "", "steps", [series], kind="bar") for _ in range(2))).axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in second.get_yticklabels()] == ["", ""]


def test_bars_without_known_values_are_left_out():
    series = [Series("steps", ["a"], [1.0]), Series("time", ["a"], [math.nan])]
    (axes,) = drawn(Panel("x", "", "share of a", series, kind="bar")).axes
    assert len(axes.patches) == 1
    assert axes.get_legend() is None


@pytest.mark.parametrize(
    ("said", "direction"),
    [("validation loss", "lower"), ("ten-crop accuracy", "higher"), ("steps saved", "higher"), ("λₖ / λ₁", None)],
)
def test_axis_label_says_which_direction_is_better(said, direction):
    assert add_direction(said) == (said if direction is None else f"{said} ({direction} is better)")


def test_family_colour_follows_the_name():
    assert get_family_color("PolarAdam, online smaller") == get_family_color("EGOP fixed") == COLORS["EGOP"]
    assert get_family_color("AdamW") == COLORS["AdamW"]
    assert get_family_color("SGD+momentum") == COLORS["SGD+momentum"] != get_family_color("SGD")


def test_the_same_picture_gives_the_same_bytes(tmp_path):
    contents = []
    for name in ("a", "b"):
        path = tmp_path / name / "picture.svg"
        save_figure(drawn(panel(*PAIR)), path)
        contents.append(path.read_bytes())
        assert list(path.parent.iterdir()) == [path]
    assert contents[0] == contents[1]


def test_paths_of_an_svg_have_two_digits(tmp_path):
    path = tmp_path / "picture.svg"
    save_figure(drawn(panel(*PAIR)), path)
    paths = re.findall(r' d="([^"]*)"', path.read_text())
    assert any("." in each for each in paths)
    assert not [each for each in paths if re.search(r"\.\d{3}|\n", each)]


def test_svg_has_a_dark_style(tmp_path):
    path = tmp_path / "picture.svg"
    save_figure(drawn(panel(*PAIR), panel(*PAIR)), path)
    tree = ElementTree.parse(path)
    identifiers = {element.get("id") for element in tree.iter()}
    assert {"axes_1", "axes_2"} <= identifiers
    source = path.read_text()
    assert "@media (prefers-color-scheme: dark)" in source
    for color in (INK, BACK):
        assert f'[style*="fill: {color}"]' in source
        assert f'style="fill: {color}' in source, "what the style sheet looks for is there"


def test_plotting_changes_no_global_setting(tmp_path):
    before = dict(matplotlib.rcParams)
    save_figure(drawn(panel(*PAIR)), tmp_path / "picture.svg")
    assert dict(matplotlib.rcParams) == before


def test_line_below_the_cut_is_labelled_where_it_leaves():
    series = [Series("deep", [1, 10], [1.0, 1e-32]), Series("flat", [1, 10], [1.0, 1e-2])]
    figure = draw_picture(Picture("x", "", [Panel("", "x", "loss", series, xscale="log", yscale="log")]))
    labels = {text.get_text(): text.xy for text in figure.axes[0].texts if text.get_text() in ("deep", "flat")}
    assert labels["flat"] == (10, 1e-2)
    assert labels["deep"] == pytest.approx((10**0.5, 1e-16), rel=1e-3)
