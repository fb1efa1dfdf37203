"""Which optimizers work coordinate by coordinate, found by trying them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import Optimizer

import cases
from egop.optimizer.trial import Trial, try_optimizer

TORCH = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]

# Of pytorch_optimizer: the class, settings of a group, arguments.
COORDINATE_WISE = [
    *((name, {}, {}) for name in ("ADOPT", "AdEMAMix", "AdaBelief", "AdaBound", "AdaMax", "AdaNorm", "AdaPNM")),
    *((name, {}, {}) for name in ("AdaShift", "AdamS", "Adan", "AggMo", "DAdaptAdam", "DiffGrad", "Grams", "Kate")),
    *((name, {}, {}) for name in ("LaProp", "Lamb", "Lion", "MADGRAD", "NovoGrad", "Prodigy", "QHAdam", "SignSGD")),
    *((name, {}, {}) for name in ("SGDW", "StableAdamW")),
    *((name, {}, {}) for name in ("Tiger", "Yogi")),
    ("Lion", {}, {"use_gc": False, "betas": [0.9, 0.99]}),  # a list cannot be remembered, but tried
    ("Ranger", {}, {"use_gc": False}),
    ("GaLore", {}, {}),  # without a rank it is AdamW
    ("Muon", {"use_muon": False}, {}),  # as this one
]
WHOLE = [
    *((name, {}, {}) for name in ("SOAP", "Shampoo", "ScalableShampoo", "Kron", "SCION", "AdaFactor", "CAME", "SM3")),
    *((name, {}, {}) for name in ("AdamP", "Adalite", "Conda", "Nero", "SPlus", "Alice", "SpectralSphere")),
    ("GaLore", {"rank": 2, "update_proj_gap": 1, "scale": 1.0, "projection_type": "std"}, {}),
    ("Ranger", {}, {"use_gc": True}),  # takes the mean of each row off
    ("Muon", {"use_muon": True}, {}),
    ("AdaMuon", {"use_muon": True}, {}),
]


def other(name):
    return getattr(pytest.importorskip("pytorch_optimizer"), name)


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_optimizers_work_coordinate_by_coordinate(name):
    assert try_optimizer(getattr(torch.optim, name), {}, {}) == Trial()


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS, ids=str)
def test_with_all_arguments_that_the_tests_use(optimizer):
    assert try_optimizer(optimizer.kind, {}, optimizer.arguments) == Trial()


@pytest.mark.parametrize(("name", "settings", "arguments"), COORDINATE_WISE, ids=str)
def test_others_that_do(name, settings, arguments):
    assert try_optimizer(other(name), settings, arguments) == Trial()


@pytest.mark.parametrize(("name", "settings", "arguments"), WHOLE, ids=str)
def test_matrix_methods_are_found_out(name, settings, arguments):
    assert try_optimizer(other(name), settings, arguments).reason


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_torchs_own_matrix_methods_are_found_out(name):
    found = try_optimizer(getattr(torch.optim, name), {}, {})
    assert found == Trial(reason="the same numbers, arranged as another matrix, got other steps")


def test_what_does_not_show_in_few_steps_shows_in_the_state():
    """ScalableShampoo starts to use its matrices after 25 steps."""
    found = try_optimizer(other("ScalableShampoo"), {}, {})
    assert found.reason == "it keeps 'pre_conditioner' (a PreConditioner) for a weight of shape (4, 3)"


@pytest.mark.parametrize("name", ["LARS", "MARS"])
def test_optimizers_that_leave_vectors_out_are_found_out(name):
    assert try_optimizer(other(name), {}, {}) == Trial(differs_on_vectors=True)


def test_optimizers_that_need_a_closure_are_found_out():
    assert try_optimizer(torch.optim.LBFGS, {}, {}) == Trial(needs_closure=True)
    assert try_optimizer(other("SAM"), {}, {"base_optimizer": torch.optim.SGD, "lr": 0.1}) == Trial(needs_closure=True)
    assert try_optimizer(other("AliG"), {}, {}) == Trial(needs_closure=True)


class Noisy(torch.optim.SGD):
    """Warns, and takes random numbers from everywhere."""

    made = 0

    def __init__(self, params, **arguments):
        super().__init__(params, lr=0.1, **arguments)
        Noisy.made += 1

    def step(self, closure=None):
        warnings.warn("so it is", stacklevel=1)
        torch.randn(3)
        return super().step(closure)


def test_a_trial_changes_nothing_and_says_nothing():
    before, used = cases.state_of(torch.nn.Module()), torch.cuda.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert try_optimizer(Noisy, {}, {"momentum": 0.5}) == Trial()
    assert cases.state_of(torch.nn.Module()) == before  # the global random states
    assert torch.cuda.is_initialized() == used


def test_nothing_is_compiled_for_a_trial():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    half = torch.compile(lambda tensor: tensor * 0.5, backend=backend)

    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(half(parameter))

    assert try_optimizer(Compiled, {}, {}) == Trial()
    assert compiled == []
    half(torch.ones(2))
    assert len(compiled) == 1


def test_a_trial_is_made_once_for_the_same_class_and_arguments():
    try_optimizer(Noisy, {}, {"momentum": 0.25})
    count = Noisy.made
    try_optimizer(Noisy, {}, {"momentum": 0.25})
    assert Noisy.made == count
    try_optimizer(Noisy, {}, {"momentum": 0.125})
    assert Noisy.made == count + 3


class Odd(Optimizer):
    def __init__(self, params, *, model):
        super().__init__(params, {})
        self.model = model


def test_where_a_trial_does_not_run_nothing_is_found():
    assert try_optimizer(Odd, {}, {}) == Trial()  # no model
    assert try_optimizer(Odd, {}, {"model": None}) == Trial()  # no step
    assert try_optimizer(torch.optim.SparseAdam, {}, {}) == Trial()  # no sparse gradients
    assert try_optimizer(torch.optim.SGD, {}, {"lr": -1.0}) == Trial()  # said by the constructor
