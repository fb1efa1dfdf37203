"""What an optimizer says of itself, before the first step and after some; and that no basis helps some of them."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import cases
import egop


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def trained(model, optimizer, steps=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    return optimizer


def online(model, structure="auto", **options):
    refresh = egop.Online(every=5, structure=structure)
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3, **options)


def polar(params, **options):
    return egop.ReparameterizedOptimizer(params, egop.optim.PolarAdam, outside=torch.optim.AdamW, **options)


def row(optimizer, name):
    return next(re.split(r" {2,}", line) for line in str(optimizer).splitlines() if line.startswith(name))


def test_it_names_what_runs_inside_the_refresh_its_counts_the_groups_and_the_blocks():
    model = network()
    refresh = egop.Online(every=20, structure=egop.Shared(side="smaller"), spread=False)
    optimizer = trained(model, polar(model, refresh=refresh, lr=1e-2))
    assert repr(optimizer) == "ReparameterizedOptimizer(PolarAdam, 2 blocks, AdamW outside, Online, lr=0.01)"
    lines = str(optimizer).splitlines()
    assert lines[0] == repr(optimizer)
    assert lines[1] == "PolarAdam steps the coordinates of 2 blocks, AdamW steps 4 other tensors"
    assert lines[2] == (
        "refresh: Online(every=20, structure=Shared(side='smaller'), spread=False): 12 steps, 1 renewal, 0 failures"
    )
    assert lines[3].startswith("group 0: 6 tensors, lr 0.01, betas (0.9, 0.95)")
    assert "tensor(" not in str(optimizer)
    assert row(optimizer, "0.weight")[:4] == ["0.weight", "Shared", "6 x 8", "144 B"]
    assert lines[-1] == "4.weight is not rotated: the output head"


def test_a_learning_rate_that_is_a_tensor_is_a_number():
    optimizer = polar(network(), refresh=egop.Online(), lr=torch.tensor(0.25))
    assert repr(optimizer).endswith("lr=0.25)")
    assert "tensor(" not in str(optimizer)


def test_every_group_is_told_with_its_own_rate():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = polar(groups, refresh=egop.Online(), lr=0.1, model=model)
    assert repr(optimizer).endswith("lr=0.5 and 0.1)")
    assert [line[:8] for line in str(optimizer).splitlines() if line.startswith("group")] == ["group 0:", "group 1:"]


def test_a_basis_that_was_estimated_keeps_its_spectrum_and_what_it_left():
    case = cases.MLP
    basis = cases.estimate(case.objective(), structure={"0.weight": egop.Full()}, partition="parameter")
    optimizer = egop.ReparameterizedOptimizer(case.build(), torch.optim.AdamW, basis, lr=0.1)
    assert optimizer.basis.unrotated == basis.unrotated == {"2.weight": "no pattern matches it"}
    assert repr(optimizer.basis.spectrum["0.weight"]) == repr(basis.spectrum["0.weight"])
    assert f"{basis.spectrum['0.weight'].stable_rank:.1f} of 30" in str(optimizer)
    assert "refresh: none, the basis is fixed" in str(optimizer)
    other = cases.estimate(case.objective(), structure={"0.weight": egop.Full()}, samples=50, partition="parameter")
    optimizer.rebase(other)
    assert repr(optimizer.basis.spectrum["0.weight"]) == repr(other.spectrum["0.weight"])


def test_what_was_left_is_in_the_basis_and_after_loading_too():
    model = network()
    optimizer = trained(model, online(model))
    assert optimizer.basis.unrotated == optimizer.refresher.unrotated == {"4.weight": "the output head"}
    another = network()
    resumed = online(another)
    another.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.basis.unrotated == {"4.weight": "the output head"}


@pytest.mark.parametrize(
    "refresh", [egop.Online(), egop.Online(tolerance=0.1), egop.Aligned()], ids=["Online", "drifted", "Aligned"]
)
def test_there_is_a_plan_before_the_first_step_and_it_is_what_comes(refresh):
    model = network()
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    plan = optimizer.plan
    assert [block.name for block in plan.chosen] == ["0.weight", "2.weight"]
    assert plan.unrotated == {"4.weight": "the output head"}
    shown = str(optimizer)
    assert "planned for the first step:" in shown
    assert optimizer.blocks == [], "a look changes nothing"
    trained(model, optimizer, 1)
    assert list(map(type, optimizer.plan.chosen.values())) == list(map(type, plan.chosen.values()))
    assert "planned" not in str(optimizer)


def test_a_plan_of_sampled_bases_is_there_before_the_first_step():
    model = cases.MLP.build()
    refresh = egop.Every(5, cases.MLP.objective(model), structure=egop.Shared())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    assert [type(structure).__name__ for structure in optimizer.plan.chosen.values()] == ["Shared", "Shared"]
    assert "Every(every=5, structure=Shared(side='input'))" in str(optimizer)


def test_a_plan_that_cannot_be_is_said_in_print_and_raised_when_asked_for():
    refresh = egop.Online(structure=egop.Kronecker(), memory=100)
    optimizer = egop.ReparameterizedOptimizer(network(), torch.optim.AdamW, refresh=refresh, lr=1e-3)
    assert "the first step will fail: " in str(optimizer)
    with pytest.raises(MemoryError):
        _ = optimizer.plan


def test_without_a_basis_there_is_nothing_to_plan():
    optimizer = egop.ReparameterizedOptimizer(network(), torch.optim.AdamW, lr=1e-3)
    assert optimizer.plan.chosen == {}
    assert str(optimizer).splitlines()[0] == "ReparameterizedOptimizer(AdamW, 0 blocks, lr=0.001)"


def test_looking_does_not_change_a_training():
    model, twin = network(), network()
    optimizer, undisturbed = online(model), online(twin)
    for _ in range(3):
        trained(model, optimizer, 4)
        trained(twin, undisturbed, 4)
        str(optimizer), repr(optimizer), optimizer.plan
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


# --- a basis that is of no use ---


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}], ids=str)
def test_sgd_is_warned_of(options):
    arguments = {"refresh": egop.Online(structure={"0.weight": egop.Shared()}), "lr": 0.1}
    with pytest.warns(UserWarning, match="SGD takes the same steps in every rotation") as caught:
        step(egop.ReparameterizedOptimizer(network(), torch.optim.SGD, **arguments, **options))
    assert [each.filename for each in caught] == [__file__]


def quiet(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build()


def test_nobody_is_warned_where_a_basis_may_help_or_there_is_none():
    case = cases.MLP
    basis, identity, reduced = (
        cases.estimate(case.objective(), structure=structure)
        for structure in (egop.Shared(), egop.Identity(), egop.Reduced(rank=2))
    )
    others = [each for each in cases.OPTIMIZERS if not each.name.startswith("SGD")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for useful in (reduced, identity):
            step(egop.ReparameterizedOptimizer(case.build(), torch.optim.SGD, useful))
        for each in others:
            step(egop.ReparameterizedOptimizer(case.build(), each.kind, basis, **each.arguments))


def step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_an_optimizer_without_a_basis_says_so_in_its_first_step():
    optimizers = [quiet(lambda: egop.ReparameterizedOptimizer(network(), torch.optim.AdamW, lr=0.1)) for _ in range(2)]
    for optimizer in optimizers:  # each of them
        with pytest.warns(UserWarning, match="this is plain AdamW. Pass basis= or refresh=") as caught:
            step(optimizer)
        assert [warning.filename for warning in caught] == [__file__]
        assert len(str(caught[0].message).splitlines()) == 1
        quiet(lambda optimizer=optimizer: step(optimizer))


def test_an_optimizer_that_was_given_a_basis_in_any_way_says_nothing():
    model = cases.MLP.build()
    basis = cases.estimate(cases.MLP.objective())
    by_group = [{"params": list(model.named_parameters()), "basis": basis}]
    quiet(lambda: step(egop.ReparameterizedOptimizer(by_group, torch.optim.AdamW, lr=0.1)))
    quiet(lambda: step(egop.ReparameterizedOptimizer(network(), torch.optim.AdamW, refresh=egop.Online(), lr=0.1)))
    nothing = egop.Basis([])
    quiet(lambda: step(egop.ReparameterizedOptimizer(network(), torch.optim.AdamW, nothing, lr=0.1)))

    trained_before = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.1)
    step(trained_before)
    loaded = egop.ReparameterizedOptimizer(cases.MLP.build(), torch.optim.AdamW, lr=0.1)
    loaded.load_state_dict(trained_before.state_dict())
    quiet(lambda: step(loaded))
    rebased = egop.ReparameterizedOptimizer(cases.MLP.build(), torch.optim.AdamW, lr=0.1)
    rebased.rebase(basis)
    quiet(lambda: step(rebased))
