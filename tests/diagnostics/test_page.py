"""The page of a diagnosis: whole, self-contained, and honest about what is missing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache

import pytest

import egop
import pages
from egop.diagnostics import page
from egop.diagnostics.values import COLUMNS
from egop.runs.records import Curve, Run

SETTINGS = {"structure": "auto", "seed": 0}


def made_of(*args, title="my model", **options):
    return page.page(*args, title=title, settings=SETTINGS, **options)


@cache
def usual():
    """The page of a diagnosis; its picture takes a while to draw."""
    return made_of(pages.diagnosis())


@cache
def raced():
    """The page of a diagnosis and a race."""
    return made_of(pages.diagnosis(), pages.race())


def test_it_has_a_row_a_badge_and_the_advice_of_each_block():
    made = pages.Page(usual())
    assert made.source.startswith("<!DOCTYPE html>")
    assert made.count("tr") == 3 + 4  # blocks and forms, with their heads
    for block in pages.diagnosis().blocks:
        assert block.advice in made.text
    assert [attributes["class"] for tag, attributes in made.tags if tag == "span"][:2] == [
        "badge promising",
        "badge leave",
    ]
    assert made.count("svg") == 1
    assert "52.0 of 2048" in made.text
    assert all(meaning in made.text for meaning in COLUMNS.values())


def test_the_answer_comes_first_then_the_code_and_what_to_expect():
    found = pages.diagnosis()
    made = pages.Page(made_of(found)).text
    places = [made.index(words) for words in (found.verdict, found.code, "What to expect", *found.remarks)]
    assert places == sorted(places)
    assert found.advised.name == "EGOP"


def test_a_race_adds_its_curves_its_words_and_its_losses():
    made = pages.Page(raced())
    assert made.count("svg") == 2
    assert pages.race().summary() in made.text
    assert made.text.count("lr 0.01") >= 2
    assert "partial" not in re.sub(r"<style>.*</style>", "", made.source, flags=re.DOTALL)


def test_nothing_is_loaded_from_anywhere_and_there_are_no_scripts():
    source = raced()
    made = pages.Page(source)
    assert "http" not in source
    assert made.count("script") == made.count("img") == made.count("iframe") == 0
    assert "@import" not in source
    assert set(re.findall(r"url\((.)", source)) <= {"#"}
    links = [attributes["href"] for tag, attributes in made.tags if "href" in attributes]
    assert all(link.startswith("#") or link == "data:," for link in links)


def test_identifiers_are_unique_and_references_find_them():
    made = pages.Page(raced())
    names = [attributes["id"] for _, attributes in made.tags if "id" in attributes]
    assert len(names) == len(set(names))
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', made.source)
    assert references
    assert set(references) <= set(names)


def test_what_users_named_is_escaped():
    evil = "<script>alert('x')</script>&\""
    made = pages.Page(made_of(pages.diagnosis(pages.block(evil, advice=evil)), title=evil))
    assert made.count("script") == 0
    assert made.text.count("alert('x')") >= 3
    settings = page.page(pages.diagnosis(), title="t", settings={"structure": evil})
    assert "<script" not in settings


def test_what_is_missing_is_said():
    source = made_of(pages.diagnosis(partial="sampling was interrupted after 256 of 2048 draws"), pages.race(3))
    text = pages.Page(source).text
    assert "This page is partial: sampling was interrupted after 256 of 2048 draws; 3 of 4 runs" in text
    assert "not run" in text


def test_before_anything_is_sampled_there_is_a_page_without_pictures():
    empty = replace(pages.left("0.weight"), structure="Full", verdict="unknown", advice="Not measured.")
    found = egop.Diagnosis((empty,), None, 0, 2048, None, partial="no gradients have been sampled yet")
    made = pages.Page(made_of(found))
    assert made.count("svg") == 0
    assert "Nothing can be said yet." in made.text


def test_many_blocks_stay_readable():
    blocks = [pages.block(f"layer.{index}.weight", ratio=0.01 * index) for index in range(40)]
    made = pages.Page(made_of(pages.diagnosis(*blocks)))
    legend = [words for words in made.words if re.fullmatch(r"layer\.\d+\.weight \(2048\)", words)]
    assert legend == [f"layer.{index}.weight (2048)" for index in range(8)]  # the most promising ones
    assert "32 others" in made.text
    assert len(made.source) < 400_000


@pytest.mark.parametrize(
    "losses",
    [
        [(2.0, -1.0, -3.0), (2.0, -2.0, -4.0)],  # no logarithms
        [(2.0, math.nan), (2.0, math.inf)],  # both diverged
        [(math.nan,), (math.nan,)],
        [(2.0, 1.0, 0.5)],
        [],
    ],
    ids=str,
)
def test_every_race_can_be_drawn(losses):
    sides = ("original", "EGOP")
    runs = [
        Run("AdamW", side, 1e-3, Curve(loss, diverged=not math.isfinite(loss[-1])))
        for side, loss in zip(sides, losses, strict=False)
    ]
    pages.Page(made_of(pages.diagnosis(), replace(pages.race(), runs=tuple(runs))))


def test_the_page_and_the_numbers_are_written_whole(tmp_path):
    path = page.write(tmp_path / "new", pages.diagnosis(), pages.race(), title="my model", settings=SETTINGS)
    assert sorted(each.name for each in path.parent.iterdir()) == ["diagnosis.html", "diagnosis.json"]
    assert path.read_text(encoding="utf-8") == raced()
    numbers = json.loads(path.with_suffix(".json").read_text())
    assert numbers["diagnosis"]["blocks"][0]["stable_rank"] == 52.0
    assert len(numbers["race"]["runs"]) == 4
    assert numbers["settings"] == SETTINGS
    page.write(tmp_path / "new", pages.diagnosis(), title="my model", settings=SETTINGS)
    assert json.loads(path.with_suffix(".json").read_text())["race"] is None


def test_the_same_values_give_the_same_bytes():
    assert made_of(pages.diagnosis(), pages.race()) == raced()


def test_the_style_sheet_comes_with_the_package():
    assert "prefers-color-scheme: dark" in usual()
