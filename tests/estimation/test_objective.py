"""Objective: a loss of named parameters and the batches it is evaluated on."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import cases
import egop
from egop.numerics.randomness import RandomStream, get_random_state


def mean_square(model, batch):
    return model(batch).square().mean()


def linear_objective(batches=None):
    return egop.Objective(nn.Linear(3, 2), mean_square, [torch.ones(4, 3)] if batches is None else batches)


class Recording(nn.Module):
    """A forward pass that changes buffers in every way: in place, replaced, filled from None, or added."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("filled", None)

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced + 1
        self.filled = torch.ones(2)
        self.register_buffer("added", torch.ones(1), persistent=False)
        return x * self.weight


# --- parameters ---


def test_parameters_are_the_trainable_ones_by_name():
    model = cases.mlp()
    model[2].weight.requires_grad_(False)
    objective = egop.Objective(model, cases.cross_entropy, [])
    assert list(objective.parameters) == ["0.weight", "0.bias", "2.bias"]
    assert objective.parameters["0.weight"] is model[0].weight


def test_compiled_model_has_plain_names():
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2))
    objective = egop.Objective(torch.compile(model, backend="eager"), cases.cross_entropy, [])
    assert list(objective.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_compiled_model_has_the_same_gradients():
    plain, compiled = cases.MLP.build(), torch.compile(cases.MLP.build(), backend="eager")
    expected = cases.sample(cases.MLP.objective(plain), egop.Gaussian(), 4)
    found = cases.sample(cases.MLP.objective(compiled), egop.Gaussian(), 4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- batches ---


def test_repr_names_the_model_and_counts_what_is_trained():
    model = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 2))
    assert repr(egop.Objective(model, cases.cross_entropy, [])) == "Objective(Sequential, 98 parameters in 4 tensors)"
    model[0].requires_grad_(False)
    assert repr(egop.Objective(model, cases.cross_entropy, [])) == "Objective(Sequential, 18 parameters in 2 tensors)"
    function = egop.Objective.from_function(lambda theta: theta.sum(), {"theta": torch.zeros(3000)})
    assert repr(function) == "Objective(function, 3,000 parameters in 1 tensor)"


def test_batches_repeat_without_end():
    objective = linear_objective(["a", "b", "c"])
    assert list(itertools.islice(objective.batches(), 7)) == ["a", "b", "c", "a", "b", "c", "a"]


