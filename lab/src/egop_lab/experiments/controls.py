"""Controls beside the gains: random rotations like EGOP's, and VectorAdam, which no basis of its rows changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

import egop
from egop_lab.experiments.base import Alternative, Experiment, Judgement, Table, compare, to_verdict
from egop_lab.experiments.curves import median, quartiles_by_rate
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.experiments.fashion_claims import Method as FashionMethod
from egop_lab.experiments.fashion_mnist import FashionMnistExperiment
from egop_lab.experiments.linear_networks import LinearNetworksExperiment, best_validation_loss, final_loss
from egop_lab.experiments.matrix_factorization import THRESHOLDS, MatrixFactorizationExperiment
from egop_lab.experiments.tuned_experiment import Case, Method
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL, RANDOM
from egop_lab.training.context import Context, make_record
from egop_lab.training.digits import STEPS_PER_EPOCH, DigitsProblem
from egop_lab.training.factorization import SPECTRAL
from egop_lab.training.fashion import Runs, train_batched
from egop_lab.training.linear import BATCH, BLOCK, LinearProblem
from egop_lab.training.networks import NetworkTrials
from egop_lab.training.records import Record
from egop_lab.training.tuning import TUNING, best_rate, is_tuning

VECTOR_ADAM = "VectorAdam"
DIGITS, LINEAR, FASHION = "digits", "linear-networks", "fashion-mnist"

_HALF = 0.5  # of EGOP's gain: from here on the gain is not EGOP's own
_FLOOR = 1e-30  # float64 losses below this are rounding
_ADAPTIVE = ("Adam", "Adagrad")

Losses = Mapping[str, Mapping[float, float]]  # median final losses by coordinates and learning rate


class ControlsExperiment(Experiment):
    """The optimizers of the network experiments in random rotations, and VectorAdam; other numbers are recorded there.

    Random rotations use the learning rates (on Fashion-MNIST also the weight decay) and the trials of original
    coordinates.
    """

    id: ClassVar[str] = "controls"

    def run(self, context: Context) -> None:
        digits = self.beside(DigitsExperiment).settings
        sweep_digits(
            self,
            context,
            {name: digits["rates"][name] for name in _ADAPTIVE},
            range(self.settings["trials"][DIGITS]),
            digits["epochs"],
            RANDOM,
            draw_rotations,
            {"problem": DIGITS},
        )
        self._vectors.run(context)
        self._run_linear(context)
        self._run_fashion(context)

    @property
    def _vectors(self) -> VectorFactorization:
        return VectorFactorization(self.preset, self.store)

    def _run_linear(self, context: Context) -> None:
        settings, own = self.beside(LinearNetworksExperiment).settings, self.settings
        epochs, samples = settings["epochs"], settings["samples"]

        def go(rates: Mapping[str, Sequence[float]], seeds: Sequence[int], coordinates: str) -> None:
            steps = samples // 2 // BATCH
            self.sweep(
                context,
                lambda seeds: LinearProblem(
                    seeds, samples, settings["gradients"], getattr(torch, settings["precision"]), context.device
                ),
                lambda problem, kind: draw_rotations(problem) if kind == RANDOM else None,
                rates=rates,
                seeds=seeds,
                coordinates=[coordinates],
                steps=epochs * steps,
                record_every=steps,
                at_once=5,
                extra={"problem": LINEAR},
                schedule=batched.cosine(epochs),
                compact=lambda config, result: {
                    "final": result["loss"][-1],
                    "best validation": min(filter(math.isfinite, result["validation loss"]), default=math.nan),
                },
            )

        tuning = range(TUNING, TUNING + settings["tuning trials"])
        for seeds in (tuning, range(own["VectorAdam trials"])):
            go({VECTOR_ADAM: own["VectorAdam rates"]}, seeds, ORIGINAL)
        go({name: settings["rates"][name] for name in _ADAPTIVE}, range(own["trials"][LINEAR]), RANDOM)

    def _run_fashion(self, context: Context) -> None:
        for config in self.store.missing(self._fashion_configs()):
            runs = RandomRuns(self.beside(FashionMnistExperiment).settings["images"], context)
            (curves,), seconds = train_batched(runs, [config])
            self.store.add(make_record(config, {"loss": curves["loss"]}, seconds, context.device))

    def _fashion_configs(self) -> list[dict[str, Any]]:
        fashion, settings = self.beside(FashionMnistExperiment), self.settings
        lr, decay = fashion.choose_rates(FashionMethod(0), fashion.papers_search)
        epochs = fashion.settings["tuning epochs"]
        entries = {"rank": settings["rank"], "lr": lr, "weight_decay": decay, "epochs": epochs}
        trials = range(settings["trials"][FASHION])
        return [self.config(problem=FASHION, coordinates=RANDOM, **entries, seed=seed) for seed in trials]

    def judge(self) -> list[Judgement]:
        rotations = [
            judge_rotation(problem, optimizer, losses) for (problem, optimizer), losses in self._rotations().items()
        ]
        return [*rotations, *self._judge_vectors()]

    def _rotations(self) -> dict[tuple[str, str], Losses]:
        """Return the losses of each control, on the same trials in all coordinates."""
        found: dict[tuple[str, str], Losses] = {}
        for problem, one, turned in (
            (DIGITS, self.beside(DigitsExperiment), EGOP),
            (LINEAR, self.beside(LinearNetworksExperiment), BLOCK),
        ):
            for optimizer in _ADAPTIVE:
                runs = {RANDOM: self.records(problem=problem, optimizer=optimizer, coordinates=RANDOM)}
                seeds = {run.config["seed"] for run in runs[RANDOM]}
                for kind, name in ((ORIGINAL, ORIGINAL), (EGOP, turned)):
                    own = one.fresh_runs(optimizer, name)
                    runs[kind] = [run for run in own if run.config["seed"] in seeds]
                if seeds:
                    found[problem, optimizer] = {kind: _by_rate(own) for kind, own in runs.items()}
        if any(self.records(problem=FASHION)):
            found[FASHION, "AdamW"] = self._fashion_losses()
        return found

    def _fashion_losses(self) -> Losses:
        """Return the losses after the epochs of the control, which a constant rate makes comparable, at one "rate"."""
        fashion, configs = self.beside(FashionMnistExperiment), self._fashion_configs()
        if self.store.missing(configs):
            raise LookupError("Fashion-MNIST has runs left")
        epochs, seeds = configs[0]["epochs"], {config["seed"] for config in configs}
        runs = {RANDOM: self.records(problem=FASHION)}
        for kind, rank in ((ORIGINAL, 0), (EGOP, configs[0]["rank"])):
            lr, decay = fashion.choose_rates(FashionMethod(rank), fashion.papers_search)
            own = fashion.records(kind="run", rank=rank, lr=lr, weight_decay=decay)
            runs[kind] = [run for run in own if run.config["seed"] in seeds and "reduced" not in run.config]
        return {kind: {0.0: median([run.result["loss"][epochs] for run in own])} for kind, own in runs.items()}

    def _judge_vectors(self) -> list[Judgement]:
        linear, by_start = self._linear_finals(), []
        papers = self.beside(MatrixFactorizationExperiment)
        for case in papers.starts():
            mine, theirs = (
                [one.steps_to(method, threshold, case) for threshold in THRESHOLDS]
                for one, method in ((papers, Method("Adam", EGOP)), (self._vectors, Method(VECTOR_ADAM)))
            )
            shown = "; ".join(
                f"to {threshold:g}: EGOP Adam {a:.0f}, VectorAdam {b:.0f}"
                for threshold, a, b in zip(THRESHOLDS, mine, theirs, strict=True)
            )
            faster = all(a < b for a, b in zip(mine, theirs, strict=True))
            by_start.append((case.get("start", SPECTRAL), to_verdict(faster), f"{shown}."))
        *others, (start, verdict, finding) = by_start  # the printed start judges, if it was run
        return [
            compare(
                "controls/linear-networks-VectorAdam",
                "Control: EGOP Adam ends lower than VectorAdam on linear networks.",
                ("EGOP Adam", max(linear["EGOP Adam"], _FLOOR)),
                (VECTOR_ADAM, max(linear[VECTOR_ADAM], _FLOOR)),
                kind="control",
                threshold=f"losses below {_FLOOR:g} are equal",
            ),
            Judgement(
                "controls/matrix-factorization-VectorAdam",
                "Control: EGOP Adam comes near the optimum in fewer steps than VectorAdam.",
                verdict,
                f"Steps from {start} at the fastest rates: {finding}",
                "control",
                alternatives=tuple(Alternative(f"from {name}", own, found) for name, own, found in others),
            ),
        ]

    def _linear_finals(self) -> dict[str, float]:
        """Return the median final losses on linear networks at the rates chosen on tuning trials."""
        runs = self.records(problem=LINEAR, optimizer=VECTOR_ADAM)
        seeds = {run.config["seed"] for run in runs}
        rate = best_rate(filter(is_tuning, runs), best_validation_loss)
        finals = {
            VECTOR_ADAM: median(
                [final_loss(run.result) for run in runs if not is_tuning(run) and run.config["lr"] == rate]
            )
        }
        for optimizer in _ADAPTIVE:
            for kind, words in ((ORIGINAL, optimizer), (EGOP, f"EGOP {optimizer}")):
                own = self.beside(LinearNetworksExperiment).reported_runs(optimizer, kind)
                finals[words] = median([final_loss(run.result) for run in own if run.config["seed"] in seeds])
        return finals

    def tables(self) -> list[Table]:
        rows = []
        for (problem, optimizer), losses in self._rotations().items():
            ends = [f"{min(losses[kind].values()):.3g}" for kind in (ORIGINAL, RANDOM, EGOP)]
            gains = {kind: compute_gain(losses, kind) for kind in (RANDOM, EGOP)}
            share = gains[RANDOM] / gains[EGOP] if gains[EGOP] > 0 else math.nan
            trials = str(self.settings["trials"][problem])
            rows.append(
                (problem, optimizer, trials, *ends, *(f"{gain:.2f}" for gain in gains.values()), f"{share:.0%}")
            )
        header = ("problem", "optimizer", "trials", "original", "random rotation", "EGOP")
        gain = ("gain of the random rotation", "gain of EGOP", "share")
        title = "Final training losses, each at its own best rate; gains in decades at equal rates, mean over rates"
        finals = self._linear_finals()
        linear = Table(
            "Linear networks: final training losses, each method at its own learning rate",
            tuple(finals),
            (tuple(f"{value:.3g}" for value in finals.values()),),
        )
        return [Table(title, (*header, *gain), tuple(rows)), linear]


class VectorFactorization(MatrixFactorizationExperiment):
    """VectorAdam on matrix factorisation, tuned as the other methods are; its records are those of the controls."""

    id: ClassVar[str] = ControlsExperiment.id

    @property
    def settings(self) -> dict[str, Any]:
        settings = MatrixFactorizationExperiment(self.preset).settings
        return settings | {
            "exponents": settings["exponents"] | {VECTOR_ADAM: [-5, 2] if self.preset == "full" else [-3, 0]}
        }

    def pairs(self) -> list[tuple[Case, Method]]:
        return [(case, Method(VECTOR_ADAM)) for case in self.starts()]


class RandomRuns(Runs):
    """Fashion-MNIST with random directions in place of EGOP's."""

    def basis(self, rank: int, seed: int, reduced: bool = False) -> tuple[egop.Basis, float]:
        weights = {name: value for name, value in self.start(seed).named_parameters() if value.dim() > 1}
        like = {name: egop.Auxiliary(rank=rank) for name, weight in weights.items() if rank < weight.numel()}
        return draw_rotation(weights, seed, like), 0.0


