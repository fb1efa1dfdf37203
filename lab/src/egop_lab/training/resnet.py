"""Timed training of a residual network on images."""

import gc
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop_lab.builders import Setup
from egop_lab.data import images
from egop_lab.gpu import capture_graphs, compute_outputs, synchronize
from egop_lab.methods import RESNET
from egop_lab.models.residual import ResidualNetwork, initialize_
from egop_lab.training.loop import pad, train

_ROWS = 1000  # least number of kernel gradients for every convolution


def count_samples(model: nn.Module) -> int:
    """Return the number of samples that gives every convolution enough kernel gradients."""
    return math.ceil(_ROWS / min(len(part.weight) for part in model.modules() if isinstance(part, nn.Conv2d)))


class _Outputs(nn.Module):
    """A network's outputs as a module, which can be recorded as a CUDA graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return compute_outputs(self.model, images)


_networks: dict[tuple[Any, ...], tuple[nn.Module, nn.Module]] = {}


def _get_network(
    depths: tuple[int, ...], width: int, classes: int, shape: tuple[int, ...], device: torch.device
) -> tuple[nn.Module, nn.Module]:
    """Return a network on the device and a module of its outputs for training; keep them for later runs.

    A process keeps one at a time. The last one goes before the next is made: CUDA graphs are recorded on one stream,
    and one that goes takes with it the workspace of the others (pytorch/pytorch#193402).
    """
    key = (depths, width, classes, shape, device)
    if key not in _networks:
        _networks.clear()
        gc.collect()  # else a graph in a reference cycle would be freed later
        model = ResidualNetwork(depths, width, classes).to(device)
        outputs = _Outputs(model)
        if device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            capture_graphs(outputs, torch.zeros(shape, device=device))
        _networks[key] = model, outputs
    return _networks[key]


class Run:
    """One training with a constant learning rate.

    The recorded seconds are those of training, bases included; evaluation is not counted. On a GPU the network's
    forward and backward pass are replayed as a CUDA graph: launching single kernels would hide what the methods cost.
    """

    def __init__(self, data: images.HeldImages, config: Mapping[str, Any], device: torch.device) -> None:
        self.data, self.config, self.device = data, config, device
        seed, size, crop = config["seed"], config["batch"], config["crop"]
        sizes = tuple(config["depths"]), config["width"], data.classes
        start = ResidualNetwork(*sizes)
        initialize_(start, torch.Generator().manual_seed(seed))
        self.model, self._outputs = _get_network(*sizes, (size, 3, crop, crop), device)
        self.model.load_state_dict(start.state_dict())
        self.model.zero_grad()
        self.batches = data.training(size, 2 * seed)
        self.objective = egop.Objective(self.model, self._compute_sampled_loss, data.training(size, 2 * seed + 1))
        self.seconds = 0.0
        self._losses: list[Tensor] = []  # of each batch of an epoch
        self._accuracies: list[Tensor] = []

    def make_setup(self) -> Setup:
        """Return the setup of the optimizer: every convolution and the head get bases."""
        config = self.config
        return Setup(
            options={"lr": config["lr"], "weight_decay": config["weight decay"]},
            period=self.data.counts["train"] // config["batch"],
            model=self.model,
            objective=self.objective,
            init_fn=initialize_,
            samples=config.get("samples") or count_samples(self.model),
            seed=config["seed"],
        )

    def __iter__(self) -> Iterator[images.Batch]:
        """Yield the batches of one epoch and start the clock."""
        self._losses, self._accuracies = [], []
        self._began = time.perf_counter()
        yield from self.batches

    def __call__(self, progress: bool) -> dict[str, Any]:
        """Train, and return what is recorded; a run that diverges ends early and is filled up with ``nan``."""
        config, epochs = self.config, int(self.config["epochs"])
        self.model.train()
        self._began = time.perf_counter()
        optimizer = RESNET[config["method"]](self.make_setup())
        synchronize(self.device)
        name = f"{config['method']}, lr {config['lr']:g}, seed {config['seed']}"
        curve = train(
            self.model,
            optimizer,
            self._compute_loss,
            self,
            epochs,
            evaluate=self._evaluate,
            progress=progress,
            description=name,
        )
        curves = {"validation loss": pad(curve.loss, epochs)}
        curves |= {name: pad(values, epochs) for name, values in curve.metrics.items()}
        self.model.eval()
        loss, accuracy = self._score(self.data.validation(ten=True))
        return curves | {"ten-crop loss": loss, "ten-crop accuracy": accuracy, "diverged": curve.diverged}

    def _compute_sampled_loss(self, model: nn.Module, batch: images.Batch) -> Tensor:
        return F.cross_entropy(compute_outputs(model, batch[0]), batch[1])

    def _compute_loss(self, _: nn.Module, batch: images.Batch) -> Tensor:
        outputs = self._outputs(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self._accuracies.append((outputs.detach().argmax(1) == batch[1]).float().mean())
        self._losses.append(loss.detach())
        return loss

    def _evaluate(self, _: nn.Module) -> dict[str, float]:
        self.seconds += time.perf_counter() - self._began  # the training loop has just waited for the device
        loss, accuracy = self._score(self.data.validation(ten=False))
        training, right = (
            float(torch.stack(each).mean()) if each else math.nan for each in (self._losses, self._accuracies)
        )
        found = {"loss": loss, "accuracy": accuracy, "training loss": training, "training accuracy": right}
        return found | {"seconds": self.seconds}

    @torch.no_grad()
    def _score(self, batches: Iterable[images.Batch]) -> tuple[float, float]:
        """Compute loss and accuracy of the mean of the outputs over an image's views."""
        total, right, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for views, labels in batches:
            outputs = compute_outputs(self.model, views.flatten(0, 1)).unflatten(0, views.shape[:2]).mean(1)
            total += F.cross_entropy(outputs, labels, reduction="sum")
            right += (outputs.argmax(1) == labels).sum()
            count += len(labels)
        return float(total) / count, float(right) / count
