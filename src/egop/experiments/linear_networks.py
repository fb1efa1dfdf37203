"""Linear networks of three layers: all parameters in one basis, a basis for each layer, the first layer alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import egop
from egop.experiments import batched
from egop.experiments.base import Context, Experiment, Judged, Panel, Picture, Preset, compare, median, verdict
from egop.experiments.data import Batches
from egop.experiments.models import xavier_
from egop.experiments.records import Record, Store
from egop.experiments.sweeps import (
    EGOP,
    ORIGINAL,
    TUNING,
    Sweep,
    best_rate,
    by_rate,
    curve_series,
    rate_series,
    run_sweep,
    same_in_both,
)
from egop.experiments.tuning import doublings
from egop.linalg import random_orthonormal

Score = Callable[[Mapping[str, Any]], float]

WIDTHS = (10, 50, 30, 10)  # the paper's appendix has 10-30-50-10; the number of parameters is the same
NAMES = tuple(f"{layer}.weight" for layer in range(len(WIDTHS) - 1))
SIZE = sum(inputs * outputs for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False))
BLOCK = "EGOP, block"
FIRST = "EGOP, first layer"
KINDS = {EGOP: "all parameters in one basis", BLOCK: "a basis for each layer", FIRST: "the first layer alone"}

_ADAPTIVE = ("Adam", "Adagrad")
_EQUIVARIANT = ("SGD", "SGD+momentum")
_BATCH = 500
_POINTS = 50  # of a curve that is kept
_FAR = 10.0
_COMPARABLE = 0.5  # the share of a gain, in decades, from which on another gain is comparable


class LinearProblem(batched.Problem):
    """Trials of ‖W₃W₂W₁A − Y‖²/n with Y = M*A, each with its own A, M*, start and order of the batches."""

    def __init__(self, seeds: Sequence[int], samples: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seeds = list(seeds)
        self.steps_per_epoch = samples // 2 // _BATCH
        self._to = {"dtype": dtype, "device": device}
        made = [_data(seed, samples) for seed in self.seeds]
        inputs = torch.stack([a for a, _ in made])
        train, validation = inputs[:, : samples // 2], inputs[:, samples // 2 : samples * 7 // 10]
        self.train = train.to(**self._to)
        self.target = torch.stack([target for _, target in made]).to(**self._to)
        # ‖E A‖² = ‖E R‖² for any R with R Rᵀ = A Aᵀ: whole data sets at the price of one batch.
        self._roots = {name: _root(a).to(**self._to) for name, a in (("loss", train), ("validation loss", validation))}
        self._bases: dict[str, list[egop.Reparameterization]] = {}
        self._orders: dict[int, Tensor] = {}

    def network(self, seed: int) -> nn.Module:
        """The network at a trial's start."""
        layers = [nn.Linear(*sizes, bias=False) for sizes in zip(WIDTHS, WIDTHS[1:], strict=False)]
        return xavier_(nn.Sequential(*layers), _generator(seed, 0)).to(**self._to)

    def start(self) -> batched.Point:
        networks = [dict(self.network(seed).named_parameters()) for seed in self.seeds]
        return {name: torch.stack([network[name].detach() for network in networks]) for name in NAMES}

    def losses(self, point: batched.Point, step: int) -> Tensor:
        epoch, batch = divmod(step, self.steps_per_epoch)
        rows = self._order(epoch)[:, batch * _BATCH : (batch + 1) * _BATCH]
        inputs = self.train.gather(1, rows[..., None].expand(-1, -1, WIDTHS[0]))
        return (inputs[:, None] @ self._error(point).mT).square().sum((-2, -1)) / _BATCH

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        error = self._error(point)
        return {name: (error @ root[:, None]).square().sum((-2, -1)) for name, root in self._roots.items()}

    def basis(self, kind: str) -> batched.Basis | None:
        """The stacked bases of a kind of coordinates; M = 2d gradients for each."""
        if kind == ORIGINAL:
            return None
        partition = "global" if kind == EGOP else "parameter"
        if partition not in self._bases:
            self._bases[partition] = [self._estimate(trial, partition) for trial in range(len(self.seeds))]
        stacked = batched.Basis.stack(self._bases[partition])
        return batched.Basis(stacked.blocks[:1]) if kind == FIRST else stacked

    def _estimate(self, trial: int, partition: Any) -> egop.Reparameterization:
        seed, target = self.seeds[trial], self.target[trial]

        def loss(model: nn.Module, batch: Any) -> Tensor:
            (inputs,) = batch
            return (model(inputs) - inputs @ target.mT).square().sum() / len(inputs)

        batches = Batches(self.train[trial], size=_BATCH, generator=_generator(seed, 2))
        return egop.estimate(
            egop.Objective(self.network(seed), loss, batches),
            rho=egop.Initialization(init_fn=xavier_),
            partition=partition,
            structure=egop.Full(),
            samples=2 * SIZE,
            generator=_generator(seed, 3),
            progress=False,
        )

    def _error(self, point: batched.Point) -> Tensor:
        first, second, third = (point[name] for name in NAMES)
        return third @ (second @ first) - self.target[:, None]

    def _order(self, epoch: int) -> Tensor:
        """The order of the samples in an epoch, a row a trial."""
        if epoch not in self._orders:
            count = self.train.shape[1]
            orders = [torch.randperm(count, generator=_generator(seed, 4 + epoch)) for seed in self.seeds]
            self._orders = {epoch: torch.stack(orders).to(self._to["device"])}
        return self._orders[epoch]


