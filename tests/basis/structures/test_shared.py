"""Shared and Kronecker on every kind of layer, against a loop over output channels that gathers each kernel by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import cases
import egop
from egop.basis.partition import partition_parameters
from egop.basis.plan import make_plan
from egop.basis.roles import find_roles


@dataclass(frozen=True)
class LayerCase:
    """A layer, the name of its weight, and how the weights of one output are gathered from it."""

    name: str
    module: Callable[[], nn.Module]
    outputs: int
    gather: Callable[[torch.Tensor, int], torch.Tensor]
    weight: str = "weight"

    def __str__(self):
        return self.name

    def block(self):
        module = self.module().double()
        parameters = {self.weight: module.get_parameter(self.weight)}
        (block,) = partition_parameters(parameters, find_roles(parameters, module), "parameter")
        return block

    def kernels(self, weight):
        """Stack the kernels as rows, one for each output."""
        return torch.stack([self.gather(weight, output).flatten() for output in range(self.outputs)])


def first_axis(weight, output):
    return weight[output]


def second_axis(weight, output):
    return weight[:, output]


def transposed_in_groups(groups):
    """Return a function that gathers one output's kernel from a weight stored as (inputs, outputs / groups, ...)."""

    def gather(weight, output):
        inputs, per_group = weight.shape[0] // groups, weight.shape[1]
        group, position = divmod(output, per_group)
        return torch.stack([weight[group * inputs + i, position] for i in range(inputs)])

    return gather


LAYERS = [
    LayerCase("Linear", lambda: nn.Linear(5, 4), 4, first_axis),
    LayerCase("Conv1d", lambda: nn.Conv1d(2, 4, 3), 4, first_axis),
    LayerCase("Conv2d", lambda: nn.Conv2d(2, 4, (3, 2)), 4, first_axis),
    LayerCase("Conv3d", lambda: nn.Conv3d(2, 3, (1, 2, 2)), 3, first_axis),
    LayerCase("Conv2d-groups", lambda: nn.Conv2d(6, 4, 2, groups=2), 4, first_axis),
    LayerCase("Conv2d-depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4), 4, first_axis),
    LayerCase("ConvTranspose1d", lambda: nn.ConvTranspose1d(2, 5, 3), 5, second_axis),
    LayerCase("ConvTranspose2d", lambda: nn.ConvTranspose2d(3, 4, (2, 3)), 4, second_axis),
    LayerCase("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 3, (1, 2, 2)), 3, second_axis),
    LayerCase("ConvTranspose2d-groups", lambda: nn.ConvTranspose2d(6, 4, 2, groups=2), 4, transposed_in_groups(2)),
    LayerCase("Embedding", lambda: nn.Embedding(7, 3), 7, first_axis),
    LayerCase("in_proj", lambda: nn.MultiheadAttention(4, 2), 12, first_axis, "in_proj_weight"),
]
layers = pytest.mark.parametrize("layer", LAYERS, ids=str)


def gradients_of(layer, count=30, seed=0):
    """Draw gradients of different sizes in different directions; return the block and the gradients."""
    block = layer.block()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, block.size, generator=generator, dtype=torch.float64)
    return block, (rows * torch.linspace(0.3, 2, block.size)).reshape(count, *block.shapes[0])


def finished(structure, block, gradients):
    accumulator = structure.accumulator(block)
    accumulator.add([gradients])
    return accumulator.finish()


@layers
def test_shared_is_the_eigenbasis_of_all_kernels_gradients(layer):
    block, gradients = gradients_of(layer)
    spectrum, change = finished(egop.Shared(), block, gradients)
    samples = [kernel for gradient in gradients for kernel in layer.kernels(gradient)]
    P = sum(torch.outer(kernel, kernel) for kernel in samples) / len(samples)
    V = change.tensors["basis"]
    torch.testing.assert_close(V * spectrum.eigenvalues @ V.mT, P, rtol=0, atol=1e-12 * float(P.trace()))
    assert V.shape == P.shape
    assert len(samples) == 30 * layer.outputs
    assert spectrum.samples == 30, "draws, not rows"


@layers
def test_shared_rotates_each_kernel_separately(layer):
    block, gradients = gradients_of(layer)
    _, change = finished(egop.Shared(), block, gradients)
    V, (weight, *_) = change.tensors["basis"], gradients
    (coordinates,) = change.encode(weight)
    assert len(coordinates) == layer.outputs
    for output in range(layer.outputs):
        kernel = layer.gather(weight, output).flatten()
        torch.testing.assert_close(coordinates[output], V.mT @ kernel, rtol=0, atol=1e-12)
    moved = coordinates.clone()
    moved[1] += 1  # one output's coordinates move that output's kernel and no other
    (decoded,) = change.decode(moved)
    changed = [not torch.allclose(layer.gather(decoded, o), layer.gather(weight, o)) for o in range(layer.outputs)]
    assert changed == [output == 1 for output in range(layer.outputs)]


@layers
def test_kronecker_is_the_eigenbasis_of_both_gram_matrices(layer):
    block, gradients = gradients_of(layer)
    spectrum, change = finished(egop.Kronecker(), block, gradients)
    matrices = [layer.kernels(gradient) for gradient in gradients]
    for side, P in {"left": sum(G @ G.mT for G in matrices), "right": sum(G.mT @ G for G in matrices)}.items():
        Q = change.tensors[side]
        inside = Q.mT @ P @ Q
        torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=1e-12 * float(P.trace()))
        assert (inside.diagonal().diff() <= 1e-12 * P.trace()).all()
    expected = change.tensors["left"].mT @ matrices[0] @ change.tensors["right"]
    torch.testing.assert_close(change.encode(gradients[0])[0], expected, rtol=0, atol=1e-12)
    # The eigenvalues are scaled to the mean squared gradient, as those of every other structure.
    torch.testing.assert_close(spectrum.eigenvalues.sum(), gradients.square().sum() / 30)
    assert spectrum.samples == 30


