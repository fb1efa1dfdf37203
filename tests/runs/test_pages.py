"""Pieces for notebooks: tables and small pictures."""

from egop.runs import html_table, sparkline
from pages import Page


def test_cells_are_escaped_but_those_that_are_html():
    made = Page(html_table(["<a>", "b"], [["<script>", "<svg></svg>"]], raw=[1]))
    assert (made.count("script"), made.count("svg"), made.count("a")) == (0, 1, 0)
    assert "<script>" in made.text
    assert "<a>" in made.text


def test_a_small_picture_is_a_falling_line_in_the_colour_of_the_text():
    made = Page(sparkline([1.0, 0.1, 0.001, 1e-20, 0.0], 'of "w"'))
    ((_, attributes),) = [tag for tag in made.tags if tag[0] == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in attributes["points"].split()]
    assert len(points) == 3, "what is rounding is not drawn"
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points), "down is larger"
    assert all(0 <= x <= 80 and 0 <= y <= 22 for x, y in points)
    assert attributes["stroke"] == "currentColor"


def test_there_is_nothing_to_draw_of_zeros_or_one_value():
    assert sparkline([], "") == sparkline([0.0, 0.0], "") == sparkline([1.0], "") == ""
