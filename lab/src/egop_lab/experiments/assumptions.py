"""What theory and heuristics rest on: sr/(dβ₁) beside the gain, dense random directions, filters that are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import egop
from egop_lab import theory
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.experiments.base import Experiment, Judgement, Table, to_verdict
from egop_lab.experiments.convex import STOP, ConvexExperiment
from egop_lab.experiments.curves import first_below, median, quartiles, rank_correlation
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.experiments.errors_in_variables import ErrorsInVariablesExperiment
from egop_lab.experiments.linear_networks import LinearNetworksExperiment
from egop_lab.experiments.matrix_factorization import AT_OPTIMUM, MatrixFactorizationExperiment
from egop_lab.experiments.tuned_experiment import Case, Method, TunedExperiment
from egop_lab.models.residual import initialize_
from egop_lab.models.small import cross_entropy
from egop_lab.training import digits as digits_trials
from egop_lab.training import linear as linear_trials
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context

_DENSE = 0.6  # the paper's number for random directions; 2/π = 0.637 in the limit
_LIKELY = 0.99
_ALIKE = 0.9  # of the likeness of a filter to itself, from other gradients
_RANKED = 0.5  # rank correlation
_ROUNDING = {"linear-networks": 1e-30, "errors-in-variables": 1e-28, "matrix-factorization": AT_OPTIMUM, "convex": STOP}
_CURVES = {"errors-in-variables": "loss", "matrix-factorization": "excess", "convex": "gradient norm"}
_TUNED: dict[str, type[TunedExperiment]] = {
    each.id: each for each in (ErrorsInVariablesExperiment, MatrixFactorizationExperiment, ConvexExperiment)
}
_LAYERS, _WHOLE = "linear-networks, by layer", "linear-networks"

Blocks = dict[str, dict[str, float]]


class AssumptionsExperiment(Experiment):
    """Measurements of what the paper assumes or says in passing."""

    id: ClassVar[str] = "assumptions"

    def configs(self) -> dict[str, list[dict[str, Any]]]:
        """Return the configurations by kind of measurement."""
        settings = self.settings
        names = ("gradients", "epochs", "leading directions")
        common = {name: settings[name] for name in names}
        entries: dict[str, list[dict[str, Any]]] = {
            "ratio": [
                {"problem": problem, "seed": seed} for problem in self._problems() for seed in range(settings["trials"])
            ],
            "density": [{"dimension": size, "directions": settings["directions"]} for size in settings["dimensions"]],
            "filters": [{"trained": trained, **common} for trained in (False, True)],
        }
        return {kind: [self.config(kind=kind, **own) for own in each] for kind, each in entries.items()}

    def run(self, context: Context) -> None:
        measures: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "ratio": lambda config: {"blocks": self._measure_blocks(config["problem"], config["seed"])},
            "density": _measure_density,
            "filters": _measure_filters,
        }
        for kind, configs in self.configs().items():
            self.do_missing(configs, measures[kind])

    def judge(self) -> list[Judgement]:
        rows = self._compare_ratios()
        correlation = rank_correlation(
            [row["ratio"] for row in rows.values()], [row["Adagrad"] for row in rows.values()]
        )
        last = self.records(kind="density")[-1]
        share, size = last.result["share"], last.config["dimension"]
        judged = [
            Judgement(
                "assumptions/ratio",
                "Control: EGOP Adagrad saves more steps where sr/(dβ₁) is smaller.",
                to_verdict(correlation >= _RANKED),
                f"Rank correlation of sr/(dβ₁) and the share of steps over {len(rows)} problems: {correlation:.2f}.",
                "control",
                threshold=f"a rank correlation of {_RANKED:g}",
            ),
            Judgement(
                "assumptions/random-density",
                "Random unit vectors have a density above 0.6 with high probability.",
                to_verdict(share >= _LIKELY),
                f"d = {size}: {share:.1%} of {last.config['directions']}; mean {last.result['mean']:.3f}.",
                paper="β ≈ 2/π > 0.6",
                threshold=f"with high probability: {_LIKELY:.0%}",
            ),
        ]
        for run in self.records(kind="filters"):
            found, trained = run.result, run.config["trained"]
            alike = all(found[f"{name} of two"] >= _ALIKE * found[f"{name} of one"] for name in ("cosine", "alignment"))
            words = "The EGOP matrices of the filters of one layer are similar at initialization."
            judged.append(
                Judgement(
                    f"assumptions/filters{'-trained' if trained else ''}",
                    "Control: the EGOP matrices of the filters of one layer are still similar after training."
                    if trained
                    else words,
                    to_verdict(alike),
                    "; ".join(
                        f"{name}: two filters {found[f'{name} of two']:.2f}, one filter from other gradients "
                        f"{found[f'{name} of one']:.2f}, rotated at random {found[f'{name} of random']:.2f}"
                        for name in ("cosine", "alignment")
                    )
                    + ".",
                    "control" if trained else "claim",
                    threshold=f"{_ALIKE:.0%} of the likeness of one filter to itself, in both",
                )
            )
        return judged

    def _compare_ratios(self) -> dict[str, dict[str, float]]:
        """Return for each problem sr/(dβ₁), and the share of the steps that EGOP needs with each optimizer."""
        rows = {}
        for problem in self._problems():
            runs = self.records(kind="ratio", problem=problem)
            if not runs:
                raise LookupError(f"{problem} has runs left")
            rows[problem] = {"ratio": median([mean_ratio(run.result["blocks"]) for run in runs])}
            for optimizer in ("Adagrad", "Adam"):
                rows[problem][optimizer] = self._share_of_steps(problem, optimizer)
        return rows

    def tables(self) -> list[Table]:
        rows = []
        for problem, row in self._compare_ratios().items():
            blocks = self.records(kind="ratio", problem=problem)[0].result["blocks"]
            shown = "; ".join(
                f"{own['dimension']:.0f}, {own['stable rank']:.3g}, {own['density']:.2f}" for own in blocks.values()
            )
            shares = [f"{row[name]:.2f}" if math.isfinite(row[name]) else "never" for name in ("Adagrad", "Adam")]
            rows.append((problem, shown, f"{row['ratio']:.3f}", *shares))
        header = ("problem", "blocks: d, sr, β₁", "sr/(dβ₁)", "share of steps, Adagrad", "Adam")
        dense = [
            (f"{run.config['dimension']}", f"{run.result['mean']:.3f}", f"{run.result['share']:.1%}")
            for run in self.records(kind="density")
        ]
        return [
            Table("sr/(dβ₁) beside the share of its original's steps that EGOP needs", header, tuple(rows)),
            Table("Density of random directions", ("d", "mean β", "share above 0.6"), tuple(dense)),
        ]

    def _problems(self) -> list[str]:
        tuned = [f"{id}, {_name_case(case)}" for id, one in _TUNED.items() for case in self._cases(one)]
        return ["digits", _WHOLE, _LAYERS, *tuned]

    def _cases(self, other: type[TunedExperiment]) -> list[Case]:
        """Return the cases with a schedule that the paper has; of starts that share a basis, the printed one."""
        one = self.beside(other)
        return one.starts()[-1:] if isinstance(one, MatrixFactorizationExperiment) else one.cases()

    def _find_case(self, problem: str) -> tuple[TunedExperiment, Case]:
        id, _, name = problem.partition(", ")
        return self.beside(_TUNED[id]), next(case for case in self._cases(_TUNED[id]) if _name_case(case) == name)

    def _measure_blocks(self, problem: str, seed: int) -> Blocks:
        """Estimate the basis of a trial; return dimension, stable rank and density of each block."""
        if problem == "digits":
            basis = digits_trials.estimate(seed)
        elif problem in (_WHOLE, _LAYERS):
            settings = self.beside(LinearNetworksExperiment).settings
            sizes = settings["samples"], settings["gradients"], getattr(torch, settings["precision"])
            basis = linear_trials.estimate(seed, *sizes, "global" if problem == _WHOLE else "parameter")
        else:
            one, case = self._find_case(problem)
            basis = one.trials(case, [seed]).estimate(seed, egop.Full())
        return {
            name: {
                "dimension": float(len(own.eigenvalues)),
                "stable rank": own.stable_rank,
                "density": float(own.density[0]),
                "ratio": theory.leading_ratio(own),
            }
            for name, own in basis.spectrum.items()
        }

    def _share_of_steps(self, problem: str, optimizer: str) -> float:
        original, turned = (self._find_curve(problem, optimizer, kind) for kind in (False, True))
        return share_of_steps(original, turned, _ROUNDING.get(problem.partition(", ")[0], 0.0))

    def _find_curve(self, problem: str, optimizer: str, turned: bool) -> list[float]:
        """Return the median curve of an optimizer in original or EGOP coordinates, from its experiment's records."""
        id = problem.partition(", ")[0]
        kind = linear_trials.BLOCK if problem == _LAYERS else EGOP
        kind = kind if turned else ORIGINAL
        if id in _TUNED:
            one, case = self._find_case(problem)
            runs = one.reported_runs(case, Method(optimizer, kind))
        elif id == "digits":
            runs = self.beside(DigitsExperiment).reported_runs(optimizer, kind, separate=False)
        else:
            runs = self.beside(LinearNetworksExperiment).reported_runs(optimizer, kind)
        curve = quartiles([run.result[_CURVES.get(id, "loss")] for run in runs])[1]
        relative = curve[0] if id == "errors-in-variables" else 1.0  # its floor is relative to the start
        return [value / relative for value in curve]


