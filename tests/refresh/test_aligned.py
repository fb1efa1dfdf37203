"""Aligned, compared with ARO written from its formulas, and over many steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import egop
from explicit import identical


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False)).double()


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 5, generator=generator, dtype=torch.float64)
    return (model(inputs) - inputs[:, :4].roll(1, 1).sin()).square().mean()  # has gradients of full rank


def sinkhorn(matrix, iterations=5):
    for _ in range(iterations):
        matrix = matrix / matrix.norm(dim=1, keepdim=True) * matrix.shape[1] ** 0.5
        matrix = matrix / matrix.norm(dim=0, keepdim=True) * matrix.shape[0] ** 0.5
    return matrix


class LiteralARO:
    """R ← qf(A + 1e-6 R), A = M f(RᵀM)ᵀ with columns of length one, W ← W − lr (0.2 R f(RᵀN) / rms + λ W).

    Weight by weight, on the smaller side. ARO as published has no 1e-6 R, which only decides where A is singular.
    """

    def __init__(self, weights, function, lr, momentum=0.95, weight_decay=0.0):
        self.weights, self.function, self.lr, self.beta, self.decay = weights, function, lr, momentum, weight_decay
        self.means = [torch.zeros_like(weight) for weight in weights]
        self.rotations = [torch.eye(min(weight.shape), dtype=weight.dtype) for weight in weights]

    @torch.no_grad()
    def step(self):
        for place, weight in enumerate(self.weights):
            tall = weight.shape[0] >= weight.shape[1]  # the input side is the smaller one
            G = weight.grad.mT if tall else weight.grad
            M = self.means[place] = self.beta * self.means[place].reshape(G.shape) + (1 - self.beta) * G
            N = self.beta * M + (1 - self.beta) * G
            R = self.rotations[place]
            f = (lambda X: self.function(X.mT).mT) if tall else self.function
            A = M @ f(R.mT @ M).mT
            Q, T = torch.linalg.qr(A / A.norm(dim=0) + 1e-6 * R)
            R = self.rotations[place] = Q * T.diagonal().sign()
            update = R @ f(R.mT @ N)
            update = 0.2 * update / update.square().mean().sqrt()
            weight.mul_(1 - self.lr * self.decay).sub_(self.lr * (update.mT if tall else update))


def test_aligned_with_sinkhorn_is_aro():
    model, plain = network(), network()
    refresh = egop.Aligned()
    names = {"0.weight": egop.Shared(side="smaller"), "2.weight": egop.Shared(side="smaller")}
    basis = egop.Basis(
        [
            structure.change(block, {"basis": torch.eye(min(block.shapes[0]), dtype=torch.float64)})
            for (name, structure), block in zip(names.items(), blocks_of(model), strict=True)
        ]
    )
    optimizer = egop.ReparameterizedOptimizer(
        model, egop.optim.Sinkhorn, basis, refresh=refresh, lr=0.01, weight_decay=0.1
    )
    literal = LiteralARO(list(plain.parameters()), sinkhorn, 0.01, weight_decay=0.1)
    for step in range(50):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, step).backward()
        optimizer.step()
        literal.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-10)
    assert optimizer.refresher.failures == 0


def blocks_of(model):
    from egop.estimation import partition_objective

    batches = [(torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.long))]
    objective = egop.Objective(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batches)
    return partition_objective(objective, "parameter")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "steps"), [(egop.optim.Sinkhorn, 1000), (egop.optim.Sign, 200), (torch.optim.AdamW, 200)]
)
def test_rotations_stay_orthonormal_over_many_steps(base, steps):
    """In float32, with zero gradients, dead rows, and fewer samples than rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 3))
    with torch.no_grad():
        model[0].bias[:3] = -100.0  # dead units
    optimizer = egop.ReparameterizedOptimizer(model, base, refresh=egop.Aligned(), outside=torch.optim.AdamW, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(2, 12, generator=generator)
        loss = model(inputs).square().mean() * (step % 50 != 7)
        loss.backward()
        optimizer.step()
    for change in optimizer.basis.values():
        basis = change.tensors["basis"].double()
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis), dtype=torch.float64), rtol=0, atol=1e-5)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert optimizer.refresher.failures == 0


