"""What a model would take, by shapes, against what it takes: all tensors that can be reached after some steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import egop
from egop.basis.roles import layers_of
from egop.diagnostics.scaling import Memory, parts_of, plan_of, report, shapes, total
from egop.diagnostics.scaling.parts import adamw, muon, soap
from egop.estimation.algorithm import Gathering
from processes import run

SIZES = {"resnet50": 25_557_032, "gpt2": 124_337_664, "llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248}
STRUCTURES = {
    "Shared": egop.Shared(),
    "Kronecker": egop.Kronecker(),
    "Full": egop.Full(),
    "Auxiliary": egop.Auxiliary(3),
    "Reduced": egop.Reduced(3),
    "auto": "auto",
}
CASES = [(name, False) for name in STRUCTURES] + [(name, True) for name in ("Shared", "Kronecker", "Full", "auto")]


class Network(nn.Module):
    """Kernels, two layers of one shape, one with rows that two devices cannot halve, a norm, an embedding, a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.kernels = nn.Conv1d(16, 12, 3, padding=1)
        self.hidden = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 7))
        self.head = nn.Linear(7, 3)

    def forward(self, tokens):
        seen = F.relu(self.kernels(self.embedding(tokens).mT).mean(-1))
        return self.head(F.relu(self.hidden(seen)))


TOKENS, LABELS = torch.arange(40).reshape(8, 5) % 11, torch.arange(8) % 3


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, (TOKENS, LABELS)).backward()
        optimizer.step()


def planned(model, structure, online):
    parameters = dict(model.named_parameters())
    return plan_of(parameters, layers_of(parameters, model), structure, online=online)


def reparameterized(model, structure, online, basis=None):
    told = {block.name: own for block, own in planned(model, structure, online).chosen.items()}
    refresh = egop.Online(every=2, structure=told) if online else None
    if basis is None and not online:
        objective = egop.Objective(model, loss_fn, [(TOKENS, LABELS)])
        basis = egop.estimate(objective, partition="parameter", structure=told, progress=False)
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, refresh=refresh, lr=1e-3)


def storages(holder, seen):
    """The memory of every tensor that an object consists of, by address; of a sharded one what is here."""
    if id(holder) in seen or isinstance(holder, egop.Spectrum):  # kept to be shown: a number for each direction
        return {}
    seen[id(holder)] = holder
    if isinstance(holder, torch.Tensor):
        memory = getattr(holder.detach(), "to_local", holder.detach)().untyped_storage()
        own = {} if holder.dim() == 0 else {memory.data_ptr(): memory.nbytes()}  # single numbers aside: counts of steps
        return own | storages(holder.grad, seen) if holder.is_leaf else own
    parts = ()
    if isinstance(holder, dict):
        parts = (*holder.keys(), *holder.values())
    elif isinstance(holder, (list, tuple, set)):
        parts = holder
    elif isinstance(holder, torch.optim.Optimizer) or type(holder).__module__.startswith("egop."):
        parts = (vars(holder),)
    return {place: size for part in parts for place, size in storages(part, seen).items()}


def held(model, optimizer):
    """The bytes of a model, its gradients and its optimizer."""
    return sum(storages([list(model.parameters()), optimizer], {}).values())


# One device.


@pytest.mark.parametrize("name", SIZES)
def test_the_built_in_models_have_their_sizes_and_no_weights(name):
    model = shapes.load_model(f"egop.diagnostics.scaling:{name}")
    assert sum(each.numel() for each in model.parameters()) == SIZES[name]
    assert {each.device.type for each in model.parameters()} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "online"), CASES)