def _generator(seed: int, purpose: int) -> torch.Generator:
    """A stream of its own for the start (0), the data (1), the estimation (2, 3) and each epoch (from 4 on)."""
    return torch.Generator().manual_seed(100_003 * seed + purpose)


def _data(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """The rows of Aᵀ, whose singular values are k^-2, and M*."""
    generator = _generator(seed, 1)
    left = random_orthonormal(samples, WIDTHS[0], generator)
    right = random_orthonormal(WIDTHS[0], WIDTHS[0], generator)
    singular = torch.arange(1, WIDTHS[0] + 1, dtype=torch.float64) ** -2.0
    return left * singular @ right.mT, torch.randn(WIDTHS[-1], WIDTHS[0], generator=generator, dtype=torch.float64)


def _root(inputs: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(inputs.mT @ inputs / inputs.shape[1])
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


class LinearNetworksExperiment(Experiment):
    """Adam and Adagrad in three kinds of EGOP coordinates against original ones, and SGD."""

    id: ClassVar[str] = "linear-networks"
    title: ClassVar[str] = "Multilayer linear networks"
    figures: ClassVar[str] = (
        "Linear networks: loss by epoch, by learning rate, validation; supplementary: three variants"
    )
    gpu: ClassVar[bool] = True

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        rates = {
            "Adam": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1, 0.2],
            "Adagrad": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1, 0.2],
            "SGD": doublings(10, 1e4) if full else [100.0, 400.0, 1000.0, 2000.0],
            "SGD+momentum": doublings(1, 1e3) if full else [10.0, 40.0, 100.0, 200.0],
        }
        return {
            "trials": 10 if full else 3,
            "tuning trials": 5 if full else 3,
            "epochs": 1000 if full else 50,
            "samples": 20_000,  # half to train, a fifth to validate, the rest is the paper's test set
            "batch": _BATCH,
            "precision": "float64" if full else "float32",
            "rates": rates,
        }

    def run(self, store: Store, context: Context) -> None:
        settings = self.settings(context.preset)
        epochs, steps_per_epoch = settings["epochs"], settings["samples"] // 2 // _BATCH
        common: dict[str, Any] = {
            "steps": epochs * steps_per_epoch,
            "record_every": steps_per_epoch,
            "at_once": 10 if context.device.type == "cuda" else 3,
            "extra": {"samples": settings["samples"], "precision": settings["precision"]},
        }
        rates, reported = settings["rates"], range(settings["trials"])
        adaptive = {name: rates[name] for name in _ADAPTIVE}
        tuning = range(TUNING, TUNING + settings["tuning trials"])

        def go(sweep: Sweep) -> None:
            run_sweep(
                self,
                sweep,
                store,
                context,
                problem=lambda seeds: LinearProblem(
                    seeds, settings["samples"], getattr(torch, settings["precision"]), context.device
                ),
                basis=lambda problem, kind: problem.basis(kind),
                schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs),
                compact=_compact,
            )

        go(Sweep(rates=rates, seeds=tuning, coordinates=[ORIGINAL], **common))
        # Curves are kept at these rates only, so a record must not outlive a change of them.
        common["extra"] |= {"chosen": {name: self.chosen(store, context.preset, name) for name in rates}}
        go(Sweep(rates=rates, seeds=reported, coordinates=[ORIGINAL, EGOP], **common))
        go(Sweep(rates=adaptive, seeds=reported, coordinates=[BLOCK, FIRST], **common))

    def chosen(self, store: Store, preset: Preset, optimizer: str) -> float:
        """The rate of the smallest median best validation loss in original coordinates, on the tuning trials."""
        runs = self.records(store, preset, optimizer=optimizer, coordinates=ORIGINAL)
        return best_rate([run for run in runs if run.config["seed"] >= TUNING], _validation)

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        found = []
        for optimizer in _ADAPTIVE:
            finals = {kind: self._median(store, preset, optimizer, kind, _final) for kind in (ORIGINAL, *KINDS)}
            found.append(_lower(optimizer, finals))
            found.append(self._robust(store, preset, optimizer))
            validation = [self._median(store, preset, optimizer, kind, _validation) for kind in (EGOP, ORIGINAL)]
            words = f"EGOP {optimizer} reaches a lower validation loss than {optimizer}."
            sides = ((EGOP, validation[0]), (ORIGINAL, validation[1]))
            found.append(compare(f"linear-networks/{optimizer}-validation", words, *sides))
            found.append(_share(optimizer, finals, BLOCK, wanted=True))
            found.append(_share(optimizer, finals, FIRST, wanted=optimizer == "Adagrad"))
        found.append(self._adaptive(store, preset))
        for optimizer in _EQUIVARIANT:
            pair = (self._reported(store, preset, optimizer, kind) for kind in (ORIGINAL, EGOP))
            found.append(same_in_both(f"linear-networks/{optimizer}-same", *pair, "loss", 0.05))
        return found

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        curves = []
        for optimizer in self.settings(preset)["rates"]:
            for kind in (ORIGINAL, EGOP):
                runs = self._reported(store, preset, optimizer, kind)
                curves.append(curve_series(runs, "loss", optimizer, kind, runs[0].result["epoch"]))

        def over_rates(title: str, score: Score, kind: str) -> Panel:
            series = [
                rate_series(runs, score, name, each, self.chosen(store, preset, name))
                for name in self.settings(preset)["rates"]
                for each in (ORIGINAL, kind)
                if (runs := self._trials(store, preset, name, each))
            ]
            return Panel(title, "learning rate", "loss", series, xscale="log")

        return [
            Picture(
                "linear-networks",
                "Training loss by epoch at the learning rate chosen for original coordinates; final training loss and "
                "least validation loss by learning rate. Medians and quartiles over trials.",
                [
                    Panel("Training loss", "epoch", "loss", curves),
                    over_rates("Final training loss", _final, EGOP),
                    over_rates("Least validation loss", _validation, EGOP),
                ],
            ),
            Picture(
                "linear-networks-variants",
                "Final training loss by learning rate for three ways to reparameterise.",
                [over_rates(words.capitalize(), _final, kind) for kind, words in KINDS.items()],
            ),
        ]

    def _trials(self, store: Store, preset: Preset, optimizer: str, coordinates: str) -> list[Record]:
        runs = self.records(store, preset, optimizer=optimizer, coordinates=coordinates)
        return [run for run in runs if run.config["seed"] < TUNING]

    def _reported(self, store: Store, preset: Preset, optimizer: str, coordinates: str) -> list[Record]:
        rate = self.chosen(store, preset, optimizer)
        return [run for run in self._trials(store, preset, optimizer, coordinates) if run.config["lr"] == rate]

    def _median(self, store: Store, preset: Preset, optimizer: str, coordinates: str, score: Score) -> float:
        return median([score(run.result) for run in self._reported(store, preset, optimizer, coordinates)])

    def _robust(self, store: Store, preset: Preset, optimizer: str) -> Judged:
        original, turned = (by_rate(self._trials(store, preset, optimizer, kind), _final) for kind in (ORIGINAL, EGOP))
        better = sum(turned[rate][1] < original[rate][1] for rate in turned)
        words = f"EGOP {optimizer} is lower over a range of learning rates."
        found = f"Lower at {better} of {len(turned)} learning rates (holds above three quarters)."
        return Judged(f"linear-networks/{optimizer}-robust", words, verdict(better > 0.75 * len(turned)), found)

    def _adaptive(self, store: Store, preset: Preset) -> Judged:
        pairs = [(name, kind) for name in _ADAPTIVE for kind in (ORIGINAL, EGOP)]
        finals = {f"{kind} {name}": self._median(store, preset, name, kind, _final) for name, kind in pairs}
        worst = max(finals, key=lambda name: finals[name])
        best = min(self._median(store, preset, name, ORIGINAL, _final) for name in _EQUIVARIANT)
        words = "Adam and Adagrad end lower than SGD and SGD with momentum, in both coordinates."
        sides = (worst, finals[worst]), ("the better of SGD and SGD+momentum", best)
        return compare("linear-networks/adaptive", words, *sides)


