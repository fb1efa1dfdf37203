"""A stack of matrices (experts): each has a basis of its own, as if it were a weight by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cases
import egop
from egop.basis.partition import Block
from egop.basis.structures.views import as_matrix, from_matrix

EXPERTS, OUTPUTS, INPUTS = 3, 4, 4  # square, so that a gradient has full rank and its eigenvectors are determined


class Stacked(nn.Module):
    """Experts that all see the inputs, in one parameter; stored (outputs, inputs) or the other way round."""

    def __init__(self, inputs_first=False):
        super().__init__()
        weights = torch.randn(EXPERTS, OUTPUTS, INPUTS) / 2
        self.inputs_first = inputs_first
        self.gate_up_proj = nn.Parameter(weights.mT.contiguous() if inputs_first else weights)
        # Only its shape is looked at: it says which way the other one is stored.
        down = torch.zeros(EXPERTS, OUTPUTS // 2, INPUTS)
        self.down_proj = nn.Parameter(down if inputs_first else down.mT.contiguous(), requires_grad=False)
        self.head = nn.Linear(OUTPUTS, 3)

    def weights(self):
        return self.gate_up_proj.mT if self.inputs_first else self.gate_up_proj

    def forward(self, x):
        return self.head(sum(torch.tanh(x @ weight.mT) for weight in self.weights()))


class Apart(nn.Module):
    """The same model with one parameter per expert."""

    def __init__(self):
        super().__init__()
        weights = torch.randn(EXPERTS, OUTPUTS, INPUTS) / 2
        self.experts = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
        self.head = nn.Linear(OUTPUTS, 3)

    def weights(self):
        return torch.stack(list(self.experts))

    def forward(self, x):
        return self.head(sum(torch.tanh(x @ weight.mT) for weight in self.weights()))


def case(build):
    return cases.ModelCase("experts", build, (INPUTS,), 3)


def both(inputs_first):
    return case(lambda: Stacked(inputs_first)), case(Apart)


STRUCTURES = [egop.Shared(), egop.Kronecker()]
by_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
by_storage = pytest.mark.parametrize("inputs_first", [False, True], ids=["outputs first", "inputs first"])


@by_storage
@by_structure
@pytest.mark.parametrize(
    "refresh",
    [
        lambda structure: egop.Online(every=1, structure=structure),
        lambda structure: egop.Online(every=3, structure=structure, spread=False),
        lambda structure: egop.Online(every=2, tolerance=1e-4, structure=structure),
    ],
    ids=["Online", "all at once", "drifted"],
)
def test_stacked_experts_train_like_separate_ones(refresh, structure, inputs_first):
    found = []
    for each in both(inputs_first):
        model = each.build()
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh(structure), lr=0.01)
        cases.train(model, optimizer, each.batches(), 12)
        found.append(model.weights().detach())
        assert optimizer.refresher.failures == 0
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


@by_storage
@by_structure
def test_the_basis_of_a_stack_is_that_of_each_of_its_matrices(structure, inputs_first):
    stacked, apart = (
        cases.estimate(each.objective(), structure=structure, partition="parameter", rho=egop.Recentered(), samples=30)
        for each in both(inputs_first)
    )
    change = stacked["gate_up_proj"]
    others = [apart[f"experts.{index}"] for index in range(EXPERTS)]
    for key, tensor in change.tensors.items():
        torch.testing.assert_close(tensor, torch.stack([each.tensors[key] for each in others]), rtol=0, atol=1e-8)
    values = torch.cat([apart.spectrum[f"experts.{index}"].eigenvalues for index in range(EXPERTS)])
    torch.testing.assert_close(stacked.spectrum["gate_up_proj"].eigenvalues, values.sort(descending=True).values)


def change_of(structure, inputs_first, seed=0):
    """Return a change of basis for a stack, and one for each of its matrices, stored outputs first."""
    shape = (EXPERTS, INPUTS, OUTPUTS) if inputs_first else (EXPERTS, OUTPUTS, INPUTS)
    tensors = {"w": torch.zeros(shape, dtype=torch.float64)}
    block = Block.from_tensors("w", tensors, (int(inputs_first),), (1,))
    _, change = egop.extras.RandomRotation(seed=seed, like=structure).accumulator(block).finish()
    one = Block.from_tensors("w", {"w": torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)})
    singles = [structure.change(one, {key: each[i] for key, each in change.tensors.items()}) for i in range(EXPERTS)]
    return change, singles


@by_storage
@by_structure
def test_each_matrix_is_rotated_by_its_own_basis(structure, inputs_first):
    change, singles = change_of(structure, inputs_first)
    for leading in ((), (5,), (2, 5)):
        weights = torch.randn(*leading, *change.block.shapes[0], dtype=torch.float64)
        (coordinates,) = change.encode(weights)
        for index, single in enumerate(singles):
            weight = weights[..., index, :, :]
            expected = single.encode(weight.mT if inputs_first else weight)[0]
            torch.testing.assert_close(coordinates[..., index, :, :], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(change.decode(coordinates)[0], weights, rtol=0, atol=1e-12)
    dense = change.dense()
    torch.testing.assert_close(dense.mT @ dense, torch.eye(len(dense)).double(), rtol=0, atol=1e-12)
    assert structure.cost(change.block).flops == EXPERTS * singles[0].cost_per_step


@by_structure
def test_stack_is_saved_and_loaded(structure, tmp_path):
    change, _ = change_of(structure, inputs_first=True)
    egop.Basis([change]).save(tmp_path / "basis")
    loaded = egop.Basis.load(tmp_path / "basis")["w"]
    assert loaded.equals(change)
    assert loaded.block == change.block


def test_basis_for_a_different_number_of_experts_raises():
    change, _ = change_of(egop.Shared(), inputs_first=False)
    with pytest.raises(ValueError, match=r"needs a basis of shape \(3, 4, 4\), got \(2, 4, 4\)"):
        type(change)(change.block, {"basis": change.tensors["basis"][:2]})


def test_stacks_with_several_dimensions_and_transposed_kernels_round_trip():
    shape = (2, 3, 6, 4, 5)
    block = Block.from_tensors("w", {"w": torch.zeros(shape)}, (2,), (2,))
    tensor = torch.randn(7, *shape)
    matrix = as_matrix(tensor, block)
    assert matrix.shape == (7, 2, 3, 2 * 4, 3 * 5)
    assert torch.equal(from_matrix(matrix, block)[0], tensor)
    assert torch.equal(
        matrix[1, 1, 2, 4 + 1], tensor[1, 1, 2, 3:, 1].flatten()
    )  # the second output of the second group


def test_experts_without_tokens_keep_their_basis():
    """An expert that no token reached has a gradient of zeros, and so a Gram matrix of zeros."""
    model = case(Stacked).build()
    optimizer = egop.ReparameterizedOptimizer(
        model, torch.optim.AdamW, refresh=egop.Online(every=1, structure={"gate*": egop.Kronecker()}), lr=0.01
    )
    (inputs, _), *_ = case(Stacked).batches()
    for _ in range(4):
        optimizer.zero_grad()
        sum(torch.tanh(inputs @ weight.mT).square().mean() for weight in model.weights()[:2]).backward()
        optimizer.step()
    assert optimizer.refresher.failures == 0
    tensors = optimizer.basis["gate_up_proj"].tensors
    assert all(torch.equal(abs(each[2]).sum(0), torch.ones(len(each[2])).double()) for each in tensors.values())
    assert all(torch.isfinite(each).all() for each in tensors.values())


def test_the_linear_layer_of_gpt2_is_trained_as_a_linear_layer():
    """Conv1D is stored (inputs, outputs): the basis of its inputs is that of a linear layer's, also in Shared."""

    class Conv1D(nn.Module):
        def __init__(self, outputs, inputs):
            super().__init__()
            self.nf = outputs
            self.weight = nn.Parameter(nn.Linear(inputs, outputs, bias=False).weight.detach().mT.contiguous())

        def forward(self, x):
            return x @ self.weight

    def network(kind):
        return nn.Sequential(kind(6, 6), nn.Tanh(), nn.Linear(6, 3))

    builds = [lambda: network(lambda i, o: Conv1D(o, i)), lambda: network(lambda i, o: nn.Linear(i, o, bias=False))]
    for structure in STRUCTURES:
        found = []
        for build in builds:
            each = cases.ModelCase("one", build, (6,), 3)
            model = each.build()
            refresh = egop.Online(every=2, structure=structure)
            optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01)
            cases.train(model, optimizer, each.batches(), 10)
            weight = model[0].weight.detach()
            found.append(weight if isinstance(model[0], nn.Linear) else weight.mT)
        torch.testing.assert_close(*found, rtol=0, atol=1e-9)


@by_structure
def test_training_of_experts_resumes_bit_for_bit(structure):
    each = case(Stacked)

    def begin(model):
        refresh = egop.Online(every=2, structure=structure)
        return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01)

    model, other = each.build(), each.build()
    optimizer, resumed = begin(model), begin(other)
    cases.train(model, optimizer, each.batches(), 5)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, own in ((model, optimizer), (other, resumed)):
        cases.train(network, own, each.batches(), 5)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
