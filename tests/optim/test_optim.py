"""Sign, Sinkhorn and PolarAdam: compared with plain references, as ordinary optimizers, and in a basis."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import egop
from egop.optim.polar_adam import polar
from matrix_updates import CASES


class Reference:
    """A plain optimizer of one weight, written from the formulas."""

    def __init__(self, function, settings):
        self.function, self.settings, self.state = function, settings, {}

    @torch.no_grad()
    def step(self, weight, encode=lambda G: G, decode=lambda U: U):
        if weight.grad is None:
            return
        group, G = self.settings, encode(weight.grad)
        state = self.state.setdefault(weight, {"M": torch.zeros_like(G), "V": torch.zeros_like(G), "step": 0})
        state["step"] += 1
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        M = state["M"] = beta * state["M"] + (1 - beta) * G
        N = beta * M + (1 - beta) * G if group["nesterov"] else M
        if "betas" in group:
            V = state["V"] = group["betas"][1] * state["V"] + (1 - group["betas"][1]) * G**2
            N = N / (V.sqrt() + group["eps"])
        matrix = N.reshape(len(N), -1)
        update = self.function(matrix, group).reshape(N.shape)
        if update.any():
            size = 1
            if group.get("adam_sized"):
                corrected = (N / (1 - beta ** (state["step"] + 1))) * (1 - group["betas"][1] ** state["step"]) ** 0.5
                size = corrected.square().mean().sqrt()
            update = size * group["update_rms"] * update / update.square().mean().sqrt()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * decode(update))


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, bias=False), nn.Tanh(), nn.Conv2d(3, 3, 3, bias=False), nn.Flatten()]
    layers += [nn.Linear(12, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)]
    return nn.Sequential(*layers).double()


def backward(model, step):
    model.zero_grad()
    inputs = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    model(inputs).sin().square().mean().backward()
    if step % 3 == 1:
        model[4].weight.grad = None
    if step % 5 == 2:
        model[6].weight.grad.zero_()


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_the_reference(case):
    kind, function, options = CASES[case]
    model, plain = network(), network()
    model[7].weight.requires_grad_(False)
    plain[7].weight.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, **options)
    reference = Reference(function, optimizer.param_groups[0])
    for step in range(50):
        backward(model, step)
        backward(plain, step)
        optimizer.step()
        for weight in plain.parameters():
            reference.step(weight)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", [egop.Shared(), egop.Shared(side="output"), egop.Kronecker()], ids=str)
@pytest.mark.parametrize("case", ["Sign", "Sinkhorn", "PolarAdam"])
def test_steps_in_a_fixed_basis_equal_the_reference_in_coordinates(case, structure):
    kind, function, options = CASES[case]

    def linear():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 7, bias=False)).double()

    model, plain = linear(), linear()
    data = torch.randn(8, 6, dtype=torch.float64)
    objective = egop.Objective(model, lambda model, batch: model(batch).sin().square().mean(), [data])
    basis = egop.estimate(objective, partition="parameter", structure=structure, samples=30, progress=False)
    optimizer = egop.ReparameterizedOptimizer(model, kind, basis, lr=0.01, weight_decay=0.1, **options)
    references = {name: Reference(function, optimizer.param_groups[0]) for name in basis}
    for _ in range(50):
        for each in (model, plain):
            each.zero_grad()
            each(data).sin().square().mean().backward()
        optimizer.step()
        for name, change in basis.items():
            references[name].step(
                plain.get_parameter(name), lambda G, c=change: c.encode([G])[0], lambda U, c=change: c.decode([U])[0]
            )
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-10)


def test_polar_factor_rotates_with_the_matrix():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    torch.testing.assert_close(rotation @ polar(matrix), polar(rotation @ matrix), rtol=1e-12, atol=1e-12)
    values = torch.linalg.svdvals(polar(matrix))
    assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_state_is_plain_tensors_and_resumes(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=torch.tensor(0.01))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    twin = copy.deepcopy(model)
    other = kind(twin.parameters(), lr=torch.tensor(0.01))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((model, optimizer), (twin, other)):
        backward(each, 3)
        its_optimizer.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for state in optimizer.state.values():
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert set(state) <= {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_matrices_last_steps_each_matrix_of_a_stack(kind):
    """Coordinates of experts are a stack of matrices; other tensors of three dimensions are convolutions."""
    start = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together, apart = nn.Parameter(start.clone()), [nn.Parameter(each.clone()) for each in start]
    optimizers = kind([{"params": [together], "matrices_last": True}], lr=0.1), kind(apart, lr=0.1)
    for step in range(3):
        together.grad = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(step + 1), dtype=torch.float64)
        for place, each in enumerate(apart):
            each.grad = together.grad[place].clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid lr value: -1.0"),
        ({"momentum": 1.0}, "Invalid momentum value: 1.0"),
        ({"weight_decay": float("inf")}, "Invalid weight_decay value"),
        ({"iterations": 0}, "Invalid iterations value: 0"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        egop.optim.Sinkhorn([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.parametrize("make", [egop.optim.PolarAdam, lambda weights, eps: egop.EGOP([("w", weights[0])], eps=eps)])
@pytest.mark.parametrize("eps", [-1, -1e-8, float("nan"), float("inf")])
def test_eps_out_of_range_is_refused(make, eps):
    with pytest.raises(ValueError, match=f"Invalid eps value: {eps}. Must be zero or a positive number"):
        make([nn.Parameter(torch.zeros(2, 2))], eps=eps)


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_vectors_are_refused_and_the_group_is_not_added(kind):
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=r"got a parameter of shape \(3,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e18])  # larger squares overflow, as in Adam
def test_update_size_does_not_depend_on_the_gradient_scale(kind, scale):
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = kind([weight], lr=0.1)
    weight.grad = scale * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    moved = (1 - weight).detach()
    size = moved.square().mean().sqrt().item()
    is_below_eps = kind is egop.optim.PolarAdam and scale == 1e-30  # where Adam hardly moves either
    assert size == pytest.approx(0.0 if scale == 0 or is_below_eps else 0.02, rel=1e-4, abs=1e-20)


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_vanishing_momentum_gives_no_nan(kind):
    weight = nn.Parameter(torch.zeros(4, 6))
    optimizer = kind([weight], lr=1e-3)
    weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    weight.grad = torch.zeros(4, 6)
    for _ in range(2500):
        optimizer.step()
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-38, 1e-44, 1e30])
def test_polar_factor_does_not_depend_on_the_scale(scale):
    factor = polar(torch.eye(3) * scale)
    assert torch.isfinite(factor).all()
    if scale > 1e-37:
        torch.testing.assert_close(factor, polar(torch.eye(3)))


def test_nan_gradient_gives_nan_weight():
    weight = nn.Parameter(torch.zeros(3, 3))
    weight.grad = torch.ones(3, 3)
    weight.grad[0, 0] = torch.nan
    egop.optim.Sign([weight], lr=0.1).step()
    assert weight[0, 0].isnan()


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_small_rows_are_stepped_in_half_precision(how):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(64, 32, generator=generator) * torch.logspace(0, -2, 64)[:, None]
    weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16 if how == "bfloat16" else torch.float32))
    weight.grad = gradient.to(weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        egop.optim.Sinkhorn([weight], lr=1.0).step()
    assert weight.abs().amax(1).min() > 0.05


@pytest.mark.parametrize("made", [egop.EGOP, lambda model: egop.optim.Sign(model.parameters())])
def test_zero_grad_frees_the_gradients(made):
    model = nn.Linear(4, 3, bias=False)
    optimizer = made(model)
    model(torch.ones(2, 4)).sum().backward()
    gradient = weakref.ref(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert gradient() is None


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_empty_weights_are_skipped(kind):
    weight = nn.Parameter(torch.zeros(0, 4))
    weight.grad = torch.zeros(0, 4)
    optimizer = kind([weight])
    optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_reparameterized_optimizer_without_a_basis_takes_the_same_steps(kind):
    """Convolutions too, which are matrices with one row per output."""
    model, plain = network(), network()
    optimizer, other = egop.ReparameterizedOptimizer(model, kind, lr=0.01), kind(plain.parameters(), lr=0.01)
    for step in range(4):
        backward(model, step)
        backward(plain, step)
        optimizer.step()
        other.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("made", [egop.EGOP, lambda model, **options: egop.optim.Sign(model.parameters(), **options)])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_text_instead_of_a_number_is_refused(made, name):
    model = nn.Linear(4, 3, bias=False)
    with pytest.raises(TypeError, match=rf"{name} must be a number, got str '1e-3'.*YAML"):
        made(model, **{name: "1e-3"})


@pytest.mark.parametrize("lr", [np.float32(1e-3), np.int64(1), torch.tensor(1e-3), 1])
def test_lr_may_be_any_kind_of_number(lr):
    model = nn.Linear(4, 3, bias=False)
    assert egop.EGOP(model, lr=lr).param_groups[0]["lr"] == lr
    assert egop.optim.Sign(model.parameters(), lr=lr).param_groups[0]["lr"] == lr


def test_single_number_for_betas_is_refused():
    with pytest.raises(TypeError, match=r"betas must be two numbers, got 0\.9"):
        egop.EGOP(nn.Linear(4, 3), betas=0.9)


@pytest.mark.parametrize("kind", [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_complex_weights_are_refused(kind):
    with pytest.raises(TypeError, match="steps real numbers"):
        kind([nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))])


def test_settings_that_every_matrix_optimizer_needs_are_checked():
    class Plain(egop.optim.MatrixOptimizer):
        def transform(self, matrices, group):
            return matrices

    with pytest.raises(TypeError, match=r"must include weight_decay, update_rms\.$"):
        Plain([nn.Parameter(torch.ones(2, 2))], {"lr": 0.1})


def test_weights_of_one_shape_with_different_numbers_of_steps_have_adams_size():
    """Each has its own bias correction."""
    drawn = [torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).double() for seed in range(22)]
    together, apart = ([nn.Parameter(each.clone()) for each in drawn[:2]] for _ in range(2))
    options = {"lr": 0.1, "betas": (0.9, 0.999), "adam_sized": True}
    optimizers = [egop.optim.PolarAdam(together, **options)]
    optimizers += [egop.optim.PolarAdam([weight], **options) for weight in apart]
    for step in range(2, 22):
        for weights in (together, apart):
            weights[0].grad = drawn[step]
            weights[1].grad = drawn[step] ** 3 if step % 3 == 0 else None
        for optimizer in optimizers:
            optimizer.step()
    for weight, other in zip(together, apart, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=0)