def _final(result: Mapping[str, Any]) -> float:
    return float(result["final"])


def _validation(result: Mapping[str, Any]) -> float:
    return float(result["best validation"])


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _compact(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Single numbers always; curves only of reported trials at the chosen rate, and only some of their points."""
    numbers = {"final": result["loss"][-1], "best validation": _least(result["validation loss"])}
    if config.get("chosen", {}).get(config["optimizer"]) != config["lr"]:
        return numbers
    epochs = len(result["loss"]) - 1
    kept = sorted({round(place * epochs / _POINTS) for place in range(_POINTS + 1)})
    return numbers | {"epoch": kept} | {name: [values[k] for k in kept] for name, values in result.items()}


def _lower(optimizer: str, finals: Mapping[str, float]) -> Judged:
    found = f"EGOP: {finals[EGOP]:.3g}; original: {finals[ORIGINAL]:.3g} (holds from a factor of {_FAR:g})."
    words = f"EGOP {optimizer} ends at a far lower training loss than {optimizer}."
    return Judged(f"linear-networks/{optimizer}-lower", words, verdict(finals[EGOP] * _FAR <= finals[ORIGINAL]), found)


def _share(optimizer: str, finals: Mapping[str, float], kind: str, *, wanted: bool) -> Judged:
    """Compare gains in decades of the final loss: a variant's with that of reparameterising everything."""
    gain, own = (math.log10(finals[ORIGINAL] / max(finals[each], 1e-300)) for each in (EGOP, kind))
    words = f"EGOP {optimizer}, {KINDS[kind]}: a gain {'comparable to' if wanted else 'much smaller than'} that of "
    found = (
        f"{own:.2f} decades below original coordinates, against {gain:.2f} for all parameters in one basis "
        f"(comparable from {_COMPARABLE:.0%} of it): {finals[kind]:.3g}, {finals[EGOP]:.3g}, {finals[ORIGINAL]:.3g}."
    )
    name = f"linear-networks/{optimizer}-{'block' if kind == BLOCK else 'first-layer'}"
    judged = verdict((own >= _COMPARABLE * gain) == wanted) if gain > 0 else verdict(False)
    return Judged(name, f"{words}{KINDS[EGOP]}.", judged, found)
