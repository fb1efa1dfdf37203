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
from egop.training import train
from egop_lab.data import images
from egop_lab.data.missing import MissingDataError
from egop_lab.models.residual import ResidualNetwork, initialize_

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


class _Logits(nn.Module):
    """A network's outputs, computed in bfloat16 on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model: nn.Module = model
        self.kind = device.type

    def forward(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.kind == "cuda" else torch.contiguous_format
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.kind == "cuda", cache_enabled=False):
            return self.model(images.contiguous(memory_format=layout)).float()


@functools.lru_cache(maxsize=1)
def _network(
    depths: tuple[int, ...], width: int, classes: int, batch: int, crop: int, device: torch.device
) -> tuple[_Logits, _Logits]:
    """The outputs of a network on the device, and the same as a CUDA graph for training; kept for the runs to come.

    A step of a small batch is mostly spent on launching kernels; replayed as a graph it takes less than half the time.
    """
    model = ResidualNetwork(depths, width, classes).to(device)
    eager = graphed = _Logits(model, device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        graphed = _Logits(model, device)
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
        kept = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True  # the fastest kernels are chosen once, for the graph
        torch.cuda.make_graphed_callables(graphed, (torch.zeros(batch, 3, crop, crop, device=device),))
        torch.backends.cudnn.benchmark = kept
    return eager, graphed


class Run:
    """One training for the training loop: batches, loss and evaluation, with a clock and the mean loss of an epoch."""

    def __init__(self, data: images.Images, config: dict[str, Any], device: torch.device) -> None:
        self.data, self.config, self.device = data, config, device
        seed, size = config["seed"], config["batch"]
        start = ResidualNetwork(config["depths"], config["width"], data.classes)
        initialize_(start, torch.Generator().manual_seed(seed))
        shape = tuple(config["depths"]), config["width"], data.classes, size, config["crop"]
        self.logits, self.training_logits = _network(*shape, device)
        self.model = self.logits.model
        self.model.load_state_dict(start.state_dict())
        self.model.zero_grad()
        self.batches = data.training(size, 2 * seed)
        self.objective = egop.Objective(self.model, self.sampled_loss, data.training(size, 2 * seed + 1))
        self.seconds = 0.0
        self.losses: list[Tensor] = []

    def sampled_loss(self, model: nn.Module, batch: images.Batch) -> Tensor:
        return F.cross_entropy(_Logits(model, self.device)(batch[0]), batch[1])

    def loss(self, _: nn.Module, batch: images.Batch) -> Tensor:
        loss = F.cross_entropy(self.training_logits(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def __iter__(self) -> Iterator[images.Batch]:
        self.losses = []
        self.began = time.perf_counter()
        yield from self.batches

    def evaluate(self, _: nn.Module) -> dict[str, float]:
        self.seconds += time.perf_counter() - self.began  # the training loop has just waited for the device
        loss, accuracy = self.scores(self.data.validation(ten=False))
        training = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        return {"loss": loss, "accuracy": accuracy, "training loss": training, "seconds": self.seconds}

    def scores(self, batches: Iterable[images.Batch]) -> tuple[float, float]:
        """Loss and accuracy of the mean of the outputs over an image's views."""
        total, right, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for views, labels in batches:
            outputs = self.logits(views.flatten(0, 1)).unflatten(0, views.shape[:2]).mean(1)
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
            ten = self.scores(self.data.validation(ten=True))
        curves = {"validation loss": curve.loss, **curve.metrics}
        left = [math.nan] * (config["epochs"] + 1 - len(curve.loss))  # a run that diverged ended early
        result: dict[str, Any] = {name: [*values, *left] for name, values in curves.items()}
        return result | {"ten-crop loss": ten[0], "ten-crop accuracy": ten[1], "diverged": curve.diverged}


@contextlib.contextmanager
def fast(device: torch.device) -> Iterator[None]:
    """On a GPU, TF32 for products in float32. Without the log lines of the sampling, one a renewal."""
    logger = logging.getLogger("egop")
    kept = torch.get_float32_matmul_precision(), logger.level
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    logger.setLevel(logging.ERROR)  # they say that batch norm cannot be vmapped
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        logger.setLevel(kept[1])


def warm_up(data: images.Images, config: dict[str, Any], device: torch.device) -> None:
    """On a GPU, one epoch and decompositions that nobody times: no run is to pay for what the first one sets up."""
    try:
        import pytorch_optimizer  # noqa: F401 - takes seconds
    except ModuleNotFoundError as error:
        raise MissingDataError(
            "SOAP and Muon come from a package that is not installed: pip install pytorch_optimizer"
        ) from error
    if device.type == "cuda":
        Run(data, config, device)(progress=False)
        torch.linalg.eigh(torch.eye(64, dtype=torch.float64, device=device))
        torch.linalg.qr(torch.eye(64, device=device))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