def test_a_basis_takes_what_was_said_to_the_byte(name, online, dtype):
    torch.manual_seed(0)
    model = Network().to(dtype)
    plan = planned(model, STRUCTURES[name], online)
    predicted = total(
        part.memory for part in parts_of(dict(model.named_parameters()), plan, online=online, on_cpu=True)
    )
    optimizer = reparameterized(model, STRUCTURES[name], online)
    train(model, optimizer)
    assert len(plan.chosen) == 4
    assert held(model, optimizer) == predicted.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_egop_takes_what_was_said_to_the_byte(dtype):
    torch.manual_seed(0)
    model = Network().to(dtype)
    optimizer = egop.EGOP(model, every=2)
    plan = optimizer.plan
    parts = parts_of(dict(model.named_parameters()), plan, online=True, polar=True, on_cpu=True)
    train(model, optimizer)
    assert len(plan.chosen) == 4
    assert held(model, optimizer) == total(part.memory for part in parts).total


def test_adamw_and_muon_take_what_was_said_to_the_byte():
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert held(model, optimizer) == total(adamw(each).memory for each in model.parameters()).total
    parameters = {f"hidden.{name}": each for name, each in model.hidden.named_parameters()}
    layers = layers_of(dict(model.named_parameters()), model)
    matrices = nn.ParameterDict({str(i): each for i, each in enumerate(parameters.values()) if each.dim() == 2})
    optimizer = torch.optim.Muon(matrices.values())
    optimizer.step()
    said = total(muon(each, layers[name]).memory for name, each in parameters.items() if each.dim() == 2)
    assert held(matrices, optimizer) == said.total


def test_soap_takes_what_was_said_to_the_byte():
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    model = Network()
    optimizer = pytorch_optimizer.SOAP(model.parameters(), precondition_frequency=2)
    train(model, optimizer, 5)
    assert held(model, optimizer) == total(soap(each).memory for each in model.parameters()).total


def test_soap_leaves_what_is_wider_than_its_limit():
    wide, narrow = (soap(torch.empty(rows, 8, device="meta")).memory for rows in (10_001, 10_000))
    assert (wide.bases, narrow.bases) == (4 * 64, 4 * (64 + 10_000**2))


def test_the_numbers_of_one_weight_by_hand():
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False))
    for structure, online, expected in (
        ("Shared", False, Memory(96, 96, 96, 192, 64)),
        ("Shared", True, Memory(96, 96, 96, 192, 64, 64)),
        ("Kronecker", True, Memory(96, 96, 96, 192, 64 + 144, 64 + 144)),
        ("Full", False, Memory(96, 96, 96, 192, 4 * 24**2)),
        ("Auxiliary", False, Memory(96, 96, 96 + 12, 192 + 24, 4 * 24 * 3)),
        ("Reduced", False, Memory(96, 96, 12, 24, 4 * 24 * 3, rest=96)),
    ):
        parts = parts_of(dict(model.named_parameters()), planned(model, STRUCTURES[structure], online), online=online)
        assert parts[0].memory == expected
    (shared,) = [
        part
        for part in parts_of(dict(model.named_parameters()), planned(model, egop.Shared(), True), online=True)
        if part.flops
    ]
    assert shared.flops == 4 * 6 * 4**2 + 2 * 6 * 4**2  # there and back, and the Gram matrix
    assert shared.sharded(4) == Memory(32, 32, 32, 64, 64, 64)  # two rows of six
    (own,) = [
        part
        for part in parts_of(dict(model.named_parameters()), egop.EGOP(model).plan, online=True, polar=True)
        if part.flops
    ]
    assert own.memory == Memory(96, 96, 96, 192, 64, 64)  # of the smaller side
    assert own.flops == shared.flops + 5 * (4 * 4**2 * 6 + 2 * 4**3)
    assert own.sharded(4) == Memory(
        32, 32, 96, 192, 64, 64, gathered=128
    )  # a matrix as a whole, eight rows with those that pad


def test_frozen_parameters_take_their_own_bytes_only():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    whole, rest = report(model), report(model[1:])
    model[0].requires_grad_(False)
    for trained, without, frozen in zip(whole.estimates, rest.estimates, report(model).estimates, strict=True):
        assert frozen.device.total == without.device.total + 4 * (48 + 6) <= trained.device.total


