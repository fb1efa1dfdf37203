"""Controls beside the gains: random rotations like EGOP's, and VectorAdam, which no basis of its rows changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

import egop
from egop_lab.experiments.base import Alternative, Experiment, Judgement, Table, compare, to_verdict
from egop_lab.experiments.curves import median, quartiles_by_rate
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.experiments.fashion_claims import Method as FashionMethod
from egop_lab.experiments.fashion_mnist import FashionMnistExperiment
from egop_lab.experiments.linear_networks import LinearNetworksExperiment
from egop_lab.experiments.linear_networks_claims import best_validation_loss, final_loss
from egop_lab.experiments.matrix_factorization import MatrixFactorizationExperiment
from egop_lab.experiments.matrix_factorization_claims import THRESHOLDS
from egop_lab.experiments.sweep_experiment import SweepExperiment
from egop_lab.experiments.tuned_experiment import Case, Method
from egop_lab.plots.picture import Picture
from egop_lab.training import batched
from egop_lab.training.context import Context, Preset, make_record
from egop_lab.training.digits import STEPS_PER_EPOCH, DigitsProblem
from egop_lab.training.factorization import SPECTRAL
from egop_lab.training.fashion import Runs, train_batched
from egop_lab.training.instances import RANDOM
from egop_lab.training.linear import BATCH, BLOCK, LinearProblem
from egop_lab.training.networks import NetworkTrials
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import EGOP, ORIGINAL, TUNING, Sweep, run_sweep
from egop_lab.training.tuning import best_rate, doublings, is_tuning

VECTOR_ADAM = "VectorAdam"
DIGITS, LINEAR, FASHION = "digits", "linear-networks", "fashion-mnist"

_HALF = 0.5  # of EGOP's gain: from here on the gain is not EGOP's own
_FLOOR = 1e-30  # float64 losses below this are rounding
_ADAPTIVE = ("Adam", "Adagrad")
_EXPERIMENTS: dict[str, SweepExperiment] = {DIGITS: DigitsExperiment(), LINEAR: LinearNetworksExperiment()}

Losses = Mapping[str, Mapping[float, float]]  # median final losses by coordinates and learning rate


class ControlsExperiment(Experiment):
    """The optimizers of the network experiments in random rotations, and VectorAdam; other numbers are recorded there.

    Random rotations use the learning rates (on Fashion-MNIST also the weight decay) and the trials of original
    coordinates.
    """

    id: ClassVar[str] = "controls"
    title: ClassVar[str] = "Controls: random rotations and VectorAdam"
    figures: ClassVar[str] = "nothing like it; controls of ours. Rules were written down before the runs"

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "random rotations": "one for each weight; of linear networks beside a basis for each layer",
            "trials": {DIGITS: 5 if full else 3, LINEAR: 2 if full else 1, FASHION: 2 if full else 1},
            "VectorAdam trials": 5 if full else 1,
            "Fashion-MNIST": "random directions as auxiliary variables, losses after the epochs of a tuning run",
            "rank": 200 if full else 50,
            "VectorAdam": "a vector is a row of a weight; learning rates chosen as for the other methods",
            "VectorAdam rates": doublings(1e-2, 1) if full else [0.04, 0.1, 0.4, 1.0],
            "gain": "decades of the median final loss below original coordinates, mean over learning rates",
        }

    def run(self, store: Store, context: Context) -> None:
        settings = _EXPERIMENTS[DIGITS].settings(context.preset)
        sweep_digits(
            partial(self.config, problem=DIGITS),
            store,
            context,
            {name: settings["rates"][name] for name in _ADAPTIVE},
            range(self.settings(context.preset)["trials"][DIGITS]),
            settings["epochs"],
            RANDOM,
            draw_rotations,
        )
        VectorFactorization().run(store, context)
        self._run_linear(store, context)
        self._run_fashion(store, context)

    def _run_linear(self, store: Store, context: Context) -> None:
        settings, own = _EXPERIMENTS[LINEAR].settings(context.preset), self.settings(context.preset)
        epochs, samples = settings["epochs"], settings["samples"]

        def go(rates: Mapping[str, Sequence[float]], seeds: Sequence[int], coordinates: str) -> None:
            steps = samples // 2 // BATCH
            sweep = Sweep(rates, seeds, [coordinates], epochs * steps, steps, 5, {"problem": LINEAR})
            run_sweep(
                self.config,
                sweep,
                store,
                context,
                problem=lambda seeds: LinearProblem(
                    seeds, samples, settings["gradients"], getattr(torch, settings["precision"]), context.device
                ),
                basis=lambda problem, kind: draw_rotations(problem) if kind == RANDOM else None,
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

    def _run_fashion(self, store: Store, context: Context) -> None:
        for config in store.missing(self._fashion_configs(store, context.preset)):
            runs = RandomRuns(FashionMnistExperiment().settings(context.preset)["images"], context)
            (curves,), seconds = train_batched(runs, [config])
            store.add(make_record(config, {"loss": curves["loss"]}, seconds, context.device))

    def _fashion_configs(self, store: Store, preset: Preset) -> list[dict[str, Any]]:
        fashion, settings = FashionMnistExperiment(), self.settings(preset)
        lr, decay = fashion.choose_rates(open_beside(store, FASHION), preset, FashionMethod(0), _search(preset))
        epochs = fashion.settings(preset)["tuning epochs"]
        entries = {"rank": settings["rank"], "lr": lr, "weight_decay": decay, "epochs": epochs}
        trials = range(settings["trials"][FASHION])
        return [self.config(preset, problem=FASHION, coordinates=RANDOM, **entries, seed=seed) for seed in trials]

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        rotations = [
            judge_rotation(problem, optimizer, losses)
            for (problem, optimizer), losses in self._rotations(store, preset).items()
        ]
        return [*rotations, *self._judge_vectors(store, preset)]

    def _rotations(self, store: Store, preset: Preset) -> dict[tuple[str, str], Losses]:
        """Return the losses of each control, on the same trials in all coordinates."""
        found: dict[tuple[str, str], Losses] = {}
        for problem, one in _EXPERIMENTS.items():
            other, turned = open_beside(store, problem), EGOP if problem == DIGITS else BLOCK
            for optimizer in _ADAPTIVE:
                runs = {RANDOM: self.records(store, preset, problem=problem, optimizer=optimizer, coordinates=RANDOM)}
                seeds = {run.config["seed"] for run in runs[RANDOM]}
                for kind, name in ((ORIGINAL, ORIGINAL), (EGOP, turned)):
                    own = one.fresh_runs(other, preset, optimizer, name)
                    runs[kind] = [run for run in own if run.config["seed"] in seeds]
                if seeds:
                    found[problem, optimizer] = {kind: _by_rate(own) for kind, own in runs.items()}
        if any(self.records(store, preset, problem=FASHION)):
            found[FASHION, "AdamW"] = self._fashion_losses(store, preset)
        return found

    def _fashion_losses(self, store: Store, preset: Preset) -> Losses:
        """Return the losses after the epochs of the control, which a constant rate makes comparable, at one "rate"."""
        fashion, other = FashionMnistExperiment(), open_beside(store, FASHION)
        configs = self._fashion_configs(store, preset)
        if store.missing(configs):
            raise LookupError("Fashion-MNIST has runs left")
        epochs, seeds = configs[0]["epochs"], {config["seed"] for config in configs}
        runs = {RANDOM: self.records(store, preset, problem=FASHION)}
        for kind, rank in ((ORIGINAL, 0), (EGOP, configs[0]["rank"])):
            lr, decay = fashion.choose_rates(other, preset, FashionMethod(rank), _search(preset))
            own = fashion.records(other, preset, kind="run", rank=rank, lr=lr, weight_decay=decay)
            runs[kind] = [run for run in own if run.config["seed"] in seeds and "reduced" not in run.config]
        return {kind: {0.0: median([run.result["loss"][epochs] for run in own])} for kind, own in runs.items()}

    def _judge_vectors(self, store: Store, preset: Preset) -> list[Judgement]:
        linear = self._linear_finals(store, preset)
        vectors, papers = VectorFactorization(), MatrixFactorizationExperiment()
        other, by_start = open_beside(store, papers.id), []
        for case in vectors.starts(preset):
            mine, theirs = (
                [one.steps_to(source, preset, method, threshold, case) for threshold in THRESHOLDS]
                for one, source, method in (
                    (papers, other, Method("Adam", EGOP)),
                    (vectors, store, Method(VECTOR_ADAM)),
                )
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

    def _linear_finals(self, store: Store, preset: Preset) -> dict[str, float]:
        """Return the median final losses on linear networks at the rates chosen on tuning trials."""
        runs = self.records(store, preset, problem=LINEAR, optimizer=VECTOR_ADAM)
        seeds = {run.config["seed"] for run in runs}
        rate = best_rate(filter(is_tuning, runs), best_validation_loss)
        finals = {
            VECTOR_ADAM: median(
                [final_loss(run.result) for run in runs if not is_tuning(run) and run.config["lr"] == rate]
            )
        }
        linear, other = _EXPERIMENTS[LINEAR], open_beside(store, LINEAR)
        for optimizer in _ADAPTIVE:
            for kind, words in ((ORIGINAL, optimizer), (EGOP, f"EGOP {optimizer}")):
                own = linear.reported_runs(other, preset, optimizer, kind)
                finals[words] = median([final_loss(run.result) for run in own if run.config["seed"] in seeds])
        return finals

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        rows = []
        for (problem, optimizer), losses in self._rotations(store, preset).items():
            ends = [f"{min(losses[kind].values()):.3g}" for kind in (ORIGINAL, RANDOM, EGOP)]
            gains = {kind: compute_gain(losses, kind) for kind in (RANDOM, EGOP)}
            share = gains[RANDOM] / gains[EGOP] if gains[EGOP] > 0 else math.nan
            trials = str(self.settings(preset)["trials"][problem])
            rows.append(
                (problem, optimizer, trials, *ends, *(f"{gain:.2f}" for gain in gains.values()), f"{share:.0%}")
            )
        header = ("problem", "optimizer", "trials", "original", "random rotation", "EGOP")
        gain = ("gain of the random rotation", "gain of EGOP", "share")
        title = "Final training losses, each at its own best rate; gains in decades at equal rates, mean over rates"
        finals = self._linear_finals(store, preset)
        linear = Table(
            "Linear networks: final training losses, each method at its own learning rate",
            tuple(finals),
            (tuple(f"{value:.3g}" for value in finals.values()),),
        )
        return [Table(title, (*header, *gain), tuple(rows)), linear]

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        return []


class VectorFactorization(MatrixFactorizationExperiment):
    """VectorAdam on matrix factorisation, tuned as the other methods are; its records are those of the controls."""

    id: ClassVar[str] = ControlsExperiment.id

    def settings(self, preset: Preset) -> dict[str, Any]:
        settings = super().settings(preset)
        return settings | {"exponents": settings["exponents"] | {VECTOR_ADAM: [-5, 2] if preset == "full" else [-3, 0]}}

    def pairs(self, preset: Preset) -> list[tuple[Case, Method]]:
        return [(case, Method(VECTOR_ADAM)) for case in self.starts(preset)]


class RandomRuns(Runs):
    """Fashion-MNIST with random directions in place of EGOP's."""

    def basis(self, rank: int, seed: int, reduced: bool = False) -> tuple[egop.Basis, float]:
        """Draw the directions of a trial."""
        weights = {name: value for name, value in self.start(seed).named_parameters() if value.dim() > 1}
        like = {name: egop.Auxiliary(rank=rank) for name, weight in weights.items() if rank < weight.numel()}
        return draw_rotation(weights, seed, like), 0.0


