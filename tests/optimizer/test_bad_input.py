"""What does not fit is refused with an error that says what and what to do; model and optimizer stay as they were."""

import copy
import re

import pytest
import torch
from torch import nn

import cases
import egop
from cases import DEEP, MLP, OptimizerCase
from egop.basis.partition import Block
from egop.basis.structures.full import FullChange
from explicit import Wrapped, basis_of, case_and_basis, distance, identical, train

ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})
AdamW = torch.optim.AdamW


def in_basis(basis):
    """Return a builder of an optimizer in a basis that may not fit the model."""
    return lambda model: egop.ReparameterizedOptimizer(model, AdamW, basis)


def of_class(kind, **hyperparameters):
    return lambda model: egop.ReparameterizedOptimizer(model, kind, **hyperparameters)


def over(params):
    """Return a builder of an optimizer over ``params(model)``."""
    return lambda model: egop.ReparameterizedOptimizer(params(model), AdamW)


def block(name="0.weight", shape=(5, 6), parameters=None):
    """Return the change of basis of one block, with an identity matrix as its basis."""
    members = parameters or {name: torch.zeros(shape, dtype=torch.float64)}
    size = sum(tensor.numel() for tensor in members.values())
    return FullChange(Block.from_tensors(name, members), {"basis": torch.eye(size, dtype=torch.float64)})


def split(model, at):
    named = list(model.named_parameters())
    return [{"params": named[:at]}, {"params": named[at:]}]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))


NAMES = r"Parameters must come with their names, got {}\. Pass the model itself instead of model\.parameters\(\)"
DOUBLED = r"The parameter name '{}' is given twice\. Names must be unique"

