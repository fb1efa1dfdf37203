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
    done = subprocess.run([sys.executable, script, RECORDS], capture_output=True, text=True, check=True)
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
    names = [name.replace("steps AdamW needs to match EGOP", "AdamW needs") for name in header[1:]]
    pairs = [(title, zip(names, cells, strict=True)) for title, *cells in rows]
    shown = {(title, name): cell for title, cells in pairs for name, cell in cells if cell != "–"}
    assert shown == {key: value for key, value in recomputed.items() if key[1] in names}


@pytest.mark.parametrize(
    ("name", "column", "key"),
    [
        ("longer", -1, "AdamW needs"),
        ("controls", 3, "EGOP, random rotation"),
        ("controls", 4, "rotation"),
        ("reach", 1, "AdamW reached"),
        ("reach", 2, "AdamW reached in time"),
        ("reach", 3, "Muon reached"),
        ("reach", 4, "Muon reached in time"),
        ("reach", 5, "PolarAdam reached"),
        ("reach", 6, "PolarAdam reached in time"),
    ],
)
def test_tables_of_gains_hold_without_the_lab(recomputed, name, column, key):
    _, rows = read_table("docs/results.md", name)
    assert {row[0]: row[column] for row in rows if row[column] != "–"} == {
        title: text for (title, kind), text in recomputed.items() if kind == key
    }


def test_the_sentences_of_the_readme_hold_without_the_lab(recomputed):
    def span(kind, some):
        found = [text for (title, name), text in recomputed.items() if name == kind and some in title]
        values = [float(re.match(r"[\d.]+", text)[0]) for text in found if not text.startswith("never")]
        return min(values), max(values)

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    low, high = span("gain without rotation", "00 steps")
    assert f"{low:.0f} to {high:.0f} % of the gain over AdamW remains without it" in text
    low, high = span("Muon reached", "GPT")
    assert f"It reaches Muon's loss after {low:.0f} to {high:.0f} % of the steps" in text
    low, high = span("AdamW reached", "GPT 6×384, ")
    assert f"`EGOP` needs {high:.0f} % of 1,600 steps, but {low:.0f} % of 400" in text
    low, high = span("PolarAdam reached", ", 400 steps")
    assert f"saves {100 - high:.0f} to {100 - low:.0f} % of the steps, but hardly any time" in text
    assert span("PolarAdam reached in time", "GPT")[0] >= 98
    assert "in about half of AdamW's time on the three transformers timed" in text
    assert 40 <= span("AdamW reached in time", "6×384,")[0] <= span("AdamW reached in time", "T ")[1] <= 50
    assert f"and in {span('AdamW reached in time', 'ResNet')[0]:.0f} % on ResNet-34" in text
    assert "from a quarter of AdamW's to 2.8 times it" in text
    assert tuple(map(round, span("rate over AdamW's", ""), (2, 1))) == (0.25, 2.8)
    assert "1.1 to 1.3 times as long as AdamW's in CUDA graphs (1.0 to 1.4 in eager mode, with older code)" in text
    assert tuple(round(value, 1) for value in span("CUDA graph", "")) == (1.1, 1.3)
    assert tuple(round(value, 1) for value in span("eager", "")) == (1.0, 1.4)
