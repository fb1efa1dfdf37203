"""One training of a residual network by one method: the optimizers to compare, and the run that is recorded."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop.experiments import images
from egop.experiments.networks import ResidualNetwork, initialize_
from egop.experiments.train import train

_ROWS = 1000  # gradients of a kernel that every convolution is to have at least


@dataclass(frozen=True)
class Start:
    """What an optimizer is made from: a network at its start, its loss, and the settings of the run."""

    model: nn.Module
    objective: egop.Objective
    lr: float
    weight_decay: float
    steps_per_epoch: int
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    @property
    def passes(self) -> int:
        """How many gradients give every convolution its rows."""
        return math.ceil(_ROWS / min(len(part.weight) for part in self.model.modules() if isinstance(part, nn.Conv2d)))


def _adamw(start: Start) -> torch.optim.Optimizer:
    return torch.optim.AdamW(start.model.parameters(), **start.options)


def _sampled(start: Start, *, renewed: bool) -> torch.optim.Optimizer:
    """A shared basis for every convolution and the head, from gradients at fresh initialisations."""
    basis = egop.estimate(
        start.objective,
        rho=egop.Initialization(init_fn=initialize_),
        structure=egop.Shared(),
        samples=start.passes,
        generator=torch.Generator().manual_seed(start.seed),
        sampling="loop",
        progress=False,
    )
    every = egop.Every(start.steps_per_epoch, start.objective, samples=start.passes, seed=start.seed)
    refresh = every if renewed else None
    return egop.ReparameterizedOptimizer(start.model, torch.optim.AdamW, basis, refresh=refresh, **start.options)


def _online(start: Start, structure: egop.Structure) -> torch.optim.Optimizer:
    refresh = egop.Online(every=10, structure=structure)
    return egop.ReparameterizedOptimizer(start.model, torch.optim.AdamW, refresh=refresh, **start.options)


def _soap(start: Start, every: int | None) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    frequency = start.steps_per_epoch if every is None else every
    return SOAP(start.model.parameters(), precondition_frequency=frequency, **start.options)


def _muon(start: Start) -> torch.optim.Optimizer:
    """Kernels as matrices by Muon, with updates of AdamW's size; norm layers, biases and the head by AdamW."""
    from pytorch_optimizer import Muon

    kernels = [part.weight for part in start.model.modules() if isinstance(part, nn.Conv2d)]
    inside = set(kernels)
    others = [parameter for parameter in start.model.parameters() if parameter not in inside]
    return Muon(
        [
            {"params": kernels, "use_muon": True, "use_adjusted_lr": True, **start.options},
            {"params": others, "use_muon": False, "betas": (0.9, 0.999), "eps": 1e-8, **start.options},
        ]
    )


ADAMW, MUON = "AdamW", "Muon"
UPFRONT, PERIODIC, ONLINE, BOTH_SIDES = "EGOP up-front", "EGOP each epoch", "EGOP online", "EGOP online, two-sided"
SOAP_ONCE, SOAP_EPOCH, SOAP_10 = "SOAP once", "SOAP each epoch", "SOAP every 10"

METHODS: dict[str, Callable[[Start], torch.optim.Optimizer]] = {
    ADAMW: _adamw,
    UPFRONT: functools.partial(_sampled, renewed=False),
    PERIODIC: functools.partial(_sampled, renewed=True),
    ONLINE: functools.partial(_online, structure=egop.Shared()),
    BOTH_SIDES: functools.partial(_online, structure=egop.Kronecker()),
    SOAP_ONCE: functools.partial(_soap, every=10**9),
    SOAP_EPOCH: functools.partial(_soap, every=None),
    SOAP_10: functools.partial(_soap, every=10),
    MUON: _muon,
}


class Run:
    """One training for the training loop: batches, loss and evaluation, with a clock and the mean loss of an epoch."""

    def __init__(self, data: images.Images, config: dict[str, Any], device: torch.device) -> None:
        self.data, self.config, self.device = data, config, device
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        seed, size = config["seed"], config["batch"]
        model = ResidualNetwork(config["depths"], config["width"], data.classes)
        initialize_(model, torch.Generator().manual_seed(seed))
        self.model = model.to(device).to(memory_format=self.layout)  # type: ignore[call-overload]
        self.batches = data.training(size, 2 * seed)
        self.objective = egop.Objective(self.model, self.cross_entropy, data.training(size, 2 * seed + 1))
        self.seconds = 0.0
        self.losses: list[Tensor] = []

    def logits(self, model: nn.Module, views: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return model(views.contiguous(memory_format=self.layout)).float()

    def cross_entropy(self, model: nn.Module, batch: images.Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch[0]), batch[1])

    def __iter__(self) -> Iterator[images.Batch]:
        self.losses = []
        self.began = time.perf_counter()
        yield from self.batches

    def loss(self, model: nn.Module, batch: images.Batch) -> Tensor:
        loss = self.cross_entropy(model, batch)
        self.losses.append(loss.detach())
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.seconds += time.perf_counter() - self.began  # the training loop has just waited for the device
        loss, accuracy = self.scores(model, self.data.validation(ten=False))
        training = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        return {"loss": loss, "accuracy": accuracy, "training loss": training, "seconds": self.seconds}

    def scores(self, model: nn.Module, batches: Iterable[images.Batch]) -> tuple[float, float]:
        """Loss and accuracy of the mean of the outputs over an image's views."""
        total, right, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for views, labels in batches:
            outputs = self.logits(model, views.flatten(0, 1)).unflatten(0, views.shape[:2]).mean(1)
            total += F.cross_entropy(outputs, labels, reduction="sum")
            right += (outputs.argmax(1) == labels).sum()
            count += len(labels)
        return float(total) / count, float(right) / count

    def __call__(self, progress: bool) -> dict[str, Any]:
        config, steps = self.config, self.data.counts["train"] // self.config["batch"]
        self.model.train()
        self.began = time.perf_counter()
        optimizer = METHODS[config["method"]](
            Start(self.model, self.objective, config["lr"], config["weight decay"], steps, config["seed"])
        )
        _wait(self.device)
        name = f"{config['method']}, lr {config['lr']:g}, seed {config['seed']}"
        options: dict[str, Any] = {"evaluate": self.evaluate, "progress": progress, "description": name}
        curve = train(self.model, optimizer, self.loss, self, config["epochs"], **options)
        with torch.no_grad():
            self.model.eval()
            ten = self.scores(self.model, self.data.validation(ten=True))
        curves = {"validation loss": curve.loss, **curve.metrics}
        left = [math.nan] * (config["epochs"] + 1 - len(curve.loss))  # a run that diverged ended early
        result: dict[str, Any] = {name: [*values, *left] for name, values in curves.items()}
        return result | {"ten-crop loss": ten[0], "ten-crop accuracy": ten[1], "diverged": curve.diverged}


@contextlib.contextmanager
def fast(device: torch.device) -> Iterator[None]:
    """On a GPU: TF32 products and the fastest convolutions. And one log line of the sampling is enough."""
    logger = logging.getLogger("egop")
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, logger.level
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    logger.setLevel(logging.ERROR)  # every renewal would say that batch norm cannot be vmapped
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cudnn.benchmark = kept[1]
        logger.setLevel(kept[2])


def warm_up(data: images.Images, config: dict[str, Any], device: torch.device) -> None:
    """On a GPU: one epoch and decompositions that nobody times, so that no run pays for what the first one sets up."""
    if device.type == "cuda":
        Run(data, config, device)(progress=False)
        torch.linalg.eigh(torch.eye(64, dtype=torch.float64, device=device))
        torch.linalg.qr(torch.eye(64, device=device))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