@layers
@pytest.mark.parametrize("structure", [egop.Shared(), egop.Kronecker()], ids=str)
def test_the_gram_matrices_of_one_gradient_are_those_of_its_kernels(layer, structure):
    block, gradients = gradients_of(layer)
    _, change = finished(structure, block, gradients)
    kernels = layer.kernels(gradients[0])
    expected = {"basis": kernels.mT @ kernels, "left": kernels @ kernels.mT, "right": kernels.mT @ kernels}
    found = change.rows([gradients[0]])
    assert found.keys() == change.tensors.keys()
    for side, rows in found.items():
        torch.testing.assert_close(rows.mT @ rows, expected[side], rtol=0, atol=1e-12)


@layers
def test_samples_cover_a_thousand_kernels_with_at_least_64_draws(layer):
    block = layer.block()
    assert egop.Shared().samples(block) == max(64, math.ceil(1000 / layer.outputs))
    columns = block.size // layer.outputs
    assert egop.Kronecker().samples(block) == max(64, math.ceil(1000 / min(layer.outputs, columns)))


def test_the_passes_are_those_of_the_layer_with_the_fewest_kernels():
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 8), nn.Tanh(), nn.Linear(8, 16)).double()
    objective = egop.Objective(model, lambda m, batch: m(batch).square().mean(), [torch.randn(4, 6).double()])
    basis = egop.estimate(objective, structure=egop.Shared(), progress=False)
    passes = math.ceil(1000 / 8)
    assert {name: each.samples for name, each in basis.spectrum.items()} == {
        "0.weight": passes,
        "2.weight": passes,
        "4.weight": passes,
    }


def test_block_of_several_tensors_is_split_and_a_vector_raises():
    (block,) = (each for each in cases.BLOCKS if each.name == "two tensors")
    for structure in (egop.Shared(), egop.Kronecker()):
        with pytest.raises(
            ValueError,
            match=(
                rf"egop\.{type(structure).__name__}\(\) needs one tensor with rows, "
                r"but block 'bias' has shape \(4,\)\. "
                r"Use egop\.Full\(\) for it, or leave it in original coordinates"
            ),
        ):
            make_plan([block], {}, structure, 2**30)
        matrices = cases.block("both", a=(3, 2), b=(2, 5))
        plan = make_plan([matrices], {}, structure, 2**30)
        assert [(piece.name, piece.shapes) for piece in plan.chosen] == [("a", ((3, 2),)), ("b", ((2, 5),))]
