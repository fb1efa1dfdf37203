"""What no block has is stepped by another optimizer: one object, one param_groups, one state."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import cases
import egop
from cases import DEEP
from explicit import identical, logistic

ADAMW = (torch.optim.AdamW, {"betas": (0.8, 0.9)})


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator, dtype=torch.float64), torch.randint(3, (16,), generator=generator))
        for _ in range(4)
    ]


def backward(model, step):
    model.zero_grad()
    inputs, labels = batches()[step % 4]
    nn.functional.cross_entropy(model(inputs), labels).backward()


def made(model, kind=torch.optim.SGD, outside=ADAMW, refresh=None, **options):
    options = options or {"lr": 0.01, "weight_decay": 0.1}
    refresh = egop.Online(structure={"*": egop.Kronecker()}, every=2) if refresh is None else refresh
    return egop.ReparameterizedOptimizer(model, kind, refresh=refresh, outside=outside, **options)


def test_it_is_two_optimizers_side_by_side():
    """SGD is the same in every basis, so the result must equal plain SGD on the weights and AdamW on the rest."""
    model, plain = network(), network()
    weights = [parameter for parameter in plain.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in plain.parameters() if parameter.dim() == 1]
    optimizer = made(model)
    sides = [
        torch.optim.SGD(weights, lr=0.01, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    ]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    others = [torch.optim.lr_scheduler.ExponentialLR(side, 0.9) for side in sides]
    for step in range(8):
        backward(model, step)
        backward(plain, step)
        for each in (optimizer, *sides):
            each.step()
        for each in (scheduler, *others):
            each.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam])
def test_a_state_resumes_exactly(kind, tmp_path):
    model = network()
    optimizer = made(model, kind)
    for step in range(5):
        backward(model, step)
        optimizer.step()
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
    twin = copy.deepcopy((model, optimizer))
    for step in range(5, 9):
        backward(model, step)
        optimizer.step()
    weights, state = torch.load(tmp_path / "state", weights_only=True)
    loaded = network()
    loaded.load_state_dict(weights)
    ours = made(loaded, kind)
    ours.load_state_dict(state)
    for again, its_optimizer in ((loaded, ours), twin):
        for step in range(5, 9):
            backward(again, step)
            its_optimizer.step()
        assert identical(cases.parameters_of(again), cases.parameters_of(model))


def test_groups_may_have_their_own_settings_and_be_added():
    model = network()
    named = dict(model.named_parameters())
    first = [(name, each) for name, each in named.items() if not name.startswith("5")]
    optimizer = egop.ReparameterizedOptimizer(
        [{"params": first, "lr": 0.0}],
        torch.optim.SGD,
        model=model,
        lr=0.1,
        outside=torch.optim.AdamW,
        refresh=egop.Online(),
    )
    optimizer.add_param_group({"params": [named["5.weight"], named["5.bias"]], "lr": 0.1})
    before = cases.parameters_of(model)
    backward(model, 0)
    optimizer.step()
    after = cases.parameters_of(model)
    moved = {name for name in after if not torch.allclose(before[name], after[name], atol=1e-12)}
    assert moved == {"5.weight", "5.bias"}


@pytest.mark.parametrize("outside", [3, torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), (torch.optim.AdamW, 3)])
def test_what_is_no_optimizer_class_is_refused(outside):
    with pytest.raises(TypeError, match="outside must be an optimizer class"):
        made(network(), outside=outside)


def test_a_learning_rate_of_its_own_is_refused():
    with pytest.raises(ValueError, match="takes its learning rate from the parameter groups"):
        made(network(), outside=(torch.optim.AdamW, {"lr": 0.1}))


def test_a_state_with_another_optimizer_outside_is_refused():
    model = network()
    optimizer = made(model)
    backward(model, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="with AdamW outside, but this optimizer runs SGD with Adagrad outside"):
        made(network(), outside=torch.optim.Adagrad).load_state_dict(optimizer.state_dict())


def test_matrix_optimizers_say_what_to_do_with_vectors():
    with pytest.raises(ValueError, match=r"a parameter of shape \(6,\).* outside=torch.optim.AdamW"):
        made(network(), egop.optim.Sign, outside=None, lr=0.01)


def test_all_parameters_are_stepped_and_the_head_is_outside():
    model = DEEP.build()
    before = cases.parameters_of(model)
    optimizer = egop.ReparameterizedOptimizer(
        model, egop.optim.Sign, refresh=egop.Online(), outside=torch.optim.AdamW, lr=0.01
    )
    for step in range(3):
        optimizer.zero_grad()
        logistic(model, DEEP.batches()[step % 4]).backward()
        optimizer.step()
    after = cases.parameters_of(model)
    assert not any(torch.equal(after[name], before[name]) for name in before)
    (head,) = [name for name, why in optimizer.refresher.unrotated.items() if why == "the output head"]
    assert set(optimizer.inner.state[model.get_parameter(head)]) == {"step", "exp_avg", "exp_avg_sq"}  # AdamW's


class Tokens(nn.Module):
    """With an embedding, two layers, a head, and a layer that is not trained at first."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first, self.second, self.late = (nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 7)

    def forward(self, tokens):
        return self.head(self.late(self.second(self.first(self.embedding(tokens)).tanh()).tanh()))


