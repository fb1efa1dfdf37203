"""Small networks, their initialisations and losses."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


def perceptron(*widths: int) -> nn.Sequential:
    """Build linear layers with ReLU between them; the outputs are logits."""
    layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def digits_network() -> nn.Sequential:
    """Build the network of the digits experiment: 2410 parameters."""
    return perceptron(64, 32, 10)


def fashion_network() -> nn.Sequential:
    """Build the network of the Fashion-MNIST experiment."""
    return perceptron(784, 100, 10)


def linear_network(*widths: int) -> nn.Sequential:
    """Build linear layers without biases, one after the other."""
    return nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in itertools.pairwise(widths)))


@torch.no_grad()
def xavier_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw Xavier normal weights and biases from U(±(fan_in + fan_out)^-1/2) for every linear layer, in place."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, generator=generator)
            if layer.bias is not None:
                bound = (layer.in_features + layer.out_features) ** -0.5
                layer.bias.uniform_(-bound, bound, generator=generator)
    return model


@torch.no_grad()
def normal_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw weights from N(0, 1) and biases from U(±fan_in^-1/2) for every linear layer, in place."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.normal_(generator=generator)
            bound = layer.in_features**-0.5
            layer.bias.uniform_(-bound, bound, generator=generator)
    return model


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean negative log-likelihood of the labels under the softmax of the model's outputs."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def scores(model: nn.Module, train: Batch, validation: Batch, test: Batch) -> dict[str, Tensor]:
    """Compute the training loss and the accuracies that are recorded."""
    return {
        "loss": cross_entropy(model, train),
        "validation accuracy": accuracy(model, validation),
        "test accuracy": accuracy(model, test),
    }


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the fraction of examples that are classified correctly."""
    features, labels = batch
    return (model(features).argmax(dim=1) == labels).float().mean()
