"""egop.EGOP takes the steps of the plain reference implementation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import egop
from egop.reference import ReferenceEGOP
from explicit import distance

STEPS = 40
SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 1.0, "every": 3}


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))).mT


def build_mlp():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5))


def build_mlp_with_zero_head():
    model = build_mlp()
    nn.init.zeros_(model[-1].weight)  # the layers below get no gradient in the first step
    return model


def build_convnet():
    # Without biases below the batch norm: their gradients are rounding errors, which Adam takes for a direction.
    first = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh()
    second = nn.Conv2d(4, 4, 3, groups=2), nn.Tanh()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 5))


def draw_batch(inputs, classes, generator):
    """Draw normal inputs of a shape, or tokens, whose targets are the tokens that follow."""
    if inputs is None:
        tokens = torch.randint(classes, (16, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(32, *inputs, generator=generator).double(), torch.randint(classes, (32,), generator=generator)


# Model, shape of its inputs, number of classes, weights that EGOP rotates, largest difference allowed. The last is
# rounding, except for the transformer: a layer norm takes the mean out of what comes before it, so one direction of
# those gradients is all rounding error, which Adam's division and the orthogonalization amplify.
MODELS = {
    "mlp": (build_mlp, (6,), 5, ["0.weight", "2.weight"], 1e-13),
    "mlp with a zero head": (build_mlp_with_zero_head, (6,), 5, ["0.weight", "2.weight"], 1e-13),
    "convnet": (build_convnet, (2, 6, 6), 5, ["0.weight", "3.weight", "6.weight"], 1e-12),
    "transformer": (
        Transformer,
        None,
        11,
        [f"layer.{name}" for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight")]
        + [f"layer.{name}.weight" for name in ("linear1", "linear2")],
        1e-9,
    ),
}


@pytest.mark.parametrize(
    "settings", [{}, {"outside_lr": 2.0}, SETTINGS], ids=["defaults", "two rates", "other settings"]
)
@pytest.mark.parametrize("name", MODELS)
def test_egop_takes_the_steps_of_the_reference(name, settings):
    build, inputs, classes, rotated, tolerance = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double()
    twin = copy.deepcopy(model)
    named = dict(twin.named_parameters())
    optimizer = egop.EGOP(model, **settings)
    others = [parameter for key, parameter in named.items() if key not in rotated]
    rms = optimizer.param_groups[0]["update_rms"]
    reference = ReferenceEGOP([named[key] for key in rotated], others, **settings, update_rms=rms)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch, targets = draw_batch(inputs, classes, generator)
        for network, its in ((model, optimizer), (twin, reference)):
            its.zero_grad()
            F.cross_entropy(network(batch), targets).backward()
            its.step()
        assert distance(cases.parameters_of(model), cases.parameters_of(twin)) < tolerance
    assert list(optimizer.basis) == rotated
