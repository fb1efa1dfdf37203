"""EGOP with other memory formats, wrappers and many groups; with hooks, modes, graphs and layers of others."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import egop
from egop.optim import rotated
from egop_runs import LAST, backward, make, network, train
from explicit import identical
from processes import run


def train_convolution(memory_format, optimizer_state=None, model_state=None, steps=range(12)):
    """Train a convolution whose weight is square as a matrix, with gradients that do not depend on its layout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 36, 3, bias=False), nn.Flatten(), nn.Linear(36, 2)).double()
    model.to(memory_format=memory_format)
    optimizer = egop.EGOP(model, lr=1e-2, every=3)
    if optimizer_state is not None:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    return model, optimizer


def test_the_basis_of_a_square_convolution_does_not_depend_on_the_memory_format():
    formats = torch.contiguous_format, torch.channels_last
    (one, first), (two, second) = map(train_convolution, formats)
    assert torch.allclose(one[0].weight, two[0].weight, rtol=0, atol=1e-12)
    bases = [optimizer.state[model[0].weight]["basis"] for model, optimizer in ((one, first), (two, second))]
    assert torch.allclose(*bases, rtol=0, atol=1e-12)
    resumed = [
        train_convolution(memory_format, first.state_dict(), one.state_dict(), range(12, 15))[0][0].weight
        for memory_format in formats
    ]
    assert torch.allclose(*resumed, rtol=0, atol=1e-12)


class Wrapper(nn.Module):
    """A module around another one, like a LightningModule."""

    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), Wrapper, nn.DataParallel])
def test_the_head_of_a_student_is_found_in_a_wrapped_model_too(wrap):
    model = nn.ModuleDict({
        "student": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        "teacher": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False),
    })  # fmt: skip
    (name,) = egop.EGOP(wrap(model)).plan.unrotated
    assert name.endswith("student.2.weight")


@pytest.mark.parametrize("count", [24, 40])
def test_many_groups_keep_their_stacks(count, monkeypatch):
    layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(count)])
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(8, 2)})
    groups = [{"params": list(part.parameters())} for part in (*layers, model["head"])]
    optimizer = egop.EGOP(groups, model=model, every=5)
    resets = []
    monkeypatch.setattr(type(optimizer._engine), "reset_graphs", lambda self: resets.append(self))
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert not resets


def test_a_renewal_is_repeated_if_the_basis_was_replaced():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 1)
    state = optimizer.state[model.up.weight]
    before = rotated._version(state)
    state["basis"] = state["basis"].clone()
    assert rotated._version(state) != before


def test_a_new_layer_in_a_new_group_does_not_inherit_the_state_of_the_old_one():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = egop.EGOP([{"params": model[0].parameters()}, {"params": model[2].parameters()}], model=model)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for outputs in (2, 5):
        step()
        old = weakref.ref(model[2].weight)
        for parameter in optimizer.param_groups.pop()["params"]:
            del optimizer.state[parameter]
        del parameter
        model[2] = nn.Linear(4, outputs)
        optimizer.add_param_group({"params": model[2].parameters()})
        assert old() is None
        step()
        assert float(optimizer.state[model[2].weight]["step"]) == 1


def test_a_weight_that_changed_its_shape_is_refused():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 2)
    before = {name: tensor.clone() for name, tensor in optimizer.state[model.up.weight].items()}
    model.up.weight.data = model.up.weight.data.mT.contiguous()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    with pytest.raises(ValueError, match=r"'up.weight' of shape \(12, 8\) was replaced by one of shape \(8, 12\)"):
        optimizer.step()
    assert identical(before, optimizer.state[model.up.weight])


def test_hooks_after_loading_have_the_last_word():
    model = network()
    optimizer = make(model)
    train(model, optimizer)
    saved = optimizer.state_dict()

    def replace_momenta(optimizer):
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    optimizer.register_load_state_dict_post_hook(replace_momenta)
    optimizer.load_state_dict(saved)
    assert not any(bool(state["exp_avg"].any()) for state in optimizer.state.values())


def test_a_state_dict_that_was_loaded_in_inference_mode_can_be_trained_with():
    model, other = network(), network()
    optimizer = make(model)
    train(model, optimizer)
    again = make(other)
    other.load_state_dict(model.state_dict())
    with torch.inference_mode():
        again.load_state_dict(optimizer.state_dict())
    assert identical(train(model, optimizer, LAST, 2 * LAST), train(other, again, LAST, 2 * LAST))


@pytest.mark.parametrize("rotate", [True, False])
def test_a_step_inside_a_cuda_graph_of_ones_own_is_refused(rotate, monkeypatch):
    model = network()
    optimizer = make(model, rotate=rotate)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"Call optimizer\.step\(\) outside the CUDA graph"):
        optimizer.step()
    assert not optimizer.state


def step_with_half_of_the_rows(rank, world):
    """Step a sharded model with a rate of zero at first; one process has no gradient of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = egop.EGOP(model, lr=0.0)
    for step in range(4):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            gradient[4:] = 0
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
    return [float(state["step"]) for state in optimizer.state.values()]


def test_processes_agree_on_what_an_empty_step_is():
    assert run(step_with_half_of_the_rows, 2) == [[4.0] * 3] * 2


def test_memory_can_be_estimated_with_fake_tensors_before_training():
    model = nn.Linear(6, 5, bias=False)
    with FakeTensorMode():
        fake = nn.Linear(6, 5, bias=False)
        fake.weight.grad = torch.ones_like(fake.weight)
        egop.optim.PolarAdam(fake.parameters()).step()
    model.weight.grad = torch.ones_like(model.weight)
    egop.optim.PolarAdam(model.parameters()).step()
    assert bool(model.weight.isfinite().all())
