"""Each figure, table, algorithm and statement of the paper, in its order: where it is here, and what is missing."""

from dataclasses import dataclass
from importlib import resources

_MISSING = {
    "imagenet": "The residual networks are not trained on ImageNet for 40 epochs, which takes hours a run, but on "
    "Imagenette's 9,469 images at 96 pixels and for fewer epochs. Orders and ratios can be compared, hours and losses "
    "cannot.",
    "sets": "The optimizer stays in a ball or, with an infinite radius, anywhere. Boxes are in a test only: projecting "
    "in Adagrad's metric is a programme of its own for every kind of set.",
    "test": "A test only: there is nothing in it to compute.",
    "logarithm": "The paper does not give the polynomial inside its logarithm; the bound here has a logarithm of its "
    "own.",
}


@dataclass(frozen=True)
class Statement:
    """One label of the paper: a row of ``statements.md``."""

    label: str  # in the paper's LaTeX; for a statement without one, its kind and section
    kind: str  # figure, table, algorithm, theorem, lemma, corollary or assumption
    about: str  # what it says, in short
    where: tuple[str, ...]  # ids of experiments, names of egop and egop_lab.theory, and tests as file::function
    verdict: str  # ours; experiments have theirs from their records
    missing: tuple[str, ...]  # sentences on what is missing or different here, and why


def _parse_row(row: str) -> Statement:
    label, kind, about, where, verdict, missing = (cell.strip() for cell in row.split("|")[1:-1])
    reasons = tuple(_MISSING[key] for key in missing.split(", ") if key)
    return Statement(label, kind, about, tuple(filter(None, where.split(", "))), verdict, reasons)


_table = (resources.files("egop_lab.report") / "statements.md").read_text(encoding="utf-8")
STATEMENTS: tuple[Statement, ...] = tuple(map(_parse_row, _table.splitlines()[2:]))
