"""The Fashion-MNIST network: single timed runs with the library's optimizer, and batched runs.

The paper collects M = 0.01 d ≈ 800 gradients, fewer than its larger ranks and its 4000 plotted eigenvalues need. Here a
basis is made from at least as many gradients as it has directions, and the spectrum from a number of its own. A layer
with no more weights than the rank has a full basis: with as many directions as weights nothing is left outside them.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import egop
from egop.estimation import sample_gradients
from egop_lab.data.batches import Batches
from egop_lab.data.fashion import fashion_folder, fashion_mnist
from egop_lab.gpu import synchronize
from egop_lab.models.small import cross_entropy, fashion_network, normal_, scores
from egop_lab.training import batched
from egop_lab.training.context import Context
from egop_lab.training.loop import pad, train
from egop_lab.training.networks import ImageTrials
from egop_lab.training.spectra import subsample

BATCH = 300
_SHOWN = 4000  # eigenvalues

Curves = dict[str, list[float]]


class Runs:
    """The data on the device, and one run at a time; the basis of a run is kept for the next one."""

    def __init__(self, images: int, context: Context) -> None:
        data = fashion_mnist(context.data)
        context.say(f"images: {fashion_folder(context.data)}")
        self.context = context
        self.train_set, self.validation, self.test = data.to(context.device)
        self.train_set = tuple(tensor[:images] for tensor in self.train_set)
        self._kept: tuple[tuple[int, int, bool], egop.Basis, float] | None = None

    def train(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Train once; return curves by epoch, and the seconds of steps and estimation. Rank 0: original coordinates."""
        rank, seed = config["rank"], config["seed"]
        model = self.start(seed)
        basis, estimation = self.basis(rank, seed, config.get("reduced", False)) if rank else (None, 0.0)
        batches = Batches(*self.train_set, size=BATCH, generator=generator(seed, 1))
        curve = train(
            model,
            _optimizer(model, basis, config["lr"], config["weight_decay"]),
            cross_entropy,
            batches,
            config["epochs"],
            evaluate=lambda model: scores(model, self.train_set, self.validation, self.test),
            progress=self.context.progress,
            description=f"r = {rank}, lr {config['lr']:g}, decay {config['weight_decay']:g}",
        )
        curves = {"loss": curve.loss, **curve.metrics}
        result: dict[str, Any] = {name: pad(values, config["epochs"]) for name, values in curves.items()}
        return result | {"seconds": curve.seconds, "estimation seconds": estimation}

    def spectrum(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the leading eigenvalues of the first layer's EGOP matrix from inner products of gradients."""
        seed, samples = config["seed"], config["samples"]
        chunks = sample_gradients(
            self._objective(seed),
            egop.Initialization(init_fn=normal_),
            samples,
            names=["0.weight"],
            generator=generator(seed, 2),
            progress=self.context.progress,
        )
        rows = torch.cat([chunk["0.weight"].flatten(1) for chunk in chunks])
        gram = torch.zeros(samples, samples, dtype=torch.float64, device=rows.device)
        for part in rows.split(4096, dim=1):
            gram.addmm_(part.double(), part.double().mT)
        values = torch.linalg.eigvalsh(gram / samples).flip(0).clamp_min(0)
        return {**subsample(values[:_SHOWN].tolist(), leading=50), "samples": samples}

    def start(self, seed: int) -> nn.Module:
        return normal_(fashion_network(), generator(seed, 0)).to(self.context.device)

    def _objective(self, seed: int) -> egop.Objective:
        batches = Batches(*self.train_set, size=BATCH, generator=generator(seed, 3))
        return egop.Objective(self.start(seed), cross_entropy, batches)

    def time_epochs(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Return the mean seconds of an epoch, after one that is not counted, and those of the estimation."""
        self.train({**config, "epochs": 1})
        result = self.train(config)
        return {
            "seconds per epoch": result["seconds"] / config["epochs"],
            "estimation seconds": result["estimation seconds"],
        }

    def basis(self, rank: int, seed: int, reduced: bool = False) -> tuple[egop.Basis, float]:
        """Return the basis of a rank and the seconds it took; if reduced, only its leading directions are trained."""
        kind = egop.Reduced if reduced else egop.Auxiliary
        if self._kept is None or self._kept[0] != (rank, seed, reduced):
            self._kept = None  # two large bases need not fit at once
            objective = self._objective(seed)
            sizes = {name: value.numel() for name, value in objective.parameters.items()}
            began = time.perf_counter()
            basis = egop.estimate(
                objective,
                rho=egop.Initialization(init_fn=normal_),
                partition="parameter",
                structure={
                    name: kind(rank=rank) if rank < sizes[name] else egop.Full() for name in ("0.weight", "2.weight")
                },
                samples=max(math.ceil(0.01 * sum(sizes.values())), rank),
                generator=generator(seed, 2),
                progress=self.context.progress,
            )
            synchronize(self.context.device)
            self._kept = (rank, seed, reduced), basis, time.perf_counter() - began
        return self._kept[1], self._kept[2]


def generator(seed: int, purpose: int) -> torch.Generator:
    """Return the random stream for the start (0), the training batches (1) or the estimation (2, 3)."""
    return torch.Generator().manual_seed(4 * seed + purpose)


def _optimizer(model: nn.Module, basis: egop.Basis | None, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build AdamW with weight decay on weights (on all of their coordinates), not on biases."""
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, value) for name, value in named if value.dim() > 1], "weight_decay": weight_decay},
        {"params": [(name, value) for name, value in named if value.dim() == 1], "weight_decay": 0.0},
    ]
    if basis is None:
        return torch.optim.AdamW(groups, lr=lr)
    return egop.ReparameterizedOptimizer(groups, torch.optim.AdamW, basis, lr=lr)


