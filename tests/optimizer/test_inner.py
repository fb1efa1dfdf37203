"""Which classes run inside: those that work coordinate by coordinate, and others where they are asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cases
import egop
from cases import MLP, OptimizerCase
from explicit import Explicit, Wrapped, basis_of, distance, logistic, train


def other(name):
    return getattr(pytest.importorskip("pytorch_optimizer"), name)


def wrapped(kind, structure=egop.Full(), **arguments):  # noqa: B008 - frozen
    model = MLP.build()
    return egop.ReparameterizedOptimizer(model, kind, basis_of(MLP, structure=structure), **arguments)


@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "Kron", "SCION", "AdaFactor"])
@pytest.mark.parametrize("structure", [egop.Full(), egop.Kronecker()], ids=str)
def test_matrix_methods_are_refused(name, structure):
    message = (
        rf"{name} does not work coordinate by coordinate: .* Use an optimizer that .* If {name} is meant for "
        r"coordinates that are matrices, set works_on_matrices = True on the class\."
    )
    with pytest.raises(TypeError, match=message):
        wrapped(other(name), structure)


def test_settings_of_a_group_count():
    named = list(MLP.build().named_parameters())
    galore = {"rank": 2, "update_proj_gap": 1, "scale": 1.0, "projection_type": "std"}
    with pytest.raises(TypeError, match="GaLore does not work coordinate by coordinate"):
        egop.ReparameterizedOptimizer([{"params": named[:2]}, {"params": named[2:], **galore}], other("GaLore"))
    optimizer = egop.ReparameterizedOptimizer(named[:2], other("GaLore"))
    with pytest.raises(TypeError, match="GaLore does not work coordinate by coordinate"):
        optimizer.add_param_group({"params": named[2:], **galore})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1


class Muon(torch.optim.Muon):
    works_on_matrices = True


def test_muon_runs_on_matrices():
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    basis = egop.estimate(
        egop.Objective(model, logistic, MLP.batches()), structure=egop.Kronecker(), samples=20, progress=False
    )
    optimizer = egop.ReparameterizedOptimizer(model, Muon, basis, lr=0.01)
    twin = copy.deepcopy(model)
    plain = torch.optim.Muon(twin.parameters(), lr=0.01)
    for one, by in ((model, optimizer), (twin, plain)):
        logistic(one, MLP.batches()[0]).backward()
        by.step()
    # Its steps follow rotations of rows and columns, up to the precision (bfloat16) of its iteration.
    assert distance(cases.parameters_of(model), cases.parameters_of(twin)) < 2e-3


class RowNormalized(torch.optim.SGD):
    """Meant for coordinates that are matrices."""

    works_on_matrices = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() > 1:
                    parameter.grad /= parameter.grad.norm(dim=-1, keepdim=True) + 1e-12
        return super().step(closure)


TELLING = [pytest.param(lambda: RowNormalized, id="declared"), pytest.param(lambda: other("LARS"), id="found")]


@pytest.mark.parametrize("kind", TELLING)
def test_one_that_tells_matrices_from_vectors_runs_where_coordinates_are_matrices(kind):
    for structure in (egop.Shared(), egop.Kronecker(), egop.Identity()):
        optimizer = wrapped(kind(), structure, lr=0.1)
        with pytest.raises(TypeError, match="treats matrices and vectors in different ways"):
            optimizer.rebase(basis_of(MLP), moments="reset")
        assert {block.change.kind for block in optimizer.blocks} == {type(structure).__name__}
    message = (
        rf"{kind().__name__} treats matrices and vectors in different ways, and the coordinates of block '0\.weight', "
        r"a weight of shape \(5, 6\), are a vector in the structure Full\. Use structure=egop\.Shared\(\)"
    )
    with pytest.raises(TypeError, match=message):
        wrapped(kind(), lr=0.1)


def test_a_matrix_method_in_a_copy_goes_on():
    optimizer = copy.deepcopy(wrapped(RowNormalized, egop.Shared(), lr=0.1))
    with pytest.raises(TypeError, match="treats matrices and vectors in different ways"):
        optimizer.rebase(basis_of(MLP), moments="reset")


def test_optimizers_with_other_weights_for_evaluation_are_refused():
    with pytest.raises(TypeError, match="ScheduleFreeAdamW trains and evaluates with different weights"):
        wrapped(other("ScheduleFreeAdamW"))


def test_optimizers_that_need_a_closure_are_refused():
    message = "SAM evaluates the loss several times within a step, or needs its value, which egop does not support"
    with pytest.raises(TypeError, match=message):
        wrapped(other("SAM"), base_optimizer=torch.optim.SGD, lr=0.1)


def test_a_class_of_another_kind_is_refused_in_words():
    with pytest.raises(TypeError, match=r"LOMO cannot be built from parameter groups and \['lr'\]: AttributeError: "):
        wrapped(other("LOMO"), lr=0.1)


@pytest.mark.parametrize("structure", [egop.Full(), egop.Kronecker()], ids=str)
def test_lookahead_around_egop_is_lookahead_on_explicit_coordinates(structure):
    """Slow weights are points, so it does not matter whether they are in coordinates or not."""
    lookahead, basis = other("Lookahead"), basis_of(MLP, structure=structure)
    found = []
    for kind in (Wrapped, Explicit):
        side = kind(MLP.build(), basis, OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01}))
        side.optimizer = lookahead(side.optimizer, k=3)
        found.append(train(side, MLP.batches(), 10))
    assert distance(*found) < 1e-10
