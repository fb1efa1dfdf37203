"""Timed training of a small language model on the bytes of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop_lab.builders import Setup
from egop_lab.data.text import Text, Windows
from egop_lab.methods import LANGUAGE
from egop_lab.models.gpt import GPT, initialize_
from egop_lab.training import timed_runs

BETAS = (0.9, 0.95)  # usual for language models; SOAP keeps its own
_SHAPE = ("layers", "width", "heads", "context")
# The settings that decide the outcome of a run, besides its method, learning rate, length and seed.
COMMON = (*_SHAPE, "batch", "weight decay", "warm-up", "interval", "windows", "samples", "period")


class _Loss(nn.Module):
    """The mean cross-entropy of every byte of a window but the first, in nats; computed in bfloat16 on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model: nn.Module = model
        self.kind = device.type

    def forward(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.kind == "cuda", cache_enabled=False):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def _build_network(shape: tuple[int, ...], batch: int, device: torch.device) -> tuple[GPT, nn.Module]:
    """Build a model on the device, and its loss for training."""
    sizes = dict(zip(_SHAPE, shape, strict=True))
    model = GPT(**sizes).to(device)
    loss = _Loss(model, device)
    if device.type == "cuda":
        timed_runs.capture_graphs(loss, torch.zeros(batch, sizes["context"] + 1, dtype=torch.uint8, device=device))
    return model, loss


class Run(timed_runs.Run):
    """Training of a GPT on a text; a pass is a fixed number of steps."""

    comparison: ClassVar[str] = LANGUAGE
    unit: ClassVar[str] = "look"
    curves: ClassVar[tuple[str, ...]] = ("validation loss", "training loss", "seconds")

    def __init__(self, text: Text, config: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(config, device)
        shape = tuple(config[name] for name in _SHAPE)
        start = GPT(**dict(zip(_SHAPE, shape, strict=True)))
        initialize_(start, torch.Generator().manual_seed(config["seed"]))
        self.model, self._graphed_loss = timed_runs.get_network(_build_network, shape, config["batch"], device)
        self.model.load_state_dict(start.state_dict())
        self.model.zero_grad()
        sizes = {"length": config["context"] + 1, "size": config["batch"], "count": config["interval"]}
        self.batches = Windows(text.train, seed=2 * config["seed"], **sizes)
        sampled = Windows(text.train, seed=2 * config["seed"] + 1, **sizes)
        self.objective = egop.Objective(self.model, lambda model, batch: _Loss(model, device)(batch), sampled)
        self.validation = text.windows(config["context"] + 1, config["windows"]).split(2 * config["batch"])

    @property
    def passes(self) -> int:
        return int(self.config["steps"]) // int(self.config["interval"])

    @property
    def length(self) -> int:
        return int(self.config["steps"])

    def make_setup(self) -> Setup:
        """Return the setup of the optimizer: the blocks' weights get bases, embeddings and the head do not."""
        config = self.config
        return Setup(
            options={"lr": config["lr"], "weight_decay": config["weight decay"]},
            adam={"betas": BETAS, "fused": self.device.type == "cuda"},  # the fastest variant on a GPU
            period=config.get("period"),
            model=self.model,
            objective=self.objective,
            init_fn=initialize_,
            samples=config["samples"],
            seed=config["seed"],
            inside="blocks.*",
        )

    def training_loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self._graphed_loss(batch)
        return loss

    def validate(self) -> dict[str, float]:
        loss = _Loss(self.model, self.device)
        total = sum(loss(windows) * len(windows) for windows in self.validation)
        return {"loss": float(total) / sum(map(len, self.validation))}
