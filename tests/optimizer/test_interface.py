"""What it is: a torch optimizer over the model's own parameters, which takes two basis products a block a step."""

import pytest
import torch

import cases
import egop
from cases import MLP, OptimizerCase
from egop.basis.structures.full import FullChange
from explicit import Wrapped, case_and_basis, identical, logistic, over_layouts_and_optimizers, train

ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})

CALLS = {"blocks": 2, "batched": 2, "global": 1, "everything": 1}  # of the batched, three layers are alike


@pytest.mark.parametrize("layout", CALLS)
def test_a_step_takes_two_products_a_block_and_one_call_for_blocks_of_one_shape(layout, monkeypatch):
    calls = {"encode": 0, "decode": 0}

    def counted(name, original):
        def call(self, values):
            calls[name] += 1
            return original(self, values)

        return call

    for name in calls:
        monkeypatch.setattr(FullChange, name, counted(name, getattr(FullChange, name)))
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, ADAMW)
    train(side, case.batches(), 1)  # which also compares coordinates and parameters
    for batch in case.batches():
        side.loss(batch).backward()
        calls.update(encode=0, decode=0)
        side.optimizer.step()
        assert calls == {"encode": CALLS[layout], "decode": CALLS[layout]}


def test_it_is_a_torch_optimizer_over_the_models_own_parameters():
    case, basis = case_and_basis("blocks")
    side = Wrapped(case.build(), basis, ADAMW)
    assert isinstance(side.optimizer, torch.optim.Optimizer)
    (group,) = side.optimizer.param_groups
    assert all(one is other for one, other in zip(group["params"], side.model.parameters(), strict=True))
    assert group["param_names"] == [name for name, _ in side.model.named_parameters()]
    assert side.optimizer.defaults == torch.optim.AdamW(side.model.parameters(), lr=0.01).defaults
    assert repr(side.optimizer).startswith("ReparameterizedOptimizer(AdamW, ")
    assert repr(side.optimizer).endswith(", lr=0.01)")


@over_layouts_and_optimizers
def test_each_parameter_has_the_state_of_its_coordinates(optimizer, layout):
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, optimizer)
    train(side, case.batches(), 3)
    assert list(side.optimizer.state) == list(side.model.parameters())
    assert type(side.optimizer.inner) is optimizer.kind
    for block in side.optimizer.blocks:
        entry = side.optimizer.state[block.originals[0]]
        assert torch.equal(entry["egop/coordinates/0"], block.coordinates[0])
        assert all(torch.equal(entry[f"egop/basis/{key}"], tensor) for key, tensor in block.change.tensors.items())
        for key, value in side.optimizer.inner.state[block.coordinates[0]].items():
            assert entry[key] is value


FIRST_ARGUMENTS = {
    "module": lambda model: model,
    "named-parameters": lambda model: model.named_parameters(),
    "list": lambda model: list(model.named_parameters()),
    "groups-of-tuples": lambda model: [{"params": list(model.named_parameters())}],
    "group-of-an-iterator": lambda model: [{"params": model.named_parameters()}],
    "group-with-names": lambda model: [
        {"params": list(model.parameters()), "param_names": [name for name, _ in model.named_parameters()]}
    ],
    "group-of-a-module": lambda model: [{"params": model}],
}


@pytest.mark.parametrize("form", FIRST_ARGUMENTS)
def test_parameters_come_in_every_form_that_has_names(form):
    case, basis = case_and_basis("blocks")
    side = Wrapped(case.build(), basis, ADAMW)
    expected = train(side, case.batches(), 4)
    model = MLP.build()
    side.model = model
    side.optimizer = egop.ReparameterizedOptimizer(FIRST_ARGUMENTS[form](model), torch.optim.AdamW, basis, lr=0.01)
    assert identical(train(side, case.batches(), 4), expected)


def test_without_a_basis_it_is_the_plain_optimizer():
    plain, ours = MLP.build(), MLP.build()
    optimizers = torch.optim.AdamW(plain.parameters()), egop.ReparameterizedOptimizer(ours, torch.optim.AdamW)
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        for batch in MLP.batches():
            optimizer.zero_grad()
            logistic(model, batch).backward()
            optimizer.step()
    assert identical(cases.parameters_of(plain), cases.parameters_of(ours))
    assert len(optimizers[1].basis) == 0


def test_the_basis_in_use_can_be_read_and_saved(tmp_path):
    case, basis = case_and_basis("batched")
    side = Wrapped(case.build(), basis, ADAMW)
    train(side, case.batches(), 2)
    side.optimizer.basis.save(tmp_path / "basis.safetensors")
    loaded = egop.Basis.load(tmp_path / "basis.safetensors")
    assert all(torch.equal(loaded[name].dense(), basis[name].dense()) for name in basis)