LEFT = {"embedding.weight": "an embedding", "head.weight": "the output head"}


@pytest.mark.parametrize("tolerance", [None, 0.1])
@pytest.mark.parametrize("structure", [egop.Shared(side="smaller"), egop.Kronecker()], ids=str)
def test_one_structure_leaves_embeddings_and_heads_to_the_optimizer_outside(tolerance, structure):
    def left(structure, outside):
        torch.manual_seed(0)
        model = Tokens()
        model.late.requires_grad_(False)
        optimizer = made(model, outside=outside, refresh=egop.Online(structure=structure, tolerance=tolerance))
        for step in range(2):
            model.late.requires_grad_(step == 1)
            optimizer.zero_grad()
            model(torch.arange(7)).logsumexp(-1).sum().backward()
            optimizer.step()
        assert {"first.weight", "second.weight", "late.weight"} <= set(optimizer.basis)
        assert set(optimizer.basis) | set(optimizer.refresher.unrotated) == set(
            map("{}.weight".format, dict(model.named_children()))
        )
        return optimizer.refresher.unrotated

    assert left(structure, torch.optim.AdamW) == LEFT
    assert left(structure, None) == {}
    assert left({"*": structure}, torch.optim.AdamW) == {}


def test_a_structure_that_is_named_does_not_leave_weights_for_want_of_memory():
    model = network()
    optimizer = made(model, refresh=egop.Online(structure=egop.Kronecker(), memory=1000))
    backward(model, 0)
    with pytest.raises(MemoryError, match=r"The bases need .*more than memory=1000 B"):
        optimizer.step()


def test_roles_that_were_guessed_are_told_where_they_count():
    def make(structure, outside):
        named = Tokens().named_parameters()
        return made(named, outside=outside, refresh=egop.Online(structure=structure))

    with pytest.warns(UserWarning, match=r"Skipped weights: embedding.weight \(an embedding\), head") as said:
        make(egop.Kronecker(), torch.optim.AdamW)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(egop.Kronecker(), None)
        make({"*": egop.Kronecker()}, torch.optim.AdamW)


@pytest.mark.parametrize("pair", [(torch.optim.Adam, torch.optim.AdamW), (torch.optim.AdamW, torch.optim.Adam)])
def test_it_keeps_what_makes_its_class_what_it_is(pair):
    """Adam and AdamW differ by a setting that both have."""
    model, plain = network(), network()
    inside, outside = pair
    optimizer = made(model, inside, outside, lr=0.01, weight_decay=0.5)
    rest = [parameter for parameter in plain.parameters() if parameter.dim() == 1]
    other = outside(rest, lr=0.01, weight_decay=0.5)
    backward(model, 0)
    backward(plain, 0)
    optimizer.step()
    other.step()
    ours = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    for parameter, expected in zip(ours, rest, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-14)


