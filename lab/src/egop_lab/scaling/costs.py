"""Memory, communication and products that each method needs for a model, from shapes and the structures' own costs.

Nothing is run or allocated.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

import egop
from egop.basis import Block, Plan, Role, Structure, find_roles, make_plan, partition_parameters
from egop_lab.formatting import format_bytes, format_count, format_table, pluralize

SOAP_LIMIT = 10_000  # pytorch_optimizer's max_precondition_dim: wider sides are not rotated
NEWTON_SCHULZ = 5  # iterations in a step of Muon and PolarAdam

STRUCTURES = (egop.Shared(), egop.Kronecker(), egop.Full(), egop.Auxiliary(rank=16), egop.Reduced(rank=16))

_HEADER = [
    "method",
    "rotated",
    "one, DDP",
    "FSDP2",
    "bases",
    "gathers",
    "bytes",
    "reduces",
    "bytes",
    "products",
    "FSDP2",
]


@dataclass(frozen=True)
class Memory:
    """Bytes that a device holds between two steps."""

    parameters: int = 0
    gradients: int = 0  # as after a backward pass
    coordinates: int = 0  # rotated parameters, which the inner optimizer steps
    moments: int = 0  # for AdamW two for each coordinate, or parameter outside every block
    bases: int = 0
    grams: int = 0  # running Gram matrices
    rest: int = 0  # the part of the parameters that a reduced basis leaves out
    copies: int = 0  # of the parameters in blocks, used to notice writes; on the CPU only
    gathered: int = 0  # whole parameters of blocks that FSDP2 shards, where a block needs them

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Traffic:
    """Collectives of the optimizer on one device, besides those that the model needs with any optimizer."""

    gathers: int = 0  # all-gathers in each step
    gathered: int = 0  # bytes of the gathered tensors
    reduces: int = 0  # further collectives in one round of renewals; fewer where neighbours are renewed together
    reduced: int = 0  # bytes of their tensors
    at_least: bool = False  # the all-gathers are lower bounds


T = TypeVar("T", Memory, Traffic)


def add_up(items: Iterable[T]) -> T:
    """Return the sum of several memories, or of the traffic of several parts."""
    first, *_ = items = list(items)
    names = [field.name for field in fields(first)]
    return type(first)(**{name: type(getattr(first, name))(sum(getattr(i, name) for i in items)) for name in names})


@dataclass(frozen=True)
class Part:
    """A block, or a tensor outside every block, and how FSDP2, which shards tensors by rows, steps it.

    ``"rows"``: each device steps its own rows. ``"gathered"``: the gradient is gathered for the step, all state stays
    sharded. ``"twice"``: so is the direction. ``"whole"``: parameters and gradients are gathered, and every device
    holds and steps all coordinates.
    """

    shapes: tuple[torch.Size, ...]
    memory: Memory
    flops: int = 0
    way: Literal["rows", "gathered", "whole", "twice"] = "rows"

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(math.prod(shape) for shape in self.shapes)

    def share(self, ranks: int) -> float:
        """Return the fraction of its entries on the first device, which has the most."""
        sizes = [math.ceil(shape[0] / ranks) * math.prod(shape[1:]) if shape else 1 for shape in self.shapes]
        return sum(sizes) / self.size if self.size else 0.0

    def sharded(self, ranks: int) -> Memory:
        """Return its memory on the first device under FSDP2. Every device holds all bases and Gram matrices."""
        held, share = self.memory, self.share(ranks)
        divided = ["parameters", "gradients"]
        if self.way == "whole":  # gathered from shards that are padded to the same size
            held = replace(held, gathered=round(held.parameters * share * ranks))
        else:
            divided += ["coordinates", "moments", "rest", "copies"]
        return replace(held, **{name: round(getattr(held, name) * share) for name in divided})

    def traffic(self) -> Traffic:
        """Return its collectives under FSDP2. If each device steps its own rows, only Gram matrices are reduced."""
        held = self.memory
        if self.way == "rows":
            return Traffic(reduces=int(held.grams > 0), reduced=held.grams)
        if self.way == "twice":  # the gradient and the direction; for a renewal the momentum, and both moments
            return Traffic(2, held.gradients + held.moments // 2, 3, 3 * held.moments // 2)
        if self.way == "gathered":
            return Traffic(len(self.shapes), held.gradients, at_least=True)
        return Traffic(2 * len(self.shapes), held.parameters + held.gradients)


def plan_structure(parameters: Mapping[str, Tensor], layers: Mapping[str, Role], structure: Structure) -> Plan:
    """Return the plan of ``"auto"`` with this structure as its only candidate.

    So embeddings, output heads and very wide weights are not rotated.
    """
    blocks = partition_parameters(parameters, layers, "parameter")
    return make_plan(blocks, layers, "auto", sys.maxsize, (structure,))


def split_model(parameters: Mapping[str, Tensor], plan: Plan, *, online: bool, on_cpu: bool = False) -> list[Part]:
    """Return the parts of a model that AdamW trains, with the blocks of a plan in rotated coordinates.

    The bases are fixed, or ``online``: they follow the gradients' Gram matrices.
    """
    blocks = [_describe_block(parameters, *chosen, online=online, on_cpu=on_cpu) for chosen in plan.chosen.items()]
    inside = {name for block in plan.chosen for name in block.parameters}
    return blocks + [describe_adamw(parameter) for name, parameter in parameters.items() if name not in inside]


def _describe_block(
    parameters: Mapping[str, Tensor], block: Block, structure: Structure, *, online: bool, on_cpu: bool
) -> Part:
    shapes, cost, item = structure.basis_shapes(block), structure.cost(block), block.dtype.itemsize
    change = structure.empty_change(block)
    nbytes = sum(parameters[name].nbytes for name in block.parameters)
    coordinates = item * sum(math.prod(shape) for shape in change.coordinate_shapes())
    memory = Memory(
        parameters=nbytes,
        gradients=nbytes,
        coordinates=coordinates,
        moments=2 * coordinates,
        bases=cost.bytes,
        grams=item * sum(math.prod(shape[:-1]) * shape[-2] for shape in shapes.values()) if online else 0,
        rest=0 if change.is_complete or not change.settings["keep_rest"] else item * block.size,
        copies=nbytes if on_cpu else 0,
    )
    by_rows = change.is_rowwise and block.has_outputs_first  # FSDP2 shards the first dimension
    flops = cost.flops + 2 * block.size * sum(shape[-2] for shape in shapes.values()) * online
    return Part(block.shapes, memory, flops, "rows" if by_rows else "whole")


def describe_adamw(parameter: Tensor) -> Part:
    """Describe a parameter under AdamW: two moments, unless it is frozen."""
    size = parameter.nbytes
    trained = Memory(parameters=size, gradients=size, moments=2 * size)
    return Part((parameter.shape,), trained if parameter.requires_grad else Memory(parameters=size))


def describe_egop(parameter: Tensor, block: Block | None) -> Part:
    """Describe a parameter under EGOP: two moments and a basis; others as under AdamW."""
    if block is None:
        return describe_adamw(parameter)
    structure, item = egop.Shared(side="smaller"), block.dtype.itemsize
    cost, (*stack, rows, columns) = structure.cost(block), structure.empty_change(block).coordinate_shapes()[0]
    memory = Memory(
        parameters=parameter.nbytes,
        gradients=parameter.nbytes,
        coordinates=item * block.size if parameter.itemsize < item else 0,  # the copy in single precision
        moments=2 * item * block.size,
        bases=cost.bytes,
    )
    # The gradient is rotated by one product; rotating back costs one of the smaller side.
    side = min(rows, columns)
    flops = math.prod(stack) * (_count_newton_schulz(rows, columns) + 2 * side * (rows * columns + side**2))
    return Part(block.shapes, memory, flops, "twice")


def describe_muon(parameter: Tensor, layer: Role) -> Part:
    """Describe a parameter under Muon: one moment; AdamW for embeddings, heads, norms and biases."""
    if layer.kind != "weight":
        return describe_adamw(parameter)
    size = parameter.nbytes
    flops = _count_newton_schulz(len(parameter), parameter.numel() // len(parameter))
    return Part((parameter.shape,), Memory(parameters=size, gradients=size, moments=size), flops, "gathered")


def _count_newton_schulz(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ * (4 * short**2 * long + 2 * short**3)


def describe_soap(parameter: Tensor) -> Part:
    """Describe a parameter under SOAP: a Gram matrix and an eigenbasis for every side within the limit, except vectors.

    A step has three projections (the gradient, its mean, the update back) and updates the Gram matrices.
    """
    sides = [side for side in parameter.shape if side <= SOAP_LIMIT] if parameter.dim() > 1 else []
    size, matrices = parameter.nbytes, sum(side**2 for side in sides) * parameter.itemsize
    memory = Memory(parameters=size, gradients=size, moments=2 * size, bases=matrices, grams=matrices)
    return Part((parameter.shape,), memory, flops=4 * 2 * parameter.numel() * sum(sides))


@dataclass(frozen=True)
class Estimate:
    """Memory, communication and matrix products of one method."""

    method: str
    rotated: float  # the fraction of the parameters that get a basis
    device: Memory  # on one device; the same under DDP, where every device holds everything
    fsdp2: Memory | None  # on each device under FSDP2; None if the method does not run there
    traffic: Traffic | None  # under FSDP2; under DDP there is none, since all devices have the same gradients
    # Operations in one step of basis products (online of Gram matrices too, but not of renewals) and Newton-Schulz
    # iterations, on one device and under FSDP2.
    flops: int
    fsdp2_flops: int | None


@dataclass(frozen=True)
class Report:
    """The estimates of several methods for one model."""

    parameters: int
    tensors: int
    ranks: int  # devices under FSDP2
    tokens: int | None  # per device in a step, if known
    estimates: list[Estimate]
    notes: list[str]  # what could not be computed, in sentences

    def __str__(self) -> str:
        """Return the table and its legend."""
        tensors, devices = pluralize(self.tensors, "tensor"), pluralize(self.ranks, "device")
        relative = "" if self.tokens is None else f", over 6 x parameters x {self.tokens:,} tokens on each device"
        lines = [
            f"{self.parameters:,} parameters in {tensors}; FSDP2 over {devices}.",
            "",
            format_table(_HEADER, [self._format_row(estimate) for estimate in self.estimates]),
            "",
            "one, DDP and FSDP2: bytes per parameter of the model that a device holds between two steps",
            "gathers: all-gathers of the optimizer in each step under FSDP2; reduces: collectives at a renewal",
            f"products: flops of basis products and Newton-Schulz iterations in a step{relative}",
            *self.notes,
        ]
        return "\n".join(lines)

    def _format_row(self, cost: Estimate) -> list[str]:
        row = [cost.method, f"{cost.rotated:.0%}", f"{cost.device.total / self.parameters:.2f}"]
        row += ["-" if cost.fsdp2 is None else f"{cost.fsdp2.total / self.parameters:.2f}", _format(cost.device.bases)]
        if (traffic := cost.traffic) is None:
            row += ["-"] * 4
        else:
            row += [f"{traffic.gathers}{'+' if traffic.at_least else ''}", _format(traffic.gathered)]
            row += [str(traffic.reduces), _format(traffic.reduced)]
        return row + ["-" if flops is None else self._format_flops(flops) for flops in (cost.flops, cost.fsdp2_flops)]

    def _format_flops(self, flops: int) -> str:
        if not flops:
            return "0"
        # A forward and backward pass of the model takes 6 operations per parameter and token.
        return format_count(flops) if self.tokens is None else f"{flops / (6 * self.parameters * self.tokens):.1%}"


def _format(size: int) -> str:
    return format_bytes(size) if size else "0"


def compare_methods(
    model: nn.Module,
    structures: Sequence[Structure] = STRUCTURES,
    *,
    ranks: int = 8,
    tokens: int | None = None,
) -> Report:
    """Estimate AdamW, Muon, SOAP, EGOP, and AdamW in each of some structures for a model.

    Args:
        model: the model, on any device including meta.
        structures: each rotates the weights that ``"auto"`` would rotate with it, see :func:`plan_structure`.
        ranks: the number of devices.
        tokens: for a language model, tokens per device in a step.
    """
    tensors = dict(model.named_parameters())
    parameters = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    layers = find_roles(parameters, model)
    frozen = [describe_adamw(tensor) for tensor in tensors.values() if not tensor.requires_grad]
    blocks = {block.name: block for block in egop.EGOP(model).plan.chosen}
    found = {
        "AdamW": [describe_adamw(tensor) for tensor in parameters.values()],
        "Muon": [describe_muon(tensor, layers[name]) for name, tensor in parameters.items()],
        "SOAP": [describe_soap(tensor) for tensor in parameters.values()],
        "EGOP": [describe_egop(tensor, blocks.get(name)) for name, tensor in parameters.items()],
    }
    notes: list[str] = []
    for structure in structures:
        rank = getattr(structure, "rank", None)
        name = type(structure).__name__ + ("" if rank is None else f"({rank})")
        plan = plan_structure(parameters, layers, structure)
        if not plan.chosen:
            notes.append(f"{name}: no weight is small enough for it, apart from embeddings and heads.")
            continue
        found[f"{name}, fixed"] = split_model(parameters, plan, online=False)
        if structure.change_type.is_renewable():
            found[f"{name}, online"] = split_model(parameters, plan, online=True)
    estimates = [_estimate(method, frozen + parts, ranks) for method, parts in found.items()]
    return Report(sum(tensor.numel() for tensor in tensors.values()), len(tensors), ranks, tokens, estimates, notes)


def _estimate(method: str, parts: Sequence[Part], ranks: int) -> Estimate:
    size, rotated = sum(part.size for part in parts), sum(part.size for part in parts if part.memory.bases)
    shared = sum(part.flops * (part.share(ranks) if part.way == "rows" else 1.0) for part in parts)
    runs = method != "SOAP"  # which has no form for FSDP2
    return Estimate(
        method=method,
        rotated=rotated / size,
        device=add_up(part.memory for part in parts),
        fsdp2=add_up(part.sharded(ranks) for part in parts) if runs else None,
        traffic=add_up(part.traffic() for part in parts) if runs else None,
        flops=sum(part.flops for part in parts),
        fsdp2_flops=round(shared) if runs else None,
    )
