"""Every failing claim has a cause, and claims with one cause are one finding."""

from pathlib import Path

from egop_lab.experiments.base import Judgement
from egop_lab.experiments.registry import IDS, find_experiment
from egop_lab.report import reproduction, wording
from egop_lab.report.failures import FINDINGS, find_cause, group_failures

RECORDS = Path(__file__).parents[3] / "docs" / "records"


def judge(id, verdict="does not hold", **more):
    return Judgement(id, "A claim.", verdict, "Measured.", **more)


def test_claims_of_one_cause_are_one_row_with_their_margins():
    items = [
        judge("matrix-factorization/Adam-lower", margin=0.0),
        judge("matrix-factorization/Adagrad-lower", margin=-1.0),
        judge("matrix-factorization/Adam-closer", "holds", margin=1.0),
        judge("linear-networks/Adam-first-layer"),
    ]
    first, second = group_failures(items)
    assert first[1:] == (
        "our tuning",
        "matrix-factorization/Adam-lower (equal); matrix-factorization/Adagrad-lower (reversed by a factor of 10)",
    )
    assert second[1:] == ("not reproducible here", "linear-networks/Adam-first-layer (Measured)")
    assert wording.list_findings(items[0])[-1].startswith("Cause: our tuning. With fine grids")
    assert not any("Cause" in line for line in wording.list_findings(items[2]))


def test_a_failure_without_a_cause_is_said_to_be_unexplained():
    assert find_cause(judge("toy/new")).reason == "unexplained"
    assert find_cause(judge("toy/new", kind="control")) is None


def test_every_failing_claim_of_the_records_has_a_cause_and_no_cause_is_left_over():
    judged = [item for section in reproduction.load_sections(RECORDS) for item in section.judged]
    causes = [find_cause(item) for item in judged]
    assert "unexplained" not in {cause.reason for cause in causes if cause}
    assert set(FINDINGS) == {cause for cause in causes if cause}
    known = {item.id for item in judged}
    assert {claim for finding in FINDINGS for claim in finding.claims} <= known
    assert {id.partition("/")[0] for id in known} <= set(IDS)


def test_the_report_has_a_page_of_them(tmp_path):
    section = reproduction.Section(find_experiment("convex")("full"), (judge("convex/logistic-Adam-unchanged"),))
    reproduction.write_markdown([section], tmp_path / "r.md")
    assert "[Why claims fail](r/failures.md): 1 cause: strict rule (1)." in (tmp_path / "r.md").read_text()
    assert "| strict rule | convex/logistic-Adam-unchanged (Measured) |" in (tmp_path / "r/failures.md").read_text()
