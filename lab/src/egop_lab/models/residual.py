"""Residual networks in plain torch: torchvision's architecture, and the same names of parameters and buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of the two paths."""
        skipped = images if self.downsample is None else self.downsample(images)
        hidden = F.relu(self.bn1(self.conv1(images)), inplace=True)
        return F.relu(self.bn2(self.conv2(hidden)) + skipped, inplace=True)


class ResidualNetwork(nn.Module):
    """A 7 x 7 convolution, stages of basic blocks (each at half the resolution, twice as wide), a linear head."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for stage, depth in enumerate(depths):
            outputs = width * 2**stage
            first = BasicBlock(channels, outputs, stride=1 if stage == 0 else 2)
            blocks = [first, *(BasicBlock(outputs, outputs) for _ in range(depth - 1))]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            channels = outputs
        self._stages = len(depths)
        self.fc = nn.Linear(channels, classes)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images, (n, 3, height, width)."""
        hidden = F.relu(self.bn1(self.conv1(images)), inplace=True)
        hidden = F.max_pool2d(hidden, 3, stride=2, padding=1)
        for stage in range(self._stages):
            hidden = self.get_submodule(f"layer{stage + 1}")(hidden)
        return self.fc(hidden.mean((2, 3)))


@torch.no_grad()
def initialize_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw new parameters as torchvision does, in place: He normal kernels (by fan-out), torch's own linear layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
        elif isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)
    return model
