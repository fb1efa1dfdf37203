"""The two-layer ReLU network of stacked runs: each trial has its images, each run its weights."""

from collections.abc import Callable

import torch
from torch import Tensor

Point = dict[str, Tensor]  # parameters by name, stacked: (trials, rates, *shape)

Split = tuple[Tensor, ...]  # images and labels

_PART = 500


def logits(point: Point, features: Tensor) -> Tensor:
    """Compute logits, (trials, rates, classes, images), for images of (trials, images, inputs).

    Images come last. All runs of a trial see the same ones, so that their first layers are one product, and what goes
    by entry or by class goes along long rows.
    """
    weight, bias = point["0.weight"], point["0.bias"]
    hidden = torch.baddbmm(bias.flatten(1)[..., None], weight.flatten(1, 2), features.mT)
    hidden = hidden.relu_().view(-1, weight.shape[2], hidden.shape[-1])
    weight, bias = point["2.weight"], point["2.bias"]
    outputs = torch.baddbmm(bias.flatten(0, 1)[..., None], weight.flatten(0, 1), hidden)
    return outputs.unflatten(0, weight.shape[:2])


def cross_entropy(point: Point, features: Tensor, labels: Tensor) -> Tensor:
    """Compute losses, (trials, rates), for images of (trials, images, inputs) and labels of (trials, images)."""
    log_probabilities = logits(point, features).log_softmax(-2)
    wanted = labels[:, None, None].expand(*log_probabilities.shape[:2], 1, -1)
    return -log_probabilities.gather(-2, wanted).mean((-2, -1))


def accuracy(point: Point, features: Tensor, labels: Tensor) -> Tensor:
    """Compute the fraction of images that are classified correctly, (trials, rates)."""
    largest = logits(point, features).max(-2).indices  # several times faster here than argmax
    return (largest == labels[:, None]).float().mean(-1)


def evaluate(point: Point, train: Split, validation: Split, test: Split) -> dict[str, Tensor]:
    """Compute the training loss and the accuracies of every run on the same images, (trials, rates) each."""
    return {
        "loss": _mean(cross_entropy, point, train),
        "validation accuracy": _mean(accuracy, point, validation),
        "test accuracy": _mean(accuracy, point, test),
    }


def _mean(score: Callable[[Point, Tensor, Tensor], Tensor], point: Point, split: Split) -> Tensor:
    features, labels = split
    trials = len(point["0.weight"])
    # On a CPU, in chunks that fit into its cache.
    size = _PART if features.device.type == "cpu" else len(labels)
    parts = zip(features.split(size), labels.split(size), strict=True)
    sums = [score(point, x.expand(trials, -1, -1), y.expand(trials, -1)) * len(y) for x, y in parts]
    return torch.stack(sums).sum(0) / len(labels)