def test_a_state_dict_resumes_exactly():
    def made(model):
        return egop.ReparameterizedOptimizer(
            model, egop.optim.Sinkhorn, refresh=egop.Aligned(every=2), outside=torch.optim.AdamW, lr=0.01
        )

    def train(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    model = network()
    optimizer = made(model)
    train(model, optimizer, 0, 5)
    state = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    other = network()
    other.load_state_dict(weights)
    resumed = made(other)
    resumed.load_state_dict(state)
    train(model, optimizer, 5, 9)
    train(other, resumed, 5, 9)
    assert identical(dict(model.named_parameters()), dict(other.named_parameters()))
    assert optimizer.refresher.unrotated == {"2.weight": "the output head"}


@pytest.mark.parametrize("base", [torch.optim.Adagrad, egop.optim.PolarAdam])
def test_an_optimizer_without_a_known_map_is_refused_at_construction(base):
    with pytest.raises(TypeError, match=rf"{base.__name__} has no lookahead method, which egop\.Aligned"):
        egop.ReparameterizedOptimizer(network(), base, refresh=egop.Aligned(), lr=0.01)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"amsgrad": True}, {"weight_decay": 0.5}], ids=str)
@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW])
def test_lookahead_predicts_adams_momentum(base, options):
    class Watch(egop.Refresh):
        def start(self, optimizer):
            return Watcher()

    class Watcher(egop.refresh.Refresher):
        def before_step(self, optimizer):
            pass

        def observe(self, optimizer):
            self.seen = {
                optimizer_stack.blocks[i].name: pair[0][0][k]
                for optimizer_stack in optimizer.stacks
                for pair in [optimizer.lookahead(optimizer_stack)]
                for k, i in enumerate(optimizer_stack.active)
            }

        def after_step(self, optimizer):
            for block in optimizer.blocks:
                (coordinate,) = block.coordinates
                expected = optimizer.inner.state[coordinate]["exp_avg"]
                torch.testing.assert_close(self.seen[block.name], expected, rtol=1e-12, atol=1e-15)

        def renew(self, optimizer):
            pass

    model = network()
    changes = [
        egop.Shared(side="smaller").change(block, {"basis": torch.eye(min(block.shapes[0]), dtype=torch.float64)})
        for block in blocks_of(model)
    ]
    basis = egop.Basis(changes)
    optimizer = egop.ReparameterizedOptimizer(model, base, basis, refresh=Watch(), lr=0.01, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_bases_that_cannot_be_aligned_are_refused():
    model = network()
    blocks = blocks_of(model)
    sides = [{"left": torch.eye(block.shapes[0][0]), "right": torch.eye(block.shapes[0][1])} for block in blocks]
    pairs = [{key: side.double() for key, side in tensors.items()} for tensors in sides]
    kronecker = [egop.Kronecker().change(*pair) for pair in zip(blocks, pairs, strict=True)]
    basis = egop.Basis(kronecker)
    with pytest.raises(ValueError, match="Aligned cannot renew bases of structure Kronecker"):
        egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, refresh=egop.Aligned(), lr=0.01)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Aligned(), lr=0.01)
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="Aligned cannot renew bases of structure Kronecker"):
        optimizer.rebase(basis, moments="reset")
    optimizer.step()
    assert optimizer.refresher.renewals == 2


class Experts(nn.Module):
    """Experts, as one parameter or one each, next to an ordinary weight and a position table."""

    def __init__(self, stacked):
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Parameter(torch.randn(1, 4, 5))
        weights = torch.randn(3, 9, 5)
        self.experts = nn.Parameter(weights) if stacked else nn.ParameterList(weights.unbind())
        self.layers = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False))
        self.double()

    def forward(self, inputs):
        inputs = (inputs.unsqueeze(1) + self.positions).flatten(0, 1)
        return self.layers(sum(torch.tanh(inputs @ expert.mT) for expert in self.experts)).unflatten(0, (-1, 4)).mean(1)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, egop.optim.Sign, egop.optim.Sinkhorn])
def test_stacked_experts_train_like_separate_weights(base):
    results = []
    for stacked in (True, False):
        model = Experts(stacked)
        options = {"outside": torch.optim.AdamW} if base.__module__.startswith("egop") else {}
        optimizer = egop.ReparameterizedOptimizer(model, base, refresh=egop.Aligned(), lr=0.01, **options)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert optimizer.refresher.failures == 0
        assert {"positions", "layers.0.weight"} <= optimizer.basis.keys()
        results.append([model.positions, torch.stack(list(model.experts)), *model.layers.parameters()])
    for together, apart in zip(*results, strict=True):
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-10)
