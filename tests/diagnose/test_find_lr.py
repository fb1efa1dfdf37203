"""find_lr: two learning rates from a race with one candidate."""

import math

import pytest
import torch

import cases
import egop
from racing import make_objective, make_quadratic, squares


def find(objective=None, optimizer=torch.optim.AdamW, **options):
    settings = {"steps": 20, "rates": (1e-3, 1e-2, 1e-1), "progress": False}
    return egop.find_lr(objective or make_objective(), optimizer, **settings | options)


def descend(rate, steps, scales=(1.0, 0.02)):
    """Return the loss of gradient descent on the quadratic, with the schedule spelled out."""
    values = [1.0] * len(scales)
    for step in range(steps):
        now = rate * min(1.0, (step + 1) / (0.1 * steps), (steps - step) / (0.4 * steps))
        values = [value * (1 - now * scale) for value, scale in zip(values, scales, strict=True)]
    return sum(scale * value**2 for value, scale in zip(values, scales, strict=True)) / 2


def test_the_two_rates_are_the_best_of_a_quadratic():
    rates = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    found = find(make_quadratic(), torch.optim.SGD, rates=rates)
    exact = {rate: descend(rate, 20) for rate in rates}
    for rate, loss in found.tried.items():
        assert loss == (pytest.approx(exact[rate], rel=1e-9) if math.isfinite(loss) else math.inf)
    assert list(found) == sorted(exact, key=exact.get)[:2]
    assert rates[0] < found.lr < rates[-1]


def test_the_default_rates_reach_the_optimum_of_a_quadratic():
    found = egop.find_lr(make_quadratic((1.0, 0.5)), torch.optim.SGD, progress=False)
    assert sorted(found) == [0.5, 1.0]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3)),
        egop.EGOP,
        (egop.EGOP, {"every": 5}),
        lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=1e-3, refresh=egop.Online()),
    ],
    ids=["SGD", "AdamW-options", "tensor-rate", "EGOP", "EGOP-options", "Online"],
)
def test_plain_optimizers_and_egops_own(optimizer):
    found = find(optimizer=optimizer)
    assert len(set(found)) == 2
    assert found.tried[found.lr] < found.race.start


def test_an_optimizer_that_is_really_schedule_free():
    optimizers = pytest.importorskip("pytorch_optimizer")
    assert min(find(optimizer=optimizers.ScheduleFreeAdamW).tried.values()) < 1


@pytest.mark.parametrize("optimizer", ["EGOP", ("AdamW", {})])
def test_what_is_no_optimizer_is_an_error(optimizer):
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer class, .* got str"):
        find(optimizer=optimizer)


def test_it_says_for_which_schedule_and_length_the_rates_hold():
    found = find()
    assert str(found).startswith(f"Try lr {found.rates[0]:g}, then {found.rates[1]:g} (for warm-up over the first 10 %")
    assert "for a constant rate, divide by three), and go on if the lowest or highest is best. Raced 3" in str(found)
    assert "Longer training usually needs lower rates. Runs this short say little." in str(found)
    assert repr(found) == f"FoundRates({found.rates[0]:g}, {found.rates[1]:g}; 3 tried)"
    assert str(find(steps=None, rates=(0.01,))).endswith("Longer training usually needs lower rates (steps=).")


def test_an_edge_is_mentioned():
    assert "0.0001 is at the edge of what was tried" in str(find(rates=(1e-5, 1e-4)))


def test_ctrl_c_returns_what_is_known():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 300:
            raise KeyboardInterrupt
        return squares(model, batch)

    objective = make_objective(loss)
    before = cases.state_of(objective.module)
    assert "The race is incomplete: it was interrupted." in str(find(objective))
    assert cases.state_of(objective.module) == before


def test_no_rate_that_lowers_the_loss_is_an_error():
    with pytest.raises(
        ValueError, match=r"No learning rate of SGD from 1000 to 1000 lowered the loss .*all runs diverged"
    ):
        find(optimizer=torch.optim.SGD, rates=(1e3,))


def test_finite_losses_are_plotted_by_rate():
    pytest.importorskip("matplotlib")
    (axes,) = find(optimizer=torch.optim.SGD, rates=(1e-3, 1e-2, 1e3)).plot().axes
    assert list(axes.lines[0].get_xdata()) == [1e-3, 1e-2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rates_and_bases_are_found_where_gradients_are_switched_off(mode):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    batches = [(inputs, inputs.prod(1, keepdim=True)) for inputs in torch.randn(4, 8, 4)]
    objective = egop.Objective(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batches)
    with mode():
        assert egop.find_lr(objective, torch.optim.AdamW, rates=[1e-2], steps=20, progress=False).lr == 1e-2
        assert list(egop.estimate(objective, samples=8, progress=False)) == ["0.weight"]


class MergingLinear(torch.nn.Linear):
    """A layer that trains a small part of its weight and adds it to the rest in evaluation mode, as LoRA layers do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.part = torch.nn.Parameter(torch.zeros(outputs, inputs))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.weight.add_(self.part if not mode else -self.part)
            self.merged = not mode
        return self

    def forward(self, inputs):
        weight = self.weight if self.merged else self.weight + self.part
        return torch.nn.functional.linear(inputs, weight, self.bias)


def test_layers_that_change_with_the_mode_are_trained():
    model = torch.nn.Sequential(MergingLinear(4, 1))
    model[0].weight.requires_grad_(False)
    batches = [(inputs, inputs.sum(1, keepdim=True)) for inputs in torch.randn(6, 8, 4)]
    objective = egop.Objective(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batches)
    found = egop.find_lr(objective, torch.optim.AdamW, rates=[1e-1], steps=20, progress=False)
    assert found.race.ranked(next(iter(found.race.runs[0])))[0].final < 0.8 * found.race.start
    assert not model[0].merged
