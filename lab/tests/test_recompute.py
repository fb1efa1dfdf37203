"""The script that recomputes verdicts says what the lab's judge says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from egop_lab.experiments.registry import find_experiment
from egop_lab.race.tables import TITLES
from egop_lab.training.records import Store

ROOT = Path(__file__).parents[2]
SCRIPT, RECORDS = ROOT / "lab" / "recompute.py", ROOT / "docs" / "records"


def test_five_verdicts_are_the_same_without_the_lab():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert not [line for line in lines if "import" in line and "egop" in line]
    done = subprocess.run([sys.executable, SCRIPT, RECORDS], capture_output=True, text=True, check=True)
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(found) == 5
    assert set(found.values()) == {"holds", "does not hold"}
    judged = {
        item.id: item.verdict
        for id in {claim.partition("/")[0] for claim in found}
        for item in find_experiment(id)("full", Store(RECORDS / f"{id}.jsonl")).judge()
    }
    assert found == {claim: judged[claim] for claim in found}


@pytest.fixture(scope="module")
def recomputed():
    """Return what the script prints, by task and name."""
    script = ROOT / "lab" / "recompute_race.py"
    assert not [line for line in script.read_text(encoding="utf-8").splitlines() if "import" in line and "egop" in line]
    done = subprocess.run([sys.executable, script, RECORDS / "race.jsonl"], capture_output=True, text=True, check=True)
    lines = (line.split(": ") for line in done.stdout.splitlines())
    return {(TITLES[key.split(", ", 1)[0]], key.split(", ", 1)[1]): value for key, value in lines}


def read_table(page, name):
    """Return the header and the rows of a table."""
    text = re.search(rf"<!-- race: {name} -->\n(.*?)<!-- end -->", (ROOT / page).read_text("utf-8"), re.S)[1]
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines()]
    return header, rows


@pytest.mark.parametrize(("page", "name"), [("README.md", "summary"), ("docs/results.md", "results")])
def test_pages_have_the_results_that_the_records_give_without_the_lab(recomputed, page, name):
    header, rows = read_table(page, name)
    shown = {}
    for title, *cells, needed in rows:
        shown |= {(title, method): cell for method, cell in zip(header[1:-1], cells, strict=True) if cell != "–"}
        if needed[0].isdigit():
            shown[title, "AdamW needs"] = needed
    assert shown == {key: value for key, value in recomputed.items() if key[1] in {*header, "AdamW needs"}}


@pytest.mark.parametrize(("name", "column", "key"), [("controls", 4, "rotation"), ("reach", 1, "reached after")])
def test_the_sentences_on_the_first_screen_have_numbers_that_hold_without_the_lab(recomputed, name, column, key):
    _, rows = read_table("docs/results.md", name)
    assert {row[0]: row[column] for row in rows} == {
        title: text for (title, kind), text in recomputed.items() if kind == key
    }
