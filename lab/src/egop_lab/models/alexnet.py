"""AlexNet in plain torch: torchvision's architecture, of any width."""

from __future__ import annotations

import itertools

from torch import nn

from egop_lab.models.residual import initialize_


def alexnet(width: int = 64, hidden: int = 4096, classes: int = 1000) -> nn.Sequential:
    """Build five convolutions and three linear layers; the outputs are logits of images of 64 pixels or more.

    Args:
        width: channels of the first convolution; the others are in proportion.
        hidden: width of the linear layers.
        classes: the number of outputs.
    """
    channels = [3, width, 3 * width, 6 * width, 4 * width, 4 * width]
    sizes = [(11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)]  # kernel, stride, padding
    features: list[nn.Module] = []
    for place, (pair, size) in enumerate(zip(itertools.pairwise(channels), sizes, strict=True)):
        features += [nn.Conv2d(*pair, *size), nn.ReLU()]
        features += [nn.MaxPool2d(3, 2)] if place in (0, 1, 4) else []
    head = [nn.Dropout(), nn.Linear(36 * channels[-1], hidden), nn.ReLU()]
    head += [nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    model = nn.Sequential(*features, nn.AdaptiveAvgPool2d(6), nn.Flatten(), *head)
    for layer in features:
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    initialize_(model)
    return model