# Several devices.


SEVERAL = [("FSDP2", *case) for case in [("AdamW", False), *CASES] if "auto" not in case]
SEVERAL += [("DDP", "AdamW", False), ("DDP", "Shared", True), ("DDP", "Kronecker", True)]
SEVERAL += [("FSDP2", "EGOP", True), ("DDP", "EGOP", True)]


def measured(rank, world):
    """What this process holds under FSDP2 or DDP, what was said, and the collectives of some steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for wrapper, name, online in SEVERAL:
        torch.manual_seed(0)
        model = Network()
        parameters = dict(model.named_parameters())
        if name == "AdamW":
            parts, basis = [adamw(each) for each in parameters.values()], None
        elif name == "EGOP":
            plan, basis = egop.EGOP(model).plan, None
            parts = parts_of(parameters, plan, online=True, polar=True, on_cpu=True)
        else:
            plan = planned(model, STRUCTURES[name], online)
            parts = parts_of(parameters, plan, online=online, on_cpu=True)
            basis = egop.Reparameterization([_identity(*pair) for pair in plan.chosen.items()])
        said = total(part.sharded(world) if wrapper == "FSDP2" else part.memory for part in parts)
        del parameters
        if wrapper == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        else:
            model = DistributedDataParallel(model)
        refresh = egop.Online(every=2, spread=False) if online else None
        optimizer = torch.optim.AdamW(model.parameters()) if name == "AdamW" else egop.EGOP(model, every=2)
        if basis is not None:
            optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, refresh=refresh)
            del basis
        if name == "EGOP":
            train(model, optimizer, 2)  # the first step makes its blocks, which the others are given
        counts = []
        for _ in range(4):
            optimizer.zero_grad()
            loss_fn(model, (TOKENS, LABELS)).backward()
            with CommDebugMode() as seen:
                optimizer.step()
            counts.append(seen.get_total_counts())
        traffic = [part.traffic() for part in parts]
        each = sum(own.gathers for own in traffic) if wrapper == "FSDP2" else 0
        most = each + sum(own.reduces for own in traffic) if wrapper == "FSDP2" else 0
        key = f"{wrapper}, {name}, {'online' if online else 'fixed'}"
        found[key] = {"held": held(model, optimizer), "said": said.total, "counts": counts, "each": each, "most": most}
    return found


def _identity(block, structure):
    return structure.change(block, {key: torch.eye(*shape) for key, shape in structure.basis_shapes(block).items()})


@pytest.mark.slow
def test_on_two_devices_each_holds_and_sends_what_was_said():
    first, second = run(measured, 2)
    for case, found in first.items():
        assert found["held"] == found["said"], case
        assert second[case]["held"] <= found["said"], case
        for step, count in enumerate(found["counts"], 1):
            renewing = step % 2 == 0
            assert found["each"] <= count <= (found["most"] if renewing else found["each"]), (case, step)
    assert first["FSDP2, Shared, fixed"]["counts"] == [0] * 4
    assert [count > 0 for count in first["FSDP2, Shared, online"]["counts"]] == [False, True] * 2
    assert first["FSDP2, EGOP, online"]["each"] == 2 * 4  # the weights of four layers, and their gradients


# Estimation.


@pytest.mark.parametrize("name", ["Shared", "Kronecker", "Full"])
def test_estimation_holds_twice_the_bytes_of_the_bases_in_double_precision(name):
    model = Network()
    plan = planned(model, STRUCTURES[name], online=False)
    gathered = Gathering(plan, stability=False)
    gathered.add({each: torch.randn(600, *tensor.shape) for each, tensor in model.named_parameters()})
    bases = sum(structure.cost(block).bytes for block, structure in plan.chosen.items())
    assert sum(storages(gathered, {}).values()) == 2 * bases