def _name_case(case: Case) -> str:
    return f"ν = {case['nu']:g}" if "nu" in case else str(case.get("objective", "L and R"))


def mean_ratio(blocks: Blocks) -> float:
    """Return the mean of sr/(dβ₁) over blocks, weighted by their dimensions."""
    return sum(own["ratio"] * own["dimension"] for own in blocks.values()) / sum(
        own["dimension"] for own in blocks.values()
    )


def share_of_steps(original: Sequence[float], turned: Sequence[float], floor: float) -> float:
    """Return the fraction of the original's steps that the second curve needs to its minimum; infinite if never."""
    target = max(min(original), floor)
    theirs, mine = first_below(original, target), first_below(turned, target)
    assert theirs is not None
    return math.inf if mine is None else max(mine, 1) / max(theirs, 1)


def _measure_density(config: Mapping[str, Any]) -> dict[str, float]:
    vectors = torch.randn(config["dimension"], config["directions"], generator=torch.Generator().manual_seed(0))
    found = theory.densities(torch.nn.functional.normalize(vectors.double(), dim=0))
    return {"mean": float(found.mean()), "share": float((found > _DENSE).double().mean())}


def _measure_filters(config: Mapping[str, Any]) -> dict[str, float]:
    """Compare the EGOP matrices of a layer's filters, two at a time, each from half of the gradients."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    initialize_(net, generator)
    batches = Batches(*digits().train.batch, size=digits_trials.BATCH, generator=generator)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(config["epochs"] if config["trained"] else 0):
        for batch in batches:
            optimizer.zero_grad()
            cross_entropy(net, batch).backward()
            optimizer.step()
    layer = net.get_parameter("4.weight")
    gradients: list[Tensor] = []
    while len(gradients) < config["gradients"]:
        for batch in batches:
            if not config["trained"]:
                initialize_(net, generator)
            gradients.append(torch.autograd.grad(cross_entropy(net, batch), layer)[0].flatten(1))
    halves = torch.stack(gradients[: config["gradients"]]).double().chunk(2)
    first, second = (torch.einsum("mfi,mfj->fij", half, half) for half in halves)
    turn = torch.linalg.qr(torch.randn(first.shape[1:], generator=generator, dtype=torch.float64))[0]
    found = {}
    for name, compare in (("cosine", _cosine), ("alignment", lambda a, b: _align(a, b, config["leading directions"]))):
        pairs = [(i, j) for i in range(len(first)) for j in range(len(first))]
        found[f"{name} of one"] = median([compare(first[i], second[i]) for i in range(len(first))])
        found[f"{name} of two"] = median([compare(first[i], second[j]) for i, j in pairs if i != j])
        found[f"{name} of random"] = median([compare(own, turn @ own @ turn.mT) for own in first])
    return found


def _cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def _align(one: Tensor, other: Tensor, count: int) -> float:
    """Return the alignment of the leading eigenspaces, from count/d for random ones to 1."""
    leading = [torch.linalg.eigh(each)[1][:, -count:] for each in (one, other)]
    return float((leading[0].mT @ leading[1]).square().sum() / count)
