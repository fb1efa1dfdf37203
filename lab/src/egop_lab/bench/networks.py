"""Networks to measure, on random batches: what they learn does not matter here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from egop_lab.gpu import compute_outputs
from egop_lab.models import small as models
from egop_lab.models.gpt import GPT
from egop_lab.models.residual import ResidualNetwork

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network:
    """A network and the batches that it is trained on.

    Attributes:
        name: the name shown.
        build: builds the network.
        inputs: the shape of a batch; integers below ``classes`` if the network reads tokens.
        classes: the number of outputs.
        tokens: whether it reads tokens; it then has an output for each of them.
        half: whether it computes in bfloat16 on a GPU, with its parameters in float32.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int = 10
    tokens: bool = False
    half: bool = False

    def make(self, device: torch.device) -> nn.Module:
        """Build the network on a device, always with the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build().to(device)
        if self.images and device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def batches(self, device: torch.device, count: int) -> list[Batch]:
        """Draw random batches on a device, always the same ones."""
        generator = torch.Generator().manual_seed(1)
        batches = []
        for _ in range(count):
            if self.tokens:
                text = torch.randint(self.classes, (self.inputs[0], self.inputs[1] + 1), generator=generator)
                inputs, targets = text[:, :-1], text[:, 1:]
            else:
                inputs = torch.randn(self.inputs, generator=generator)
                targets = torch.randint(self.classes, self.inputs[:1], generator=generator)
            inputs = inputs.to(device)
            if self.images and device.type == "cuda":
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            batches.append((inputs, targets.to(device)))
        return batches

    @property
    def images(self) -> bool:
        """Whether the network reads images."""
        return len(self.inputs) == 4

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy of a batch."""
        inputs, targets = batch
        outputs = compute_outputs(model, inputs) if self.half else model(inputs)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def perceptron(widths: Sequence[int], batch: int, name: str | None = None) -> Network:
    """Build linear layers with ReLU between them."""
    shown = name or f"MLP {'-'.join(map(str, widths))}"
    return Network(shown, lambda: models.perceptron(*widths), (batch, widths[0]), widths[-1])


def digits(batch: int = 300) -> Network:
    """Build the network of the digits experiment."""
    return Network("digits MLP", models.digits_network, (batch, 64))


def gpt(layers: int, width: int, batch: int, context: int = 256) -> Network:
    """Build a GPT on bytes, with heads of 64."""
    sizes = {"layers": layers, "width": width, "heads": max(1, width // 64), "context": context}
    return Network(f"GPT {layers}x{width}", lambda: GPT(**sizes), (batch, context), 256, tokens=True, half=True)


def resnet(batch: int, pixels: int, width: int = 64, depths: Sequence[int] = (3, 4, 6, 3)) -> Network:
    """Build ResNet-34 for ten classes, or a narrower network of the same depth."""
    name = f"ResNet-{2 + 2 * sum(depths)}" + ("" if width == 64 else f", width {width}")
    return Network(name, lambda: ResidualNetwork(depths, width, 10), (batch, 3, pixels, pixels), half=True)
