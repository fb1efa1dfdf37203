"""One timed training of a residual network on images."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop_lab.data import images
from egop_lab.making import Start
from egop_lab.methods import RESNET
from egop_lab.models.residual import ResidualNetwork, initialize_
from egop_lab.training import timed

_ROWS = 1000  # gradients of a kernel that every convolution is to have at least


def samples_for(model: nn.Module) -> int:
    """How many gradients give every convolution its rows."""
    return math.ceil(_ROWS / min(len(part.weight) for part in model.modules() if isinstance(part, nn.Conv2d)))


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
    """The outputs of a network on the device, and the same for training; kept for the runs to come."""
    model = ResidualNetwork(depths, width, classes).to(device)
    eager = _Logits(model, device)
    if device.type != "cuda":
        return eager, eager
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return eager, timed.graphed(_Logits(model, device), torch.zeros(batch, 3, crop, crop, device=device))


class Run(timed.Run):
    """A residual network on images; a pass is an epoch.

    Args:
        data: the images.
        config: of the run.
        device: where.
    """

    comparison: ClassVar[str] = RESNET
    unit: ClassVar[str] = "epoch"
    curves: ClassVar[tuple[str, ...]] = ("validation loss", "accuracy", "training loss", "seconds")

    def __init__(self, data: images.Images, config: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(config, device)
        self.data = data
        seed, size = config["seed"], config["batch"]
        start = ResidualNetwork(config["depths"], config["width"], data.classes)
        initialize_(start, torch.Generator().manual_seed(seed))
        shape = tuple(config["depths"]), config["width"], data.classes, size, config["crop"]
        self.logits, self._training_logits = _network(*shape, device)
        self.model = self.logits.model
        self.model.load_state_dict(start.state_dict())
        self.model.zero_grad()
        self.batches = data.training(size, 2 * seed)
        self.objective = egop.Objective(self.model, self._sampled_loss, data.training(size, 2 * seed + 1))

    @property
    def passes(self) -> int:
        return int(self.config["epochs"])

    def start(self) -> Start:
        """Every convolution and the head get bases."""
        config = self.config
        return Start(
            options={"lr": config["lr"], "weight_decay": config["weight decay"]},
            period=self.data.counts["train"] // config["batch"],
            model=self.model,
            objective=self.objective,
            init_fn=initialize_,
            samples=samples_for(self.model),
            seed=config["seed"],
        )

    def _sampled_loss(self, model: nn.Module, batch: images.Batch) -> Tensor:
        return F.cross_entropy(_Logits(model, self.device)(batch[0]), batch[1])

    def training_loss(self, batch: images.Batch) -> Tensor:
        return F.cross_entropy(self._training_logits(batch[0]), batch[1])

    def validate(self) -> dict[str, float]:
        loss, accuracy = self._scores(self.data.validation(ten=False))
        return {"loss": loss, "accuracy": accuracy}

    @torch.no_grad()
    def at_end(self) -> dict[str, float]:
        self.model.eval()
        loss, accuracy = self._scores(self.data.validation(ten=True))
        return {"ten-crop loss": loss, "ten-crop accuracy": accuracy}

    def _scores(self, batches: Iterable[images.Batch]) -> tuple[float, float]:
        """Loss and accuracy of the mean of the outputs over an image's views."""
        total, right, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for views, labels in batches:
            outputs = self.logits(views.flatten(0, 1)).unflatten(0, views.shape[:2]).mean(1)
            total += F.cross_entropy(outputs, labels, reduction="sum")
            right += (outputs.argmax(1) == labels).sum()
            count += len(labels)
        return float(total) / count, float(right) / count
