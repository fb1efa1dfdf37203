"""AlexNet on Imagenette: one EGOP basis for the filters of a layer, estimated up front, against Adam and AdamW."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import egop
from egop_lab.data import images
from egop_lab.experiments.base import Experiment, Judgement, Table, compare, to_verdict
from egop_lab.experiments.curves import median
from egop_lab.models.alexnet import alexnet
from egop_lab.models.residual import initialize_
from egop_lab.models.small import cross_entropy
from egop_lab.training.batched import RANDOM
from egop_lab.training.context import Context
from egop_lab.training.loop import train
from egop_lab.training.records import Record
from egop_lab.training.resnet import count_samples
from egop_lab.training.tuning import TUNING, best_rate

METHODS = ("Adam", "AdamW", "EGOP AdamW", f"{RANDOM} AdamW")
_HALF = 0.5


class AlexNetExperiment(Experiment):
    """Each method at its own learning rate: the one with the highest validation accuracy in shorter runs."""

    id: ClassVar[str] = "alexnet"

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"images": [None, None] if self.preset == "full" else [3000, 1000]}

    def run(self, context: Context) -> None:
        settings = self.settings
        tuning = [
            self._config(method, lr, settings["tuning epochs"], TUNING)
            for method in METHODS
            for lr in settings["rates"]
        ]
        data = functools.cache(functools.partial(self._load, context))  # only if there is something to run

        def train(config: Mapping[str, Any]) -> dict[str, Any]:
            return train_once(data(), config, context)

        self.do_missing(tuning, train, context.device)
        self.do_missing(self._reported_configs(), train, context.device)

    def _load(self, context: Context) -> images.HeldImages:
        settings = self.settings
        sizes = {"side": settings["side"], "crop": settings["crop"], "limits": tuple(settings["images"])}
        return images.load(context.data, device=context.device, workers=context.workers, **sizes)

    def _config(self, method: str, lr: float, epochs: int, seed: int) -> dict[str, Any]:
        names = ("weight decay", "batch", "side", "crop", "width", "hidden", "images")
        settings = self.settings
        common = {name: settings[name] for name in names}
        return self.config(method=method, lr=lr, epochs=epochs, seed=seed, **common)

    def _reported_configs(self) -> list[dict[str, Any]]:
        settings = self.settings
        rates = {method: self.choose_rate(method) for method in METHODS}
        trials = [(method, seed) for seed in range(settings["trials"]) for method in METHODS]
        return [self._config(method, rates[method], settings["epochs"], seed) for method, seed in trials]

    def choose_rate(self, method: str) -> float:
        """Return the learning rate of the highest validation accuracy in the tuning runs."""
        runs = self.records(method=method, seed=TUNING)
        if len(runs) < len(self.settings["rates"]):
            raise LookupError(f"{method} is not tuned yet")
        return best_rate(runs, lambda result: -max(result["accuracy"]))

    def _reported_runs(self) -> dict[str, list[Record]]:
        configs = self._reported_configs()
        if self.store.missing(configs):
            raise LookupError("trials are left")
        runs = [run for config in configs if (run := self.store.get(config))]
        return {method: [run for run in runs if run.config["method"] == method] for method in METHODS}

    def judge(self) -> list[Judgement]:
        runs = self._reported_runs()
        ends = {method: median([run.result["training loss"][-1] for run in own]) for method, own in runs.items()}
        adam, adamw, turned, random = (ends[method] for method in METHODS)
        judged = [
            compare(
                f"alexnet/{name}",
                f"Control: EGOP AdamW trains to a lower loss than {name}.",
                ("EGOP AdamW", turned),
                (name, end),
                kind="control",
            )
            for name, end in (("Adam", adam), ("AdamW", adamw))
        ]
        gain, theirs = math.log10(adamw / turned), math.log10(adamw / random)
        judged.append(
            Judgement(
                "alexnet/random",
                "Control: a random rotation gives less than half of EGOP's gain.",
                to_verdict(gain > 0 and theirs < _HALF * gain),
                f"Decades below AdamW: random rotation {theirs:.3f}, EGOP {gain:.3f}.",
                "control",
            )
        )
        if self.preset == "full":
            return judged
        note = "One trial of a small version, which is too small to judge by."
        return [replace(each, verdict="cannot be judged", finding=f"{each.finding} {note}") for each in judged]

    def tables(self) -> list[Table]:
        rows = []
        for method, runs in self._reported_runs().items():
            ends = [median([run.result[name][-1] for run in runs]) for name in ("training loss", "loss", "accuracy")]
            rows.append((method, f"{runs[0].config['lr']:g}", f"{ends[0]:.3f}", f"{ends[1]:.3f}", f"{ends[2]:.1%}"))
        header = ("method", "learning rate", "training loss", "validation loss", "accuracy")
        return [Table("After the last epoch, medians over trials", header, tuple(rows))]


def train_once(data: images.HeldImages, config: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Train once; return curves by epoch. The training loss of epoch 0 is that of its first batch."""
    device, seed = context.device, config["seed"]
    model = alexnet(config["width"], config["hidden"], data.classes)
    initialize_(model, torch.Generator().manual_seed(seed)).to(device)
    optimizer = build(config, model, data)
    torch.manual_seed(seed)  # the same dropout for all methods
    losses: list[float] = []

    def compute_loss(model: nn.Module, batch: images.Batch) -> torch.Tensor:
        loss = cross_entropy(model, batch)
        losses.append(loss.item())
        return loss

    def evaluate(model: nn.Module) -> dict[str, float]:
        total = right = count = 0.0
        for views, labels in data.validation(ten=False):
            outputs = model(views.flatten(0, 1))
            total += float(F.cross_entropy(outputs, labels, reduction="sum"))
            right += float((outputs.argmax(1) == labels).sum())
            count += len(labels)
        seen = sum(losses) / len(losses) if losses else math.log(data.classes)
        losses.clear()
        return {"loss": total / count, "accuracy": right / count, "training loss": seen}

    batches = data.training(config["batch"], 2 * seed)
    name = f"{config['method']}, lr {config['lr']:g}"
    options: dict[str, Any] = {"evaluate": evaluate, "progress": context.progress, "description": name}
    curve = train(model, optimizer, compute_loss, batches, config["epochs"], **options)
    missing = [math.nan] * (config["epochs"] + 1 - len(curve.loss))
    return {name: [*values, *missing] for name, values in {"loss": curve.loss, **curve.metrics}.items()}


def build(config: Mapping[str, Any], model: nn.Module, data: images.HeldImages) -> Optimizer:
    """Build the optimizer of a method; a basis belongs to the filters of each convolution."""
    method, seed = config["method"], config["seed"]
    if method == "Adam":
        return torch.optim.Adam(model.parameters(), lr=config["lr"])
    options = {"lr": config["lr"], "weight_decay": config["weight decay"]}
    if method == "AdamW":
        return torch.optim.AdamW(model.parameters(), **options)
    structure = (
        egop.Shared() if method.startswith("EGOP") else egop.extras.RandomRotation(seed=seed, like=egop.Shared())
    )
    basis = egop.estimate(
        egop.Objective(model, cross_entropy, data.training(config["batch"], 2 * seed + 1)),
        rho=egop.Initialization(init_fn=initialize_),
        partition="parameter",
        structure={
            f"{name}.weight": structure for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)
        },
        samples=count_samples(model),
        generator=torch.Generator().manual_seed(seed),
        sampling="loop",
        progress=False,
    )
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, **options)
