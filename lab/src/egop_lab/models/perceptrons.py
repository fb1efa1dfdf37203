"""Networks of the experiments, their initialisation and their losses."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["accuracy", "cross_entropy", "digits_network", "xavier_"]

Batch = tuple[Tensor, ...]


def digits_network() -> nn.Sequential:
    """The network of the digits experiment: 64-32-10 with ReLU, 2410 parameters; its outputs are logits."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@torch.no_grad()
def xavier_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw new parameters for every linear layer, in place.

    Weights are Xavier normal; biases are uniform on ±(fan_in + fan_out)^(-1/2).

    Args:
        model: The module to change.
        generator: Source of every draw; ``None`` is torch's global one, as ``egop.Initialization`` wants it.

    Returns:
        The same model.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, generator=generator)
            if layer.bias is not None:
                bound = (layer.in_features + layer.out_features) ** -0.5
                layer.bias.uniform_(-bound, bound, generator=generator)
    return model


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the labels under the softmax of the model's outputs."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """Share of examples whose largest output is the right one."""
    features, labels = batch
    return (model(features).argmax(dim=1) == labels).float().mean()