def test_data_loader_reshuffles_on_every_pass():
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=16, shuffle=True)
    seen = [batch[0].tolist() for batch in itertools.islice(linear_objective(loader).batches(), 8)]
    first, second = (list(itertools.chain(*each)) for each in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


def test_empty_batches_raise():
    with pytest.raises(ValueError, match="batches are empty: the objective needs at least one batch"):
        next(linear_objective([]).batches())


def test_exhausted_iterator_raises():
    objective = linear_objective(iter(["a", "b"]))
    batches = objective.batches()
    assert [next(batches), next(batches)] == ["a", "b"]
    with pytest.raises(ValueError, match=r"can be read only once. Pass a list or a DataLoader"):
        next(batches)


# --- loss and gradients ---


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_loss_and_gradients_match_a_model_with_these_values(case):
    model, batch = case.build(), case.batches()[0]
    objective = case.objective(model)
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in objective.parameters.items()
    }
    other = copy.deepcopy(model)
    other.load_state_dict(other.state_dict() | values)
    loss = cases.cross_entropy(other, batch)
    loss.backward()
    with objective.preserve():
        found, gradients = objective.gradients(values, batch, list(values))
        pure = objective.loss(values, batch)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(pure.detach(), loss.detach(), rtol=1e-12, atol=0)
    for name, gradient in zip(values, gradients, strict=True):
        torch.testing.assert_close(gradient, other.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_pure_loss_reaches_parameters_read_in_the_loss_function():
    model = nn.Linear(3, 2, dtype=torch.float64)
    objective = egop.Objective(model, lambda model, batch: model.weight.square().sum() + batch, [0.0])
    values = {"weight": torch.full((2, 3), 2.0), "bias": torch.zeros(2)}
    assert objective.loss(values, 1.0).item() == 25.0


def test_pure_loss_does_not_write_to_the_model():
    objective = cases.MLP.objective()
    before = cases.state_of(objective.module)
    objective.loss({name: torch.zeros_like(p) for name, p in objective.parameters.items()}, cases.MLP.batches()[0])
    assert cases.state_of(objective.module) == before


def test_tied_weights_are_one_parameter_with_summed_gradient():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    model[1].weight = model[0].weight
    x = torch.arange(3.0, dtype=torch.float64)
    objective = egop.Objective(model, lambda model, batch: model(batch).sum(), [x])
    assert list(objective.parameters) == ["0.weight"]
    W = torch.tensor([[1.0, 2, 0], [0, 1, 1], [2, 0, 1]], dtype=torch.float64)
    # f = 1ᵀ W W x, whose gradient is 1 (W x)ᵀ + Wᵀ 1 xᵀ
    one = torch.ones(3, dtype=torch.float64)
    expected = torch.outer(one, W @ x) + torch.outer(W.mT @ one, x)
    with objective.preserve():
        _, (gradient,) = objective.gradients({"0.weight": W}, x, ["0.weight"])
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(torch.func.grad(lambda W: objective.loss({"0.weight": W}, x))(W), expected)


def test_unused_parameter_has_zero_gradient():
    objective = egop.Objective(nn.Linear(3, 2), lambda model, batch: model.bias.sum(), [0])
    with objective.preserve():
        _, (gradient,) = objective.gradients(objective.current, 0, ["weight"])
    assert torch.equal(gradient, torch.zeros(2, 3))


def test_loss_with_one_entry_is_a_scalar():
    objective = egop.Objective(nn.Linear(3, 1), lambda model, batch: model(batch), [torch.ones(1, 3)])
    assert objective.loss(objective.current, torch.ones(1, 3)).shape == ()


def test_gradients_inside_no_grad():
    objective = linear_objective()
    with torch.no_grad(), objective.preserve():
        _, gradients = objective.gradients(objective.current, torch.ones(4, 3), ["weight"])
    assert gradients[0].abs().sum() > 0


# --- functions of named tensors ---


def test_function_is_called_with_tensors_by_name():
    objective = egop.Objective.from_function(
        lambda a, b: (a * b).sum(), {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    )
    with objective.preserve():
        loss, (a, b) = objective.gradients({"a": torch.tensor([5.0, 6.0]), "b": torch.ones(2)}, None, ["a", "b"])
    assert loss.item() == 11.0
    assert a.tolist() == [1.0, 1.0]
    assert b.tolist() == [5.0, 6.0]
    assert next(objective.batches()) is None


def test_function_gets_the_batch_first():
    objective = egop.Objective.from_function(
        lambda batch, theta: (batch * theta).sum(), {"theta": torch.ones(2)}, [3, 5]
    )
    with objective.preserve():
        gradients = [objective.gradients(objective.current, batch, ["theta"])[1][0].tolist() for batch in (3, 5)]
    assert gradients == [[3.0, 3.0], [5.0, 5.0]]
    assert list(itertools.islice(objective.batches(), 3)) == [3, 5, 3]


def test_tensors_of_a_function_are_never_written():
    theta = torch.ones(3, requires_grad=True)
    version = theta._version
    objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
    assert objective.parameters["theta"] is theta
    cases.sample(objective, egop.Gaussian(), 5)
    assert theta.tolist() == [1.0, 1.0, 1.0]
    assert theta._version == version
    assert theta.grad is None


def test_one_tensor_may_be_given_under_two_names():
    start = torch.zeros(3)
    objective = egop.Objective.from_function(lambda a, b: (a * b.sin()).sum(), {"a": start, "b": start})
    for method in ("loop", "vmap"):
        found = cases.sample(objective, egop.Gaussian(), 2, method=method)
        assert not torch.equal(found["a"], found["b"])


def test_function_follows_changes_of_its_tensors():
    theta = torch.zeros(2)
    objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
    theta.data = torch.ones(2, dtype=torch.float64)
    assert cases.sample(objective, egop.Recentered(), 1)["theta"].tolist() == [[2.0, 2.0]]
    module, loss = objective.trainable_copy()
    assert loss(module, None).item() == 2.0
    assert module.theta.dtype == torch.float64


def test_tensor_names_may_have_dots():
    tensors = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    objective = egop.Objective.from_function(lambda **values: sum(v.square().sum() for v in values.values()), tensors)
    for method in ("loop", "vmap"):
        found = cases.sample(objective, egop.Recentered(), 1, method=method)
        assert torch.equal(found["0.weight"], torch.full((1, 2, 2), 2.0))


# --- preserve ---


def disturb(model):
    """Change everything that a loss function could change."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
            if parameter.grad is not None:
                parameter.grad.mul_(2)
            parameter.grad = torch.ones_like(parameter)
        for buffer in model.buffers():
            buffer.add_(1)
    torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002


@pytest.mark.parametrize("interruption", [None, ValueError, KeyboardInterrupt, GeneratorExit])
def test_preserve_restores_everything_after_errors(interruption):
    model = cases.MODELS[2].build()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model[0].bias.grad = torch.full_like(model[0].bias, 7)
    objective = cases.MODELS[2].objective(model)
    before = cases.state_of(model)
    try:
        with objective.preserve(seed=5):
            disturb(model)
            assert cases.state_of(model) != before
            if interruption is not None:
                raise interruption
    except (ValueError, KeyboardInterrupt, GeneratorExit):
        pass
    assert cases.state_of(model) == before


def test_preserve_restores_replaced_filled_and_added_buffers():
    model = Recording()
    objective = egop.Objective(model, mean_square, [torch.ones(3)])
    before = cases.state_of(model)
    with objective.preserve():
        model(torch.ones(3))
        model(torch.ones(3))
        assert len(list(model.buffers())) == 4
    assert cases.state_of(model) == before
    assert list(model.state_dict()) == ["weight", "written", "replaced"]


def test_nested_preserve_restores_one_level_at_a_time():
    model = nn.Linear(1, 1, bias=False)
    objective = egop.Objective(model, mean_square, [torch.ones(1, 1)])
    nn.init.constant_(model.weight, 1.0)
    with objective.preserve():
        objective.write({"weight": torch.full((1, 1), 2.0)})
        with objective.preserve():
            objective.write({"weight": torch.full((1, 1), 3.0)})
            assert objective.current["weight"].item() == 1.0
        assert model.weight.item() == 2.0
        assert objective.current["weight"].item() == 1.0
    assert model.weight.item() == 1.0


def test_preserve_seeds_random_numbers():
    objective = linear_objective()

    def numbers(seed):
        with objective.preserve(seed=seed):
            return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    assert numbers(1) == numbers(1)
    assert all(a != b for a, b in zip(numbers(1), numbers(2), strict=True))
    assert all(a != b for a, b in zip(numbers(1), numbers(2**40), strict=True))


def numbers():
    return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002


def test_random_stream_resumes_and_leaves_others_alone():
    objective = linear_objective()
    with objective.preserve(seed=1):
        plain = [numbers() for _ in range(4)]
    one, two = RandomStream(1), RandomStream(2)
    with objective.preserve(seed=3):
        expected = [numbers() for _ in range(4)]
    found, between = [], []
    with objective.preserve(seed=3):
        for _ in range(4):
            with one:
                found.append(numbers())
            with two:
                numbers()
            between.append(numbers())
    assert found == plain
    assert between == expected


def test_random_stream_restores_others_after_an_error():
    state = get_random_state()

    def interrupted():
        numbers()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), RandomStream(1):
        interrupted()
    after = get_random_state()
    assert after[0] == state[0]
    assert after[1][2] == state[1][2]
    assert torch.equal(after[2], state[2])


def test_current_ignores_values_written_while_sampling():
    objective = linear_objective()
    start = objective.module.weight.detach().clone()
    with objective.preserve():
        objective.write({"weight": torch.zeros(2, 3)})
        assert torch.equal(objective.current["weight"], start)
    nn.init.zeros_(objective.module.weight)
    assert torch.equal(objective.current["weight"], torch.zeros(2, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_random_states_are_restored_for_a_cpu_model():
    before = torch.cuda.get_rng_state_all()
    with linear_objective().preserve(seed=1):
        torch.rand(3, device="cuda")
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: egop.Objective(abs, mean_square, []), TypeError, "must be a torch.nn.Module, got builtin.*from_fu"),
        (lambda: egop.Objective(nn.ReLU(), mean_square, []), ValueError, "no parameters.*none of them requires a grad"),
        (
            lambda: egop.Objective(nn.Linear(1, 1).requires_grad_(False), mean_square, []),
            ValueError,
            "no parameters.*none of them requires a gradient",
        ),
        (
            lambda: egop.Objective(nn.Linear(1, 1, dtype=torch.complex64), mean_square, []),
            TypeError,
            "'weight' is torch.complex64.*real floating-point",
        ),
        (lambda: egop.Objective(nn.LazyLinear(1), mean_square, []), ValueError, "'weight' is not initialized.*Run one"),
        (lambda: egop.Objective.from_function(torch.sum, torch.zeros(2)), TypeError, "mapping of names to tensors"),
        (lambda: egop.Objective.from_function(torch.sum, {"theta": 1.0}), TypeError, "mapping of names to tensors"),
        (lambda: egop.Objective.from_function(lambda: 0, {}), ValueError, "no parameters"),
        (
            lambda: egop.Objective.from_function(lambda theta: theta.sum(), {"theta": torch.arange(3)}),
            TypeError,
            "'theta' is torch.int64",
        ),
    ],
)  # fmt: skip
def test_invalid_objectives_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


class OfModelAndBatch(nn.CrossEntropyLoss):
    def forward(self, model, batch):
        return super().forward(model(batch[0]), batch[1])


def test_loss_may_be_a_module():
    objective = egop.Objective(cases.MLP.build(), OfModelAndBatch(), cases.MLP.batches())
    expected = cases.sample(cases.MLP.objective(), egop.Gaussian(), 2)
    torch.testing.assert_close(cases.sample(objective, egop.Gaussian(), 2), expected)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda model, batch: model(batch), ValueError, r"must return a scalar, got a tensor of shape \(4, 2\).*mean"),
        (lambda model, batch: model(batch).sum().item(), TypeError, "must return a scalar tensor, got float"),
        (lambda model, batch: None, TypeError, "must return a scalar tensor, got NoneType"),
        (lambda model, batch: model(batch).sum().detach(), ValueError, "does not depend on the parameters.*no_grad"),
        (lambda model, batch: torch.tensor(1.0), ValueError, "does not depend on the parameters"),
        (lambda model, batch: model(batch).sum().long(), ValueError, "does not depend on the parameters"),
    ],
)
@pytest.mark.parametrize("method", ["auto", "loop", "vmap"])
def test_nondifferentiable_loss_raises_and_the_model_is_restored(loss_fn, error, message, method):
    objective = egop.Objective(nn.Linear(3, 2), loss_fn, [torch.ones(4, 3)])
    before = cases.state_of(objective.module)
    with pytest.raises(error, match=message):
        cases.sample(objective, egop.Gaussian(), 3, method=method)
    assert cases.state_of(objective.module) == before


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.embedding(x))


@pytest.mark.parametrize("method", ["auto", "loop", "vmap"])
def test_sparse_gradient_raises_with_remedies(method):
    objective = egop.Objective(Sparse(), mean_square, [torch.tensor([1, 2])])
    before = cases.state_of(objective.module)
    with pytest.raises(
        TypeError, match=r"'embedding.weight' has a sparse gradient.*sparse=False.*leave the parameter out"
    ):
        cases.sample(objective, egop.Gaussian(), 3, method=method)
    assert cases.state_of(objective.module) == before


def test_sparse_embedding_outside_the_partition_is_allowed():
    objective = egop.Objective(Sparse(), mean_square, [torch.tensor([1, 2])])
    basis = cases.estimate(objective, partition={"head": ["head.*"]})
    assert list(basis) == ["head"]


# --- device and precision of batches ---


def test_batches_are_cast_for_a_half_precision_model():
    torch.manual_seed(0)
    batches = [{"x": torch.randn(8, 3, dtype=torch.float64), "label": torch.arange(8) % 2} for _ in range(2)]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["label"])

    objective = egop.Objective(nn.Linear(3, 2).bfloat16(), loss, batches)
    for method in ("loop", "vmap"):
        basis = egop.estimate(objective, samples=4, progress=False, sampling=method)
        assert basis["weight"].dense().isfinite().all()
    assert egop.find_lr(objective, torch.optim.AdamW, steps=4, progress=False).lr > 0
    assert batches[0]["x"].dtype == torch.float64


@pytest.mark.parametrize("change", [lambda model: model.double(), lambda model: model[0].bfloat16()])
def test_batches_are_not_cast_for_other_or_mixed_precision(change):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    change(model)
    batch = torch.ones(4, 3)
    assert egop.Objective(model, mean_square, [batch]).move_batches([batch])[0] is batch


def test_batches_are_moved_to_the_device_of_the_parameters():
    batch = [torch.ones(4, 3), torch.ones(4, dtype=torch.int64)]
    model = egop.Objective(nn.Linear(3, 2, device="meta"), mean_square, [batch])
    function = egop.Objective.from_function(
        lambda batch, x: (batch[0] * x).sum(), {"x": torch.ones(3, device="meta", dtype=torch.half)}, [batch]
    )
    for objective in (model, function):
        ((x, label),) = objective.move_batches(objective._batches)
        assert (x.device.type, x.dtype, label.device.type, label.dtype) == ("meta", torch.float32, "meta", torch.int64)


def test_batches_stay_for_a_model_on_several_devices():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))
    batch = torch.ones(4, 3)
    assert egop.Objective(model, mean_square, [batch]).move_batches([batch])[0] is batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_host_batches_for_a_gpu_model():
    model = cases.MLP.build().cuda()
    objective = egop.Objective(model, cases.cross_entropy, cases.MLP.batches())
    for method in ("loop", "vmap"):
        assert cases.estimate(objective, sampling=method)["0.weight"].dense().device.type == "cuda"
    assert egop.find_lr(objective, egop.EGOP, steps=4, progress=False).lr > 0


@pytest.mark.parametrize(
    "loss_fn",
    [nn.CrossEntropyLoss(), nn.functional.cross_entropy, lambda model: 0.0, lambda model, x, y: 0.0, "mse"],
    ids=["module", "function", "one argument", "three arguments", "text"],
)
def test_a_loss_function_that_cannot_be_called_with_model_and_batch_is_refused(loss_fn):
    with pytest.raises(TypeError, match=r"called as loss_fn\(model, batch\), which does not fit .* Write, for example"):
        egop.Objective(nn.Linear(2, 2), loss_fn, [torch.ones(2, 2)])


@pytest.mark.parametrize("loss_fn", [max, lambda *given: 0.0, lambda model, batch, scale=1.0: 0.0])
def test_other_loss_functions_are_accepted(loss_fn):
    assert egop.Objective(nn.Linear(2, 2), loss_fn, [torch.ones(2, 2)])


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("reparametrize", [
    nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 3),
], ids=["weight norm", "spectral norm", "pruned"])  # fmt: skip
def test_models_with_computed_weights_can_be_copied(reparametrize):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), reparametrize(nn.Linear(4, 2)))
    batch = torch.ones(5, 3)
    expected = model(batch)
    model.eval()
    objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [batch])
    copied, loss_fn = objective.trainable_copy()
    loss_fn(copied, batch).backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(copied(batch), expected)


@pytest.mark.parametrize("batches", [lambda: [torch.ones(8, 4)], None])
def test_batches_must_be_an_iterable_of_batches(batches):
    with pytest.raises(TypeError, match="batches must be a DataLoader, a list or another iterable of batches, got a"):
        egop.Objective(torch.nn.Linear(4, 2), lambda model, batch: model(batch).mean(), batches)