def sweep_digits(
    make_config: Callable[..., dict[str, Any]],
    store: Store,
    context: Context,
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    epochs: int,
    kind: str,
    basis: Callable[[DigitsProblem], batched.Basis],
) -> None:
    """Train the digits network in one kind of coordinates; record final losses."""
    run_sweep(
        make_config,
        Sweep(rates, seeds, [kind], epochs * STEPS_PER_EPOCH, STEPS_PER_EPOCH, at_once=5, extra={}),
        store,
        context,
        problem=lambda seeds: DigitsProblem(seeds, context.device),
        basis=lambda problem, _: basis(problem),
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


def _search(preset: Preset) -> str:
    """Return the search for rates and weight decays that the paper made."""
    (*_, search) = FashionMnistExperiment().settings(preset)["searches"]
    return search


def open_beside(store: Store, id: str) -> Store:
    """Open the records of another experiment, in the same folder."""
    return Store(store.path.with_name(f"{id}{store.path.suffix}"))


def _by_rate(runs: Sequence[Record]) -> dict[float, float]:
    """Return the median final loss by learning rate, no lower than the floor."""

    def score(result: Mapping[str, Any]) -> float:
        return float(result["final"] if "final" in result else result["loss"][-1])

    return {rate: max(middle, _FLOOR) for rate, (_, middle, _) in quartiles_by_rate(runs, score).items()}


def compute_gain(losses: Losses, kind: str) -> float:
    """Return how many decades coordinates are below original ones, mean over rates at which nothing diverges."""
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