# What is done with a model, the type of the error, and what its message says.
REFUSED = {
    "unnamed parameters": (over(lambda m: m.parameters()), TypeError, NAMES.format("Parameter")),
    "unnamed in a group": (over(lambda m: [{"params": m.parameters()}]), TypeError, NAMES.format("Parameter")),
    "one tensor": (over(lambda m: m[0].weight), TypeError, NAMES.format("Parameter")),
    "a dict of tensors": (over(lambda m: dict(m.named_parameters())), TypeError, NAMES.format("dict")),
    "no parameters": (over(lambda m: []), ValueError, "empty parameter list"),
    "a group without params": (over(lambda m: [{"lr": 0.1}]), TypeError, r"dict with 'params', got \['lr'\]"),
    "a group and a tensor": (
        over(lambda m: [{"params": m[0].named_parameters()}, m[2].weight]),
        TypeError,
        "A parameter group must be a dict with 'params', got Parameter",
    ),
    "too few names": (
        over(lambda m: [{"params": list(m.parameters()), "param_names": ["a", "b"]}]),
        ValueError,
        "A group has 4 parameters, but 2 param_names",
    ),
    "not a tensor": (over(lambda m: [("weight", 3)]), TypeError, "optimizer can only optimize Tensors"),
    "a name twice": (over(lambda m: [("w", m[0].weight), ("w", m[2].weight)]), ValueError, DOUBLED.format("w")),
    "a name in two groups": (
        over(lambda m: [{"params": [("w", m[0].weight)]}, {"params": [("w", m[2].weight)]}]),
        ValueError,
        DOUBLED.format("w"),
    ),
    "a parameter in two groups": (
        over(lambda m: [{"params": [("v", m[0].weight)]}, {"params": [("w", m[0].weight)]}]),
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "a basis of complex parameters": (
        lambda m: egop.ReparameterizedOptimizer(Complex(), torch.optim.AdamW, egop.Basis([block("weight", (2, 2))])),
        TypeError,
        (
            r"Block 'weight' of the basis is for the parameter 'weight', which is complex \(torch\.complex64\)\. Only "
            "real parameters can be rotated"
        ),
    ),
    "a basis of another model": (
        in_basis(egop.Basis([block("encoder.weight")])),
        ValueError,
        (
            r"Block 'encoder\.weight' of the basis is for the parameter 'encoder\.weight', which the optimizer was not "
            r"given\. It has: 0\.weight, 0\.bias, 2\.weight, 2\.bias\. Was the basis estimated for another model\?"
        ),
    ),
    "a basis of another shape": (
        in_basis(egop.Basis([block("0.weight", (6, 5))])),
        ValueError,
        r"Block '0\.weight' of the basis is for a parameter '0\.weight' of shape \(6, 5\), .* has \(5, 6\)",
    ),
    "a basis that is a matrix": (
        in_basis(torch.eye(3)),
        TypeError,
        "basis must be an egop.Basis, .* got Tensor",
    ),
    "a basis that is a refresh": (
        in_basis(egop.Online()),
        TypeError,
        (
            r"basis must be an egop\.Basis, got the refresh Online\. Pass it as "
            r"refresh=egop\.Online\(\.\.\.\)\."
        ),
    ),
    "a basis that is a class": (in_basis(egop.Aligned), TypeError, r"Pass it as refresh=egop\.Aligned\("),
    "a basis that is a structure": (
        in_basis(egop.Shared()),
        TypeError,
        r"basis must be an egop\.Basis, as egop\.estimate\(objective\) returns, got Shared",
    ),
    "a block across groups": (
        lambda m: egop.ReparameterizedOptimizer(split(m, 2), AdamW, basis_of(MLP, partition="global")),
        ValueError,
        (
            r"Block 'global' crosses parameter groups \('0\.weight' in group 0, '2\.weight' in group 1\)\. Put its "
            "parameters into one group, or estimate the basis with a finer partition"
        ),
    ),
    "two blocks of one parameter": (
        lambda m: egop.ReparameterizedOptimizer(
            [{"params": m.named_parameters(), "basis": egop.Basis([block()])}],
            AdamW,
            egop.Basis([block("both", parameters={"0.weight": torch.zeros(5, 6), "0.bias": torch.zeros(5)})]),
        ),
        ValueError,
        r"Parameter '0\.weight' is in two blocks, 'both' and '0\.weight'",
    ),
    "an optimizer that is not a class": (
        lambda m: egop.ReparameterizedOptimizer(m, AdamW(m.parameters())),
        TypeError,
        r"optimizer_class must be a torch\.optim\.Optimizer class, got AdamW\. Pass the class and its arguments",
    ),
    "another class": (of_class(nn.Linear), TypeError, r"must be a torch\.optim\.Optimizer class, got Linear"),
    "a name of an optimizer": (of_class("AdamW"), TypeError, "Optimizer class, got str"),
    "LBFGS": (
        of_class(torch.optim.LBFGS),
        TypeError,
        (
            "LBFGS evaluates the loss several times within a step, or needs its value, which egop does not support. "
            "Use an optimizer that works coordinate by coordinate"
        ),
    ),
    "Muon": (
        of_class(torch.optim.Muon, lr=0.1),
        TypeError,
        (
            "Muon does not work coordinate by coordinate: the same numbers, arranged as another matrix, got other "
            "steps. The coordinates of a block may have another shape than the weight. Use "
            "an optimizer that works coordinate by coordinate, such as Adam, AdamW, Adagrad or RMSprop. If Muon is "
            "meant for coordinates that are matrices, set works_on_matrices = True on the class"
        ),
    ),
    # The inner optimizer's own words.
    "a bad learning rate": (of_class(AdamW, lr=-1.0), ValueError, r"Invalid learning rate: -1\.0"),
    "bad betas": (of_class(AdamW, betas=(2.0, 0.9)), ValueError, r"Invalid beta parameter at index 0: 2\.0"),
    "an unknown hyper-parameter": (of_class(AdamW, momentum=0.9), TypeError, "unexpected keyword argument 'momentum'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_constructor_refuses(what):
    attempt, error, message = REFUSED[what]
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(error, match=message):
        attempt(model)
    assert cases.state_of(model) == before


def group(model, **extra):
    return {"params": [("extra", model[2].weight)], **extra}


# What is added to an optimizer that has the first layer, whose weight is a block.
REFUSED_GROUPS = {
    "unnamed": (lambda m: {"params": [m[2].weight]}, TypeError, NAMES.format("Parameter")),
    "a taken name": (lambda m: {"params": [("0.weight", m[2].weight)]}, ValueError, DOUBLED.format(r"0\.weight")),
    "a compiled taken name": (
        lambda m: {"params": [("_orig_mod.0.weight", m[2].weight)]},
        ValueError,
        DOUBLED.format(r"_orig_mod\.0\.weight"),
    ),
    "a parameter it has": (
        lambda m: {"params": [("again", m[0].weight)]},
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "a basis of another parameter": (
        lambda m: group(m, basis=egop.Basis([block("0.weight")])),
        ValueError,
        r"for the parameter '0\.weight', which the optimizer was not given\. It has: extra",
    ),
    "a basis of another shape": (
        lambda m: group(m, basis=egop.Basis([block("extra", (4, 4))])),
        ValueError,
        r"of shape \(4, 4\), but the optimizer's has \(3, 5\)",
    ),
    "a block name that is taken": (
        lambda m: group(m, basis=egop.Basis([block("0.weight", parameters={"extra": torch.zeros(3, 5).double()})])),
        ValueError,
        r"Two blocks are named '0\.weight'\.",
    ),
    "a basis that is none": (
        lambda m: group(m, basis={}),
        TypeError,
        "basis must be an egop.Basis, .* got dict",
    ),
}


@pytest.mark.parametrize("what", REFUSED_GROUPS)
def test_add_param_group_refuses_and_training_goes_on(what):
    make, error, message = REFUSED_GROUPS[what]
    basis = egop.Basis([basis_of(MLP)["0.weight"]])
    groups = [{"names": ["0.weight", "0.bias"]}]
    side, straight = (Wrapped(MLP.build(), basis, ADAMW, groups) for _ in range(2))
    for each in (side, straight):
        train(each, MLP.batches(), 3)
    with pytest.raises(error, match=message):
        side.optimizer.add_param_group(make(side.model))
    assert len(side.optimizer.param_groups) == len(side.optimizer.inner.param_groups) == 1
    assert identical(*(train(each, MLP.batches(), 3) for each in (side, straight)))


def check_failing_step(prepare, error, message, layout="batched"):
    """Check that a failing step leaves no trace: training continues as it does without that step."""
    case, basis = case_and_basis(layout)
    side, straight = (Wrapped(case.build(), basis, ADAMW) for _ in range(2))
    for each in (side, straight):
        train(each, case.batches(), 3)
    before = side.weights()
    side.loss(case.batches()[0]).backward()
    undo = prepare(side)
    with pytest.raises(error, match=message):
        side.optimizer.step()
    undo()
    assert identical(side.weights(), before)
    # Neither its gradients nor what it did to coordinates come back.
    side.optimizer.zero_grad()
    side.optimizer.step()
    assert identical(side.weights(), before)
    assert distance(*(train(each, case.batches(), 3) for each in (side, straight))) < 1e-10


def test_a_sparse_gradient_in_a_block_is_refused():
    def prepare(side):
        weight = side.model[6].weight
        weight.grad = weight.grad.to_sparse()
        return lambda: None

    check_failing_step(
        prepare,
        TypeError,
        r"Parameter '6\.weight' has a sparse gradient, which cannot be rotated\. Use sparse=False in the embedding, or "
        "estimate the basis with a partition that leaves it out",
    )


def test_a_sparse_gradient_outside_every_block_is_the_inner_optimizers_to_refuse():
    def prepare(side):
        bias = side.model[6].bias
        bias.grad = bias.grad.to_sparse()
        return lambda: None

    check_failing_step(prepare, RuntimeError, "does not support sparse gradients")


def test_coordinates_of_an_inner_step_that_fails_half_done_are_not_used(monkeypatch):
    def prepare(side):
        inner, original = side.optimizer.inner, side.optimizer.inner.step
        moments = copy.deepcopy(inner.state_dict())

        def interrupted():
            original()
            raise KeyboardInterrupt("by the user")

        def undo():
            monkeypatch.undo()
            inner.load_state_dict(moments)

        monkeypatch.setattr(inner, "step", interrupted)
        return undo

    check_failing_step(prepare, KeyboardInterrupt, "by the user", layout="everything")


def test_a_parameter_frozen_within_a_block_that_trains_is_refused():
    basis = basis_of(DEEP, partition="global")
    side, straight = (Wrapped(DEEP.build(), basis, ADAMW) for _ in range(2))
    for each in (side, straight):
        train(each, DEEP.batches(), 2)
    before = side.weights()
    side.model[2].weight.requires_grad_(False)
    message = (
        "Parameter '2.weight' is frozen (requires_grad=False), but a step of its block 'global' would move it. "
        "Estimate the basis with the parameter frozen, or with a partition that has it in a block of its own."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        train(side, DEEP.batches(), 1)
    assert identical(side.weights(), before)
    side.model[2].weight.requires_grad_(True)
    assert identical(*(train(each, DEEP.batches(), 2) for each in (side, straight)))
