"""The index names every figure, table, algorithm and statement of the paper, and only what is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

import egop
from egop_lab import theory
from egop_lab.experiments.base import Judgement
from egop_lab.experiments.registry import IDS, find_experiment
from egop_lab.report import index, reproduction
from egop_lab.report.statements import STATEMENTS

ROOT = Path(__file__).parents[3]
PAPER = next((paper for each in ROOT.parents if (paper := each / "shared" / "paper" / "egop.tex").exists()), None)
KINDS = ("algorithm", "assumption", "corollary", "figure", "lemma", "table", "theorem")
LAYOUT = ("center", "minipage", "subfigure", "tabular")  # labels inside these belong to the environment around them
TOKEN = re.compile(r"\\(?:(begin|end)\{(\w+)\*?\}|label\{([^}]*)\})")
COMMENT = re.compile(r"(?<!\\)%.*")


def parse_labels(tex):
    """Parse the labels of figures, tables, algorithms and statements from LaTeX, in order, each with its kind.

    A statement without a label is named after the section that it is in. Labels of equations and sections are left out.
    """
    found, around = {}, []
    section, named = "", True
    for boundary, environment, label in TOKEN.findall(COMMENT.sub("", tex)):
        if boundary == "begin":
            around.append(environment)
            named = named and environment not in KINDS
        elif boundary == "end":
            if not around or around.pop() != environment:
                raise ValueError(f"Invalid LaTeX: \\end{{{environment}}} without its \\begin.")
            if environment in KINDS:
                if not named:
                    found[f"{environment} in {section}"] = environment
                named = True
        else:
            outside = [each for each in around if each not in LAYOUT]
            if outside and outside[-1] in KINDS:
                found[label] = "table" if label.startswith("tab") else outside[-1]
                named = True
            elif outside in ([], ["document"]):
                section = label
    return found


TEX = r"""
\begin{document}
\section{One}\label{sec:one}
\begin{figure*}
  \begin{subfigure}{1cm} \label{fig:part} \end{subfigure}
  \begin{subfigure}{1cm} \begin{tabular}{l} 50\% \end{tabular} \label{table:part} \end{subfigure}
  \caption{It is.}\label{fig:whole}
\end{figure*}
% \begin{lemma}\label{lem:commented} \end{lemma}
\begin{theorem}[Named]\label{thm:one}
  \begin{equation} \begin{aligned} x \end{aligned} \label{eq:inside} \end{equation}
\end{theorem}
\begin{equation}\label{eq:outside} y \end{equation}
\section{Two}\label{sec:two}
\begin{lemma} \begin{equation}\label{eq:of-lemma} z \end{equation} \end{lemma}
\begin{algorithm} \caption{A}\label{alg:one} \begin{algorithmic} \State s \end{algorithmic} \end{algorithm}
\end{document}
"""


def test_labels_are_those_of_figures_tables_algorithms_and_statements():
    assert parse_labels(TEX) == {
        "fig:part": "figure",
        "table:part": "table",
        "fig:whole": "figure",
        "thm:one": "theorem",
        "lemma in sec:two": "lemma",
        "alg:one": "algorithm",
    }


def test_an_environment_that_was_not_begun_is_an_error():
    with pytest.raises(ValueError, match=r"Invalid LaTeX: \\end\{lemma\} without its \\begin"):
        parse_labels(r"\begin{figure}\end{lemma}")


@pytest.mark.skipif(PAPER is None, reason="the paper's LaTeX is not in shared/paper beside or above the repository")
def test_every_label_of_the_paper_has_a_row_in_its_order():
    found = parse_labels(PAPER.read_text(encoding="utf-8"))
    assert {each.label: each.kind for each in STATEMENTS} == found
    assert [each.label for each in STATEMENTS] == list(found)


def test_no_label_has_two_rows():
    assert len({each.label for each in STATEMENTS}) == len(STATEMENTS) == 52


@cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def is_there(place):
    if "::" in place:
        file, _, function = place.partition("::")
        return function in functions(file)
    if place.startswith("egop_lab.theory."):
        return place.removeprefix("egop_lab.theory.") in theory.__all__
    if place.startswith("egop."):
        return callable(attrgetter(place.removeprefix("egop."))(egop))
    return find_experiment(place).id in IDS


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.label)
def test_what_a_row_names_is_there(statement):
    assert all(is_there(place) for place in statement.where)
    assert statement.where or statement.missing, "what is nowhere has a reason"
    assert statement.verdict or any(place in IDS for place in statement.where), "there is a verdict"


def test_the_check_sees_what_is_not_there():
    assert not is_there("lab/tests/theory/test_bounds.py::test_that_nobody_wrote")
    assert not is_there("egop_lab.theory.nothing")
    with pytest.raises(KeyError):
        is_there("nothing")


def test_every_function_of_the_theory_and_every_experiment_on_the_paper_is_named():
    named = {place for statement in STATEMENTS for place in statement.where}
    assert {id for id in IDS if not find_experiment(id)().figures.startswith("nothing like it")} == named & set(IDS)
    quantities = {"SmoothnessSum", "densities", "leading_ratio", "nearest_kronecker", "reparameterized_constants"}
    quantities |= {"smoothness_sum_bounds", "compute_spectrum"}  # of definitions and proofs, not statements
    assert {name for name in theory.__all__ if f"egop_lab.theory.{name}" not in named} == quantities


def test_verdicts_are_those_of_the_sections(tmp_path):
    judged = tuple(
        Judgement(f"convex/{i}", "It is.", verdict, "1.") for i, verdict in enumerate(["holds", "does not hold"])
    )
    sections = [
        reproduction.Section(find_experiment("convex")("full"), judged),
        reproduction.Section(find_experiment("digits")(), problem="Not run."),
    ]
    index.write_markdown(sections, tmp_path / "index.md")
    rows = {line.split("`")[1]: line for line in (tmp_path / "index.md").read_text().splitlines() if "| `" in line}
    assert rows["fig:log-reg-sup"].endswith("| convex: of the paper's 2 claims, 1 holds, 1 does not hold. |")
    assert "digits: not run." in rows["fig:opener-cartoon"]
    assert "trajectories: not in this report." in rows["fig:opener-cartoon"]
    assert rows["lem:general-LB"].endswith("| Holds. |")


def test_the_page_in_the_notes_has_these_rows():
    page = (ROOT / "lab" / "notes" / "paper-index.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in page if line.startswith("| `")]
    assert len(rows) == len(STATEMENTS)
    for row, statement in zip(rows, STATEMENTS, strict=True):
        assert row.startswith(f"| {index.statement_cells(statement)} | ")
