"""The contract of an optimizer, over bases that see matrices × coordinates that follow the gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import cases
import egop
from explicit import distance, identical

SMALLER = egop.Online(every=2, structure=egop.Shared(side="smaller"))
BOTH = egop.Online(every=2, structure=egop.Kronecker())
COMBINATIONS = {
    "Sign, both sides": (egop.optim.Sign, BOTH),
    "Sign, aligned": (egop.optim.Sign, egop.Aligned()),
    "Sinkhorn, smaller side": (egop.optim.Sinkhorn, SMALLER),
    "Sinkhorn, aligned": (egop.optim.Sinkhorn, egop.Aligned(every=2)),
    "PolarAdam, both sides": (egop.optim.PolarAdam, BOTH),
    "AdamW, aligned": (torch.optim.AdamW, egop.Aligned()),
}
STEPS = 6


@pytest.fixture(params=COMBINATIONS)
def combination(request):
    return request.param


class Network(nn.Module):
    """A kernel, weights of two shapes, a norm, a weight that is not used at first, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.wide, self.narrow = nn.Linear(6, 8), nn.Linear(8, 6)
        self.unused = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)
        self.use = False

    def forward(self, inputs):
        x = self.norm(self.stem(inputs).mean(-1))
        wide = self.wide(x).tanh()
        return self.head(x + self.narrow(wide) + (self.unused(wide) if self.use else 0))


def network(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().to(dtype)


def started(combination, model, **options):
    settings = {"lr": 0.01, "weight_decay": 0.1} | options
    kind, refresh = COMBINATIONS[combination]
    return egop.ReparameterizedOptimizer(model, kind, refresh=refresh, outside=torch.optim.AdamW, **settings)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(12, 2, 5, generator=generator), torch.randint(3, (12,), generator=generator)
    parameter = next(model.parameters())
    return nn.functional.cross_entropy(model(inputs.to(parameter.dtype)).double(), labels)


def train(model, optimizer, first=0, last=STEPS):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return cases.parameters_of(model)


def plain(combination, last=STEPS, **options):
    model = network()
    return train(model, started(combination, model, **options), 0, last)


WAYS = ["state", "torch's tools", "deepcopy", "pickle"]


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_exactly(combination, way, tmp_path):
    model, other = network(), network()
    optimizer, again = started(combination, model), started(combination, other)
    train(model, optimizer, 0, 3)
    if way == "state":
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
        weights, state = torch.load(tmp_path / "state", weights_only=True)
        other.load_state_dict(weights)
        again.load_state_dict(state)
    elif way == "torch's tools":
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, again, state)
    elif way == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    else:
        other, again = pickle.loads(pickle.dumps((model, optimizer)))
    for each in (model, other):
        each.use = True  # a weight that had no gradient before
    assert identical(train(model, optimizer, 3, 7), train(other, again, 3, 7))
    assert "unused.weight" in again.basis


def test_a_scaled_loss_is_unscaled_and_a_step_with_inf_is_skipped(combination):
    model = network()
    optimizer, scaler = started(combination, model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        before = cases.parameters_of(model)
        scaler.scale(loss_of(model, step - (step > 3))).backward()  # the batch of the skipped step comes again
        if step == 3:
            model.wide.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert identical(before, cases.parameters_of(model)) == (step == 3)
    assert identical(cases.parameters_of(model), plain(combination))


def test_closures_accumulation_hooks_and_compiled_models_change_nothing(combination):
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer, seen = started(combination, compiled), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure(step):
        optimizer.zero_grad()
        for _ in range(2):
            (loss_of(compiled, step) / 2).backward()
        return loss_of(compiled, step)

    for step in range(STEPS):
        assert optimizer.step(lambda step=step: closure(step)).requires_grad
    assert seen == ["before", "after"] * STEPS
    assert distance(cases.parameters_of(model), plain(combination)) < 1e-9


def test_schedulers_reach_all_parameters(combination):
    model = network()
    optimizer = started(combination, model, lr=torch.tensor(0.01, dtype=torch.float64))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
    for step in range(STEPS):
        train(model, optimizer, step, step + 1)
        scheduler.step()
        if step == 2:
            before = cases.parameters_of(model)
    assert distance(before, plain(combination, 3)) < 1e-12
    assert distance(before, cases.parameters_of(model)) < 1e-12


def test_what_is_frozen_or_has_no_gradient_stays(combination):
    model = network()
    optimizer = started(combination, model)
    train(model, optimizer, 0, 2)
    model.narrow.requires_grad_(False)
    before = cases.parameters_of(model)
    optimizer.zero_grad()
    after = train(model, optimizer, 2, 5)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {f"{layer}.{name}" for layer in ("narrow", "unused") for name in ("weight", "bias")}


def test_gradients_of_zero_move_nothing_but_by_decay(combination):
    model = network()
    optimizer = started(combination, model)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    start = cases.parameters_of(network())
    expected = {name: value * (1 - 0.01 * 0.1) ** 3 for name, value in start.items()}
    assert distance(cases.parameters_of(model), expected) < 1e-12
    assert all(torch.isfinite(value).all() for value in train(model, optimizer).values())


def test_weights_in_half_precision_have_coordinates_in_single(combination):
    """Steps that bfloat16 would round away add up."""
    model, start = network(torch.bfloat16), network(torch.bfloat16)
    optimizer = started(combination, model, lr=1e-6, weight_decay=0.0)
    train(model, optimizer, 0, 4)
    assert optimizer.blocks
    for block in optimizer.blocks:
        before, after = start.get_parameter(block.name), model.get_parameter(block.name)
        moved = (block.change.decode(block.coordinates)[0] - before.float()).abs().max().item()
        assert after.dtype is torch.bfloat16
        assert block.name == "unused.weight" or 1e-7 < moved < 1e-4, block.name


def test_a_group_is_added(combination):
    model, later = network(), nn.Linear(3, 3).double()
    optimizer = started(combination, model)
    train(model, optimizer, 0, 2)
    optimizer.add_param_group({"params": [(f"later.{name}", each) for name, each in later.named_parameters()]})
    before = cases.parameters_of(later)
    for _ in range(2, 5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(later(model(torch.randn(4, 2, 5).double())), torch.arange(4) % 3).backward()
        optimizer.step()
    assert distance(before, cases.parameters_of(later)) > 1e-3
    assert "later.weight" in optimizer.basis