class Counting(torch.optim.Optimizer):
    """Keeps a count in its group, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.1, rise=1.0):
        super().__init__(params, {"lr": lr, "rise": rise, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * group["rise"] * group["k"] * parameter.grad)


def test_what_it_keeps_in_its_groups_is_saved_and_can_be_changed():
    def train(model, optimizer, first, last):
        for step in range(first, last):
            backward(model, step)
            optimizer.step()
        return cases.parameters_of(model)

    model = network()
    optimizer = made(model, outside=(Counting, {"rise": 2.0}))
    train(model, optimizer, 0, 4)
    assert optimizer.param_groups[0]["outside/k"] == 4
    assert optimizer.param_groups[0]["outside/rise"] == 2.0
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    end = train(model, optimizer, 4, 7)
    other = network()
    other.load_state_dict(weights)
    resumed = made(other, outside=Counting)  # without its options, which the state has
    resumed.load_state_dict(state)
    assert identical(train(other, resumed, 4, 7), end)
    resumed.param_groups[0]["outside/rise"] = 0.0
    before = other[0].bias.detach().clone()
    train(other, resumed, 7, 8)
    assert torch.equal(other[0].bias.detach(), before)


def test_settings_of_one_name_that_mean_something_else_stay_apart():
    model = network()
    optimizer = made(model, egop.optim.Sign, torch.optim.SGD, lr=0.01)  # both have a momentum, and nesterov
    backward(model, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.95
    assert optimizer.param_groups[0]["outside/momentum"] == 0
    adafactor = made(network(), torch.optim.Adam, torch.optim.Adafactor, lr=0.01)  # whose eps are two
    assert adafactor is not None


def test_a_group_may_have_a_key_of_that_name():
    model = network()
    groups = [{"params": list(model.named_parameters()), "outside": "mine"}]
    optimizer = egop.ReparameterizedOptimizer(
        groups, torch.optim.SGD, model=model, lr=0.1, outside=torch.optim.AdamW, refresh=egop.Online()
    )
    backward(model, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["outside"] == "mine"


def test_without_any_block_it_would_step_everything_which_is_refused():
    """Otherwise the named class would silently not run at all."""
    model = network()
    with pytest.raises(ValueError, match="PolarAdam nothing"):
        egop.ReparameterizedOptimizer(model, egop.optim.PolarAdam, outside=torch.optim.AdamW, lr=0.1)


def test_a_weight_decay_of_its_own_is_seen_in_the_groups_and_in_the_state():
    model = network()
    options = {"weight_decay": 0.5, "eps": 1e10}  # so that only the decay moves anything
    optimizer = made(model, outside=(torch.optim.AdamW, options), lr=1.0, weight_decay=0.25)
    assert optimizer.param_groups[0]["outside/weight_decay"] == 0.5
    for decay in (0.5, 0.0):
        optimizer.param_groups[0]["outside/weight_decay"] = decay
        backward(model, 0)
        before = cases.parameters_of(model)["0.bias"]
        optimizer.step()
        torch.testing.assert_close(cases.parameters_of(model)["0.bias"], (1 - decay) * before, rtol=1e-6, atol=1e-6)
    resumed = made(network(), outside=torch.optim.AdamW)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["outside/weight_decay"] == 0.0


class Spectral(nn.Module):
    """A complex weight between two real ones, as of a spectral convolution."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.complex = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64, generator=generator))

    def forward(self, inputs):
        spectrum = torch.fft.rfft(self.first(inputs))
        return self.last(torch.fft.irfft(spectrum * self.complex.mean(0)[: spectrum.shape[-1]], n=6))


MAKE_WITH_COMPLEX = {
    "EGOP": lambda model: egop.EGOP(model, lr=0.01, every=2),
    "outside": lambda model: egop.ReparameterizedOptimizer(
        model, egop.optim.Sinkhorn, refresh=egop.Aligned(), outside=torch.optim.AdamW, lr=0.01
    ),
    "one class": lambda model: egop.ReparameterizedOptimizer(
        model, torch.optim.AdamW, refresh=egop.Online(every=2, structure=egop.Shared()), lr=0.01
    ),
    "no basis": lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=0.01),
}


@pytest.mark.parametrize("name", MAKE_WITH_COMPLEX)
def test_complex_parameters_are_stepped_outside_every_block(name):
    torch.manual_seed(0)
    model = Spectral()
    resumed = copy.deepcopy(model)
    optimizer, other = MAKE_WITH_COMPLEX[name](model), MAKE_WITH_COMPLEX[name](resumed)
    group, weight = optimizer.param_groups[0], model.complex.detach().clone().requires_grad_()
    settings = {"lr": group["lr"], "weight_decay": group["weight_decay"], "betas": group.get("betas", (0.9, 0.999))}
    plain = torch.optim.AdamW([weight], **settings)

    def step(model, optimizer, inputs, labels):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.float()), labels).backward()
        optimizer.step()

    for batch in batches():
        step(model, optimizer, *batch)
        weight.grad = model.complex.grad
        plain.step()
    assert torch.equal(model.complex, weight)
    assert optimizer.basis.unrotated.get("complex") == (None if name == "no basis" else "complex numbers")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(model.state_dict())
    for batch in batches():
        step(model, optimizer, *batch)
        step(resumed, other, *batch)
    assert identical(*(cases.parameters_of(each) for each in (model, resumed)))
