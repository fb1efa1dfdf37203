"""Timed training of an image classifier: a residual network or a vision transformer."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop_lab.builders import Setup
from egop_lab.data import images
from egop_lab.methods import RESNET
from egop_lab.models import residual, vit
from egop_lab.training import timed_runs
from egop_lab.training.context import make_record
from egop_lab.training.records import Record

_ROWS = 1000  # least number of kernel gradients for every convolution


def count_samples(model: nn.Module) -> int:
    """Return the number of samples that gives every convolution enough kernel gradients."""
    return math.ceil(_ROWS / min(len(part.weight) for part in model.modules() if isinstance(part, nn.Conv2d)))


@dataclass(frozen=True)
class Network:
    """A kind of network.

    Attributes:
        make: builds it from the number of classes and a configuration.
        initialize: draws new parameters, from a generator or without.
        keys: the settings that it depends on.
    """

    make: Callable[[int, Mapping[str, Any]], nn.Module]
    initialize: Callable[..., nn.Module]
    keys: tuple[str, ...]


def _build_transformer(classes: int, config: Mapping[str, Any]) -> nn.Module:
    sizes = {name: config[name] for name in ("patch", "layers", "width", "heads", "hidden")}
    return vit.VisionTransformer(classes, side=config["crop"], **sizes)


RESIDUAL = "residual"
NETWORKS = {
    RESIDUAL: Network(
        lambda classes, config: residual.ResidualNetwork(config["depths"], config["width"], classes),
        residual.initialize_,
        ("depths", "width"),
    ),
    "transformer": Network(_build_transformer, vit.initialize_, ("patch", "layers", "width", "heads", "hidden")),
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


def _build_network(kind: str, settings: str, classes: int, device: torch.device) -> tuple[_Logits, _Logits]:
    """Return the outputs of a network on the device, for evaluation and for training; the settings are a cache key."""
    config = json.loads(settings)
    model = NETWORKS[kind].make(classes, config).to(device)
    eager = _Logits(model, device)
    if device.type != "cuda":
        return eager, eager
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sample = torch.zeros(config["batch"], 3, config["crop"], config["crop"], device=device)
    return eager, timed_runs.capture_graphs(_Logits(model, device), sample)


def train_in_process(source: Mapping[str, Any], ends: float, config: Mapping[str, Any]) -> Record | None:
    """Train in a process that shares the device with others; return None when the time is over.

    Its seconds say nothing of the method, so that they are not recorded.

    Args:
        source: arguments for loading the images.
        ends: time after which no run starts, by the monotonic clock, which processes share.
        config: the configuration of the run.
    """
    if time.monotonic() > ends:
        return None
    began, device = time.perf_counter(), source["device"]
    with timed_runs.fast_math(device):
        result = Run(_load_images(**source), config, device)(progress=False)
    untimed = {"seconds": [math.nan] * len(result["seconds"])}
    return make_record(config, result | untimed, time.perf_counter() - began, device)


_load_images = functools.lru_cache(maxsize=1)(images.load)


class Run(timed_runs.Run):
    """Training of a network on images; a pass is an epoch.

    Which network ``network`` in the configuration says; a residual one where nothing does.
    """

    comparison: ClassVar[str] = RESNET
    unit: ClassVar[str] = "epoch"
    curves: ClassVar[tuple[str, ...]] = (
        "validation loss",
        "accuracy",
        "training loss",
        "training accuracy",
        "seconds",
    )

    def __init__(self, data: images.Images, config: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(config, device)
        self.data = data
        self.right: list[Tensor] = []  # accuracy on each batch of a pass
        seed, size = config["seed"], config["batch"]
        kind = config.get("network", RESIDUAL)
        self.network = NETWORKS[kind]
        start = self.network.make(data.classes, config)
        self.network.initialize(start, torch.Generator().manual_seed(seed))
        settings = json.dumps({key: config[key] for key in (*self.network.keys, "batch", "crop")})
        self.logits, self._training_logits = timed_runs.get_network(
            _build_network, kind, settings, data.classes, device
        )
        self.model = self.logits.model
        self.model.load_state_dict(start.state_dict())
        self.model.zero_grad()
        self.batches = data.training(size, 2 * seed)
        self.objective = egop.Objective(self.model, self._sampled_loss, data.training(size, 2 * seed + 1))

    @property
    def passes(self) -> int:
        return int(self.config["epochs"])

    @property
    def length(self) -> int:
        return self.passes * self.epoch

    @property
    def epoch(self) -> int:
        """Number of steps per epoch."""
        return self.data.counts["train"] // int(self.config["batch"])

    def make_setup(self) -> Setup:
        """Return the setup of the optimizer: every convolution and the head get bases."""
        config = self.config
        return Setup(
            options={"lr": config["lr"], "weight_decay": config["weight decay"]},
            period=self.epoch,
            model=self.model,
            objective=self.objective,
            init_fn=self.network.initialize,
            samples=config.get("samples") or count_samples(self.model),
            seed=config["seed"],
        )

    def _sampled_loss(self, model: nn.Module, batch: images.Batch) -> Tensor:
        return F.cross_entropy(_Logits(model, self.device)(batch[0]), batch[1])

    def training_loss(self, batch: images.Batch) -> Tensor:
        logits = self.logits if self.config.get("eager") else self._training_logits
        outputs = logits(batch[0])
        self.right.append((outputs.detach().argmax(1) == batch[1]).float().mean())
        return F.cross_entropy(outputs, batch[1])

    def validate(self) -> dict[str, float]:
        training = float(torch.stack(self.right).mean()) if self.right else math.nan
        self.right = []
        loss, accuracy = self._scores(self.data.validation(ten=False))
        return {"loss": loss, "accuracy": accuracy, "training accuracy": training}

    @torch.no_grad()
    def final_metrics(self) -> dict[str, float]:
        self.model.eval()
        loss, accuracy = self._scores(self.data.validation(ten=True))
        return {"ten-crop loss": loss, "ten-crop accuracy": accuracy}

    def _scores(self, batches: Iterable[images.Batch]) -> tuple[float, float]:
        """Compute loss and accuracy of the mean of the outputs over an image's views."""
        total, right, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for views, labels in batches:
            outputs = self.logits(views.flatten(0, 1)).unflatten(0, views.shape[:2]).mean(1)
            total += F.cross_entropy(outputs, labels, reduction="sum")
            right += (outputs.argmax(1) == labels).sum()
            count += len(labels)
        return float(total) / count, float(right) / count
