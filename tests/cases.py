"""The models, objectives, structures and optimizers that the tests run over, as data."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop.basis.partition import Block
from egop.estimation.sampling import sample_gradients


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer class with hyper-parameters; the name is the test id."""

    name: str
    kind: type[torch.optim.Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _plain_and_decayed(name: str, kind: type[torch.optim.Optimizer], **arguments: Any) -> list[OptimizerCase]:
    return [
        OptimizerCase(name, kind, arguments | {"weight_decay": 0.0}),
        OptimizerCase(f"{name}-decay", kind, arguments | {"weight_decay": 0.05}),
    ]


OPTIMIZERS: list[OptimizerCase] = [
    *_plain_and_decayed("SGD", torch.optim.SGD, lr=0.05),
    *_plain_and_decayed("SGD-momentum", torch.optim.SGD, lr=0.02, momentum=0.9),
    *_plain_and_decayed("SGD-nesterov", torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    *_plain_and_decayed("Adam", torch.optim.Adam, lr=0.01),
    *_plain_and_decayed("AdamW", torch.optim.AdamW, lr=0.01),
    *_plain_and_decayed("Adagrad", torch.optim.Adagrad, lr=0.05),
    *_plain_and_decayed("RMSprop", torch.optim.RMSprop, lr=0.005),
    *_plain_and_decayed("Adadelta", torch.optim.Adadelta, lr=0.5),
    *_plain_and_decayed("Adamax", torch.optim.Adamax, lr=0.01),
    *_plain_and_decayed("NAdam", torch.optim.NAdam, lr=0.01),
    *_plain_and_decayed("RAdam", torch.optim.RAdam, lr=0.01),
]

# Small and varied enough for the crossed contract tests.
FEW_OPTIMIZERS = [case for case in OPTIMIZERS if case.name in ("SGD-momentum", "AdamW-decay", "Adagrad")]


@dataclass(frozen=True)
class ModelCase:
    """A model with data: ``build()`` gives the same model each time."""

    name: str
    module: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    outputs: int
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """Build the model, with the same weights every time."""
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(0)  # torch.manual_seed notes the call stack for GPUs, each time
            return self.module().to(self.dtype)

    def batches(self, count: int = 4, size: int = 16) -> list[tuple[Tensor, Tensor]]:
        """Return the same batches every time."""
        generator = torch.Generator().manual_seed(1)
        return [
            (
                torch.randn(size, *self.inputs, generator=generator, dtype=torch.float64).to(self.dtype),
                torch.randint(self.outputs, (size,), generator=generator),
            )
            for _ in range(count)
        ]

    def objective(self, model: nn.Module | None = None) -> egop.Objective:
        """Return the cross-entropy of the model on the batches."""
        return egop.Objective(self.build() if model is None else model, cross_entropy, self.batches())


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the loss that every model here uses."""
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    """Build two layers with biases; the weights are blocks, the biases are not."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def deep() -> nn.Module:
    """Build three equal hidden layers: blocks of one shape, which are batched."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def convolutional() -> nn.Module:
    """Build a convolution, BatchNorm in training mode and a linear head."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


class Recurrent(nn.Module):
    """A GRU, which has two weights in one layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    """A transformer layer: fused attention weights, LayerNorm, feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


MODELS: list[ModelCase] = [
    ModelCase("mlp", mlp, (6,), 3),
    ModelCase("deep", deep, (4,), 3),
    ModelCase("convolutional", convolutional, (2, 5, 5), 3),
    ModelCase("recurrent", Recurrent, (5, 3), 3),
    ModelCase("attention", Attention, (5, 4), 3),
]
MLP = MODELS[0]
DEEP = MODELS[1]

STRUCTURES: list[egop.Structure] = [
    egop.Identity(),
    egop.Full(),
    egop.Shared(),
    egop.Shared(side="output"),
    egop.Kronecker(),
    egop.Auxiliary(rank=3),
    egop.Reduced(rank=3),
    egop.Reduced(rank=3, keep_rest=False),
    egop.extras.RandomRotation(seed=1),
    egop.extras.RandomRotation(seed=1, like=egop.Kronecker()),
]


def block(name: str, **shapes: tuple[int, ...]) -> Block:
    """Build a block of float64 tensors."""
    return Block.from_tensors(name, {key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()})


BLOCKS: list[Block] = [
    block("scalar", scalar=()),
    block("vector", vector=(5,)),
    block("matrix", matrix=(3, 4)),
    block("kernel", kernel=(2, 3, 2, 2)),
    block("one column", column=(4, 1)),
    block("two tensors", weight=(3, 2), bias=(4,)),
    block("three tensors", a=(), b=(2, 1, 2), c=(3,)),
]

PARTITIONS: list[Any] = ["layer", "parameter", "global", {"everything": ["*"]}]


def estimate(objective: egop.Objective, **options: Any) -> egop.Basis:
    """Estimate a basis from a few samples, without a progress bar."""
    return egop.estimate(objective, **{"structure": egop.Full(), "samples": 40, "progress": False} | options)


def round_trip_error(change: egop.ChangeOfBasis) -> float:
    """Return how far ``decode(encode(x))`` is from a random ``x`` of length one."""
    generator = torch.Generator().manual_seed(0)
    dtype, shapes = change.block.dtype, change.block.shapes
    x = [torch.randn(shape, generator=generator).to(change.device, dtype) for shape in shapes]
    pairs = zip(change.decode(change.encode(x)), x, strict=True)
    length = sum(float(each.square().sum()) for each in x)
    return (sum(float((back - each).square().sum()) for back, each in pairs) / length) ** 0.5


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int) -> None:
    """Train in a plain loop."""
    for step in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, batches[step % len(batches)]).backward()
        optimizer.step()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sample(
    objective: egop.Objective, rho: egop.Distribution, samples: int, *, seed: int = 0, **options: Any
) -> dict[str, Tensor]:
    """Sample gradients of all parameters and concatenate the chunks."""
    generator = torch.Generator().manual_seed(seed)
    chunks = list(sample_gradients(objective, rho, samples, generator=generator, **options))
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything that sampling must not change: the model's tensors, their bits, modes, global random states."""

    def exactly(tensor: Tensor | None) -> Any:
        return None if tensor is None else (id(tensor), tensor.dtype, tensor.tolist())

    numpy_state = np.random.get_state()  # noqa: NPY002 - the global state is what is looked at
    return {
        "parameters": {name: exactly(parameter)[1:] for name, parameter in model.named_parameters()},
        "objects": [id(parameter) for parameter in model.parameters()],
        "gradients": {name: exactly(parameter.grad) for name, parameter in model.named_parameters()},
        "frozen": {name: not parameter.requires_grad for name, parameter in model.named_parameters()},
        "buffers": {(p, n): exactly(b) for p, part in model.named_modules() for n, b in part._buffers.items()},
        "modes": {name: part.training for name, part in model.named_modules()},
        "torch": torch.get_rng_state().tolist(),
        "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
        "random": random.getstate(),
    }