def sweep_digits(
    experiment: Experiment,
    context: Context,
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    epochs: int,
    kind: str,
    basis: Callable[[DigitsProblem], batched.Basis],
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Train the digits network in one kind of coordinates; record final losses."""
    experiment.sweep(
        context,
        lambda seeds: DigitsProblem(seeds, context.device),
        lambda problem, _: basis(problem),
        rates=rates,
        seeds=seeds,
        coordinates=[kind],
        steps=epochs * STEPS_PER_EPOCH,
        record_every=STEPS_PER_EPOCH,
        at_once=5,
        extra=extra,
        compact=lambda config, result: {"final": result["loss"][-1]},
    )


def draw_rotations(problem: NetworkTrials) -> batched.Basis:
    """Draw a random rotation of each weight for each trial."""
    start = {name: value for name, value in problem.start().items() if value.dim() > 2}
    return batched.Basis.stack(
        [
            draw_rotation({name: value[place] for name, value in start.items()}, seed)
            for place, seed in enumerate(problem.seeds)
        ]
    )


def draw_rotation(
    weights: Mapping[str, torch.Tensor], seed: int, like: Mapping[str, egop.Structure] | None = None
) -> egop.Basis:
    """Draw a random basis of each weight, of a full structure unless another one is given."""
    objective = egop.Objective.from_function(lambda **values: sum(v.sum() for v in values.values()), dict(weights))
    structure = {
        name: egop.extras.RandomRotation(seed=seed, like=(like or {}).get(name, egop.Full())) for name in weights
    }
    return egop.estimate(objective, rho=egop.Gaussian(), partition="parameter", structure=structure, progress=False)


def _by_rate(runs: Sequence[Record]) -> dict[float, float]:
    """Return the median final loss by learning rate, no lower than the floor."""

    def score(result: Mapping[str, Any]) -> float:
        return float(result["final"] if "final" in result else result["loss"][-1])

    return {rate: max(middle, _FLOOR) for rate, (_, middle, _) in quartiles_by_rate(runs, score).items()}


def compute_gain(losses: Losses, kind: str) -> float:
    """Return the gain over original coordinates in decades, averaged over rates at which no run diverges."""
    shared = set.intersection(*(set(own) for own in losses.values()))
    rates = [rate for rate in shared if all(math.isfinite(own[rate]) for own in losses.values())]
    gains = [math.log10(losses[ORIGINAL][rate] / losses[kind][rate]) for rate in rates]
    return sum(gains) / len(gains) if gains else math.nan


def judge_rotation(problem: str, optimizer: str, losses: Losses) -> Judgement:
    """Judge whether a random rotation gives less than half of EGOP's gain."""
    random, turned = compute_gain(losses, RANDOM), compute_gain(losses, EGOP)
    return Judgement(
        f"controls/{problem}-{optimizer}",
        f"Control: on {problem} a random rotation gives {optimizer} less than half of EGOP's gain.",
        to_verdict(turned > 0 and random < _HALF * turned),
        f"Decades below original coordinates: random rotation {random:.2f}, EGOP {turned:.2f}.",
        "control",
        threshold="half of the gain in decades, mean over learning rates",
    )
