"""The padding row of an embedding stays as it is, whatever rotates the weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import egop

STRUCTURES = {
    "Kronecker": egop.Kronecker(),
    "output": egop.Shared(side="output"),
    "smaller": egop.Shared(side="smaller"),
    "by name": {"embedding.weight": egop.Kronecker(), "*": egop.Shared()},
    "auto": "auto",
}
REFRESHES = {"Online": egop.Online(every=1), "drifted": egop.Online(every=1, tolerance=0.01)}
DENSE = {"Full": egop.Full(), "Auxiliary": egop.Auxiliary(rank=3), "Reduced": egop.Reduced(rank=3)}


class Tokens(nn.Module):
    """Fewer tokens than columns, so that their side is the smaller one."""

    def __init__(self, kind=nn.Embedding):
        super().__init__()
        self.embedding = kind(12, 16, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, tokens):
        found = self.embedding(tokens)
        return self.layers(found if isinstance(self.embedding, nn.EmbeddingBag) else found.mean(1))


def build(kind=nn.Embedding):
    torch.manual_seed(0)
    return Tokens(kind)


def compute_loss(model, tokens):
    return (model(tokens) - torch.sin(tokens.sum(1, keepdim=True).float())).square().mean()


def draw_batch(step):
    """Draw padded tokens, some of which the first batches do not have."""
    return torch.randint(min(4 * step + 4, 12), (8, 3), generator=torch.Generator().manual_seed(step))


def make_objective(model):
    return egop.Objective(model, compute_loss, [draw_batch(step) for step in range(2)])


def train(model, optimizer, steps=8):
    for step in range(steps):
        optimizer.zero_grad()
        compute_loss(model, draw_batch(step)).backward()
        optimizer.step()


def check_padding(model, optimizer):
    start = model.embedding.weight.detach().clone()
    train(model, optimizer)
    assert torch.equal(model.embedding.weight[0], start[0])
    assert not torch.equal(model.embedding.weight[1:], start[1:])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("refresh", REFRESHES.values(), ids=REFRESHES)
def test_padding_stays_with_bases_that_follow_the_gradients(refresh, structure, kind):
    model = build(kind)
    optimizer = egop.ReparameterizedOptimizer(
        model, torch.optim.AdamW, refresh=dataclasses.replace(refresh, structure=structure), lr=0.01
    )
    check_padding(model, optimizer)


@pytest.mark.parametrize("partition", ["parameter", "global", {"mixed": ["embedding.*", "layers.0.weight"]}], ids=str)
@pytest.mark.parametrize("structure", (STRUCTURES | DENSE).values(), ids=STRUCTURES | DENSE)
def test_padding_stays_with_estimated_bases(structure, partition):
    model = build()
    structure = {"*": egop.Kronecker()} if isinstance(structure, dict) else structure
    options = {"structure": structure, "partition": partition, "samples": 4}
    refresh = egop.Every(4, make_objective(model), **options)
    check_padding(model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01))


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_padding_stays_with_optimizers_of_matrices(kind):
    model = build()
    refresh = egop.Online(structure={"*": egop.Kronecker()})
    check_padding(
        model,
        egop.ReparameterizedOptimizer(model, kind, refresh=refresh, outside=torch.optim.AdamW, lr=0.01),
    )


def test_padding_stays_with_egop():
    model = build()
    optimizer = egop.EGOP(model, lr=0.01)
    check_padding(model, optimizer)
    assert optimizer.plan.unrotated["embedding.weight"] == "an embedding"


def test_the_plan_says_that_only_columns_are_rotated():
    model = build()
    refresh = egop.Online(structure=egop.Kronecker())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01)
    (embedding, structure), *others = optimizer.plan.chosen.items()
    assert (embedding.name, structure) == ("embedding.weight", egop.Shared())
    assert {structure for _, structure in others} == {egop.Kronecker()}


def test_a_block_of_several_weights_goes_on_without_the_embedding():
    basis = egop.estimate(make_objective(build()), structure=egop.Full(), partition="global", samples=2, progress=False)
    assert {name: change.kind for name, change in basis.items()} == {"global": "Full", "embedding.weight": "Shared"}
    assert basis["global"].block.parameters == ("layers.0.weight", "layers.2.weight")


def test_an_embedding_without_padding_gets_the_structure_that_was_named():
    model = Tokens(lambda tokens, width, padding_idx: nn.Embedding(tokens, width))
    refresh = egop.Online(structure=egop.Kronecker())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01)
    assert set(optimizer.plan.chosen.values()) == {egop.Kronecker()}


def test_padding_of_one_of_two_tied_embeddings_counts():
    model = build()
    model.decoder = nn.Embedding(12, 16)
    model.decoder.weight = model.embedding.weight
    refresh = egop.Online(structure=egop.Kronecker())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01)
    structures = {block.name: structure for block, structure in optimizer.plan.chosen.items()}
    assert structures["embedding.weight"] == egop.Shared()


def make_kronecker_basis(model):
    """Estimate a basis for a function, which does not know what its tensors are."""
    function = lambda tensor: torch.sin(tensor).sum()  # noqa: E731
    weights = {"tensor": model.embedding.weight.detach()}
    basis = egop.estimate(
        egop.Objective.from_function(function, weights),
        rho=egop.Gaussian(),
        structure=egop.Kronecker(),
        progress=False,
    )
    block = dataclasses.replace(basis["tensor"].block, name="embedding.weight", parameters=("embedding.weight",))
    return egop.Basis([egop.Kronecker().change(block, basis["tensor"].tensors)])


def test_a_given_basis_that_would_move_the_padding_is_refused():
    model = build()
    basis = make_kronecker_basis(model)
    message = (
        r"Block 'embedding\.weight' \(Kronecker\) mixes the rows of an embedding with padding_idx.*egop\.Shared\(\)"
    )
    with pytest.raises(ValueError, match=message):
        egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.01)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, egop.Basis([]), lr=0.01)
    with pytest.raises(ValueError, match=message):
        optimizer.rebase(basis)
    optimizer = egop.ReparameterizedOptimizer(model.layers, torch.optim.AdamW, lr=0.01, model=model)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("embedding.weight", model.embedding.weight)], "basis": basis})
    assert len(optimizer.param_groups) == 1
