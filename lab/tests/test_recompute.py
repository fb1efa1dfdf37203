"""The script that recomputes verdicts says what the lab's judge says."""

import subprocess
import sys
from pathlib import Path

from egop_lab.experiments.registry import experiment
from egop_lab.experiments.reproduce import open_store

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
        for item in experiment(id).judge(open_store(RECORDS, id), "full")
    }
    assert found == {claim: judged[claim] for claim in found}
