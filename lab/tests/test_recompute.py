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


@pytest.mark.parametrize(("page", "table"), [("README.md", "summary"), ("docs/results.md", "results")])
def test_pages_have_the_results_that_the_records_give_without_the_lab(page, table):
    script = ROOT / "lab" / "recompute_race.py"
    assert not [line for line in script.read_text(encoding="utf-8").splitlines() if "import" in line and "egop" in line]
    done = subprocess.run([sys.executable, script, RECORDS / "race.jsonl"], capture_output=True, text=True, check=True)
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    text = re.search(rf"<!-- race: {table} -->\n(.*?)<!-- end -->", (ROOT / page).read_text("utf-8"), re.S)[1]
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines()]
    names = {title: name for name, title in TITLES.items()}
    shown = {}
    for title, *cells, needed in rows:
        task = names[title]
        shown |= {f"{task}, {method}": cell for method, cell in zip(header[1:-1], cells, strict=True) if cell != "–"}
        if needed[0].isdigit():
            shown[f"{task}, AdamW needs"] = needed
    assert shown == {key: value for key, value in found.items() if key.split(", ", 1)[1] in {*header, "AdamW needs"}}
