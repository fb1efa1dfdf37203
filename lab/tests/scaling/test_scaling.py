"""Predicted memory and collectives against those of real trainings, and the tables of lab/notes/scaling.md.

Run as a program, this file rewrites the tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import egop
from egop.basis import find_roles
from egop_lab import cli
from egop_lab.scaling.costs import (
    Memory,
    add_up,
    compare_methods,
    describe_adamw,
    describe_egop,
    describe_muon,
    describe_soap,
    plan_structure,
    split_model,
)
from egop_lab.scaling.models import build_model
from processes import run

SIZES = {"resnet50": 25_557_032, "gpt2": 124_337_664, "llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248}
STRUCTURES = {
    "Shared": egop.Shared(),
    "Kronecker": egop.Kronecker(),
    "Full": egop.Full(),
    "Auxiliary": egop.Auxiliary(rank=3),
    "Reduced": egop.Reduced(rank=3),
}
CASES = [(name, False) for name in STRUCTURES] + [(name, True) for name in ("Shared", "Kronecker", "Full")]


class Network(nn.Module):
    """Kernels, two layers of one shape, one with an odd number of rows, a norm, an embedding, a head."""

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


def make_plan(model, structure):
    parameters = dict(model.named_parameters())
    return plan_structure(parameters, find_roles(parameters, model), structure)


def make_optimizer(model, structure, online):
    chosen = {block.name: own for block, own in make_plan(model, structure).chosen.items()}
    if online:
        refresh = egop.Online(every=2, structure=chosen)
        return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    objective = egop.Objective(model, loss_fn, [(TOKENS, LABELS)])
    basis = egop.estimate(objective, partition="parameter", structure=chosen, progress=False)
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=1e-3)


def storages(holder, seen):
    """Map the addresses of all tensors that an object holds to their bytes; of a sharded tensor the local part."""
    if id(holder) in seen or isinstance(holder, egop.Spectrum):  # only for display
        return {}
    seen[id(holder)] = holder
    if isinstance(holder, torch.Tensor):
        memory = getattr(holder.detach(), "to_local", holder.detach)().untyped_storage()
        own = {} if holder.dim() == 0 else {memory.data_ptr(): memory.nbytes()}  # without step counters
        return own | storages(holder.grad, seen) if holder.is_leaf else own
    parts = ()
    if isinstance(holder, dict):
        parts = (*holder.keys(), *holder.values())
    elif isinstance(holder, (list, tuple, set)):
        parts = holder
    elif isinstance(holder, torch.optim.Optimizer) or type(holder).__module__.startswith("egop."):
        parts = (vars(holder),)
    return {place: size for part in parts for place, size in storages(part, seen).items()}


def count_bytes(model, optimizer):
    """Return the bytes of a model, its gradients and its optimizer."""
    return sum(storages([list(model.parameters()), optimizer], {}).values())


@pytest.mark.parametrize("name", SIZES)
def test_known_models_have_their_sizes_and_no_weights(name):
    model = build_model(name)
    assert sum(each.numel() for each in model.parameters()) == SIZES[name]
    assert {each.device.type for each in model.parameters()} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "online"), CASES)
def test_memory_of_a_basis_is_exact(name, online, dtype):
    torch.manual_seed(0)
    model = Network().to(dtype)
    plan = make_plan(model, STRUCTURES[name])
    parts = split_model(dict(model.named_parameters()), plan, online=online, on_cpu=True)
    optimizer = make_optimizer(model, STRUCTURES[name], online)
    train(model, optimizer)
    assert len(plan.chosen) == 4
    assert count_bytes(model, optimizer) == add_up(part.memory for part in parts).total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_egop_is_exact(dtype):
    torch.manual_seed(0)
    model = Network().to(dtype)
    optimizer = egop.EGOP(model, every=2)
    plan = optimizer.plan
    blocks = {block.name: block for block in plan.chosen}
    parts = [describe_egop(each, blocks.get(name)) for name, each in model.named_parameters()]
    train(model, optimizer)
    assert len(plan.chosen) == 4
    assert count_bytes(model, optimizer) == add_up(part.memory for part in parts).total


def test_memory_of_adamw_and_muon_is_exact():
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert count_bytes(model, optimizer) == add_up(describe_adamw(each).memory for each in model.parameters()).total
    parameters = {f"hidden.{name}": each for name, each in model.hidden.named_parameters()}
    layers = find_roles(dict(model.named_parameters()), model)
    matrices = nn.ParameterDict({str(i): each for i, each in enumerate(parameters.values()) if each.dim() == 2})
    optimizer = torch.optim.Muon(matrices.values())
    optimizer.step()
    said = add_up(describe_muon(each, layers[name]).memory for name, each in parameters.items() if each.dim() == 2)
    assert count_bytes(matrices, optimizer) == said.total


def test_memory_of_soap_is_exact():
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    model = Network()
    optimizer = pytorch_optimizer.SOAP(model.parameters(), precondition_frequency=2)
    train(model, optimizer, 5)
    assert count_bytes(model, optimizer) == add_up(describe_soap(each).memory for each in model.parameters()).total


def test_soap_does_not_rotate_sides_beyond_its_limit():
    wide, narrow = (describe_soap(torch.empty(rows, 8, device="meta")).memory for rows in (10_001, 10_000))
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
        parts = split_model(dict(model.named_parameters()), make_plan(model, STRUCTURES[structure]), online=online)
        assert parts[0].memory == expected
    (shared,) = [
        part
        for part in split_model(dict(model.named_parameters()), make_plan(model, egop.Shared()), online=True)
        if part.flops
    ]
    assert shared.flops == 4 * 6 * 4**2 + 2 * 6 * 4**2  # encode, decode, and the Gram matrix
    assert shared.sharded(4) == Memory(32, 32, 32, 64, 64, 64)  # two rows of six
    (block,) = egop.EGOP(model).plan.chosen
    own = describe_egop(model[0].weight, block)
    assert own.memory == Memory(96, 96, 0, 192, 64)  # a basis of the smaller side
    assert own.flops == 2 * 6 * 4**2 + 2 * 4**3 + 5 * (4 * 4**2 * 6 + 2 * 4**3)
    assert own.sharded(4) == Memory(32, 32, 0, 64, 64)  # two rows of six


def test_frozen_parameters_take_only_their_own_bytes():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    whole, rest = compare_methods(model), compare_methods(model[1:])
    model[0].requires_grad_(False)
    for trained, without, frozen in zip(whole.estimates, rest.estimates, compare_methods(model).estimates, strict=True):
        assert frozen.device.total == without.device.total + 4 * (48 + 6) <= trained.device.total


SEVERAL = [("FSDP2", *case) for case in [("AdamW", False), *CASES]]
SEVERAL += [("DDP", "AdamW", False), ("DDP", "Shared", True), ("DDP", "Kronecker", True)]
SEVERAL += [("FSDP2", "EGOP", True), ("DDP", "EGOP", True)]


def measure(rank, world):
    """Return the bytes that this process holds under FSDP2 or DDP, the predicted ones, and the collectives."""
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
            parts, basis = [describe_adamw(each) for each in parameters.values()], None
        elif name == "EGOP":
            blocks, basis = {block.name: block for block in egop.EGOP(model).plan.chosen}, None
            parts = [describe_egop(each, blocks.get(key)) for key, each in parameters.items()]
        else:
            plan = make_plan(model, STRUCTURES[name])
            parts = split_model(parameters, plan, online=online, on_cpu=True)
            basis = egop.Basis([_identity(*pair) for pair in plan.chosen.items()])
        said = add_up(part.sharded(world) if wrapper == "FSDP2" else part.memory for part in parts)
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
            train(model, optimizer, 3)  # so that it renews in the same steps as the others
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
        found[key] = {
            "held": count_bytes(model, optimizer),
            "said": said.total,
            "counts": counts,
            "each": each,
            "most": most,
        }
    return found


def _identity(block, structure):
    return structure.change(block, {key: torch.eye(*shape) for key, shape in structure.basis_shapes(block).items()})


@pytest.mark.slow
def test_memory_and_collectives_on_two_devices_are_as_predicted():
    first, second = run(measure, 2)
    for case, found in first.items():
        assert found["held"] == found["said"], case
        assert second[case]["held"] <= found["said"], case
        for step, count in enumerate(found["counts"], 1):
            renewing = step % 2 == 0
            assert found["each"] <= count <= (found["most"] if renewing else found["each"]), (case, step)
    assert first["FSDP2, Shared, fixed"]["counts"] == [0] * 4
    assert [count > 0 for count in first["FSDP2, Shared, online"]["counts"]] == [False, True] * 2
    assert first["FSDP2, EGOP, online"]["each"] == 2 * 4  # gradients and directions of four layers


@pytest.mark.parametrize("name", ["Shared", "Kronecker", "Full"])
def test_estimation_holds_twice_the_bytes_of_the_bases(name):
    model = Network()
    plan = make_plan(model, STRUCTURES[name])
    gradients = {each: torch.randn(600, *tensor.shape) for each, tensor in model.named_parameters()}
    accumulators = {block: structure.accumulator(block) for block, structure in plan.chosen.items()}
    for block, accumulator in accumulators.items():
        accumulator.add([gradients[each] for each in block.parameters])
    bases = sum(structure.cost(block).bytes for block, structure in plan.chosen.items())
    assert sum(storages(accumulators, {}).values()) == 2 * bases


DOCUMENT = Path(__file__).parents[3] / "lab" / "notes" / "scaling.md"


def run_command(*arguments):
    found = CliRunner().invoke(cli.app, ["scaling", *arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def find_tables(text):
    """Return the commands in a document and the output shown for each."""
    return re.findall(r"```\n\$ egop-lab scaling (.*)\n((?:.*\n)*?)```", text)


def test_tables_of_the_document_are_what_the_command_prints():
    found = find_tables(DOCUMENT.read_text(encoding="utf-8"))
    assert [call.split()[0] for call, _ in found] == list(SIZES)
    for call, shown in found:
        assert shown == run_command(*call.split()), f"Rewrite the tables: PYTHONPATH=tests python {__file__}"


def test_command_takes_a_factory(tmp_path, monkeypatch):
    source = "from torch import nn\ndef model(): return nn.Linear(8, 6)\ndef number(): return 3"
    (tmp_path / "some_factories.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert run_command("some_factories:model").startswith("54 parameters in 2 tensors; FSDP2 over 8 devices.")
    for target, words in [("some_factories:number", "must return a torch.nn.Module"), ("x", "Must be MODULE:FACTORY")]:
        found = CliRunner().invoke(cli.app, ["scaling", target])
        assert found.exit_code == 1
        assert words in found.stderr


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    for call, shown in find_tables(text):
        text = text.replace(f"scaling {call}\n{shown}```", f"scaling {call}\n{run_command(*call.split())}```")
    DOCUMENT.write_text(text, encoding="utf-8")