class FashionProblem(ImageTrials):
    """Trials of the network, with the starts and the orders of the batches of :class:`Runs`."""

    def __init__(self, runs: Runs, seeds: Sequence[int]) -> None:
        sources: dict[int, torch.Generator] = {}

        def source(seed: int, epoch: int) -> torch.Generator:
            if epoch == 0:
                sources[seed] = generator(seed, 1)
            return sources[seed]

        super().__init__(seeds, runs.start, source, (runs.train_set, runs.validation, runs.test), BATCH)


def train_batched(runs: Runs, configs: Sequence[Mapping[str, Any]]) -> tuple[list[Curves], float]:
    """Train several runs of one method: each seed with each pair of learning rate and weight decay.

    Returns:
        Curves by epoch in the order of the configurations, and the seconds of all of them together.
    """
    seeds = sorted({config["seed"] for config in configs})
    pairs = sorted({(config["lr"], config["weight_decay"]) for config in configs})
    ((rank, reduced, epochs),) = {(c["rank"], c.get("reduced", False), c["epochs"]) for c in configs}
    problem = FashionProblem(runs, seeds)
    basis = batched.Basis.stack([runs.basis(rank, seed, reduced)[0] for seed in seeds]) if rank else None
    curves, seconds = batched.train(
        problem,
        "AdamW",
        [rate for rate, _ in pairs],
        epochs * problem.steps_per_epoch,
        weight_decays=[decay for _, decay in pairs],
        basis=basis,
        record_every=problem.steps_per_epoch,
        progress=runs.context.progress,
    )
    places = [(seeds.index(c["seed"]), pairs.index((c["lr"], c["weight_decay"]))) for c in configs]
    own = [{name: values[place].tolist() for name, values in curves.items()} for place in places]
    return [_end_at_divergence(each) for each in own], seconds


def _end_at_divergence(curves: Curves) -> Curves:
    """Replace everything after the first non-finite loss by nan, as in a single run."""
    end = next((place + 1 for place, loss in enumerate(curves["loss"]) if not math.isfinite(loss)), None)
    return {
        name: values if end is None else values[:end] + [math.nan] * (len(values) - end)
        for name, values in curves.items()
    }
