"""What each rotated block and each other tensor of a model takes, from shapes and the structures' own costs.

Nothing is run or allocated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

import egop
from egop.basis import Block, Plan, Role, Structure, make_plan, partition_parameters

# How FSDP2, which shards tensors by rows, steps a part:
#   "rows"      each device steps its own rows;
#   "gathered"  the gradient is gathered for the step, all state stays sharded;
#   "whole"     parameters and gradients are gathered, and every device holds and steps all coordinates of the block.
Way = Literal["rows", "gathered", "whole", "twice"]

SOAP_LIMIT = 10_000  # pytorch_optimizer's max_precondition_dim: wider sides are not rotated
NEWTON_SCHULZ = 5  # iterations in a step of Muon and PolarAdam


@dataclass(frozen=True)
class Memory:
    """Bytes that a device holds between two steps.

    Attributes:
        parameters: the model's parameters.
        gradients: their gradients, as after a backward pass.
        coordinates: rotated parameters, which the inner optimizer steps.
        moments: optimizer state; for AdamW two for each coordinate, or parameter outside every block.
        bases: changes of basis.
        grams: running Gram matrices.
        rest: the part of the parameters that a reduced basis leaves out.
        copies: copies of the parameters in blocks, used to notice writes; on the CPU only.
        gathered: whole parameters of blocks that FSDP2 shards, where a block needs them.
    """

    parameters: int = 0
    gradients: int = 0
    coordinates: int = 0
    moments: int = 0
    bases: int = 0
    grams: int = 0
    rest: int = 0
    copies: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Traffic:
    """Collectives of the optimizer on one device, besides those that the model needs with any optimizer.

    Attributes:
        gathers: all-gathers in each step.
        gathered: bytes of the gathered tensors.
        reduces: further collectives in one round of renewals; fewer where neighbours are renewed together.
        reduced: bytes of their tensors.
        at_least: whether ``gathers`` and ``gathered`` are lower bounds.
    """

    gathers: int = 0
    gathered: int = 0
    reduces: int = 0
    reduced: int = 0
    at_least: bool = False


@dataclass(frozen=True)
class Part:
    """A block, or a tensor outside every block."""

    shapes: tuple[torch.Size, ...]
    memory: Memory
    flops: int = 0
    way: Way = "rows"

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
        held = self.memory
        share = self.share(ranks)
        sharded = ["parameters", "gradients"]
        if self.way == "whole":  # gathered from shards that are padded to the same size
            held = replace(held, gathered=round(held.parameters * share * ranks))
        else:
            sharded += ["coordinates", "moments", "rest", "copies"]
        return replace(held, **{name: round(getattr(held, name) * share) for name in sharded})

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


def add_up(held: Iterable[Memory]) -> Memory:
    """Return the sum of several memories."""
    held = list(held)
    return Memory(**{field.name: sum(getattr(memory, field.name) for memory in held) for field in fields(Memory)})


def plan_structure(
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, Role],
    structure: Structure,
    memory: int = sys.maxsize,
) -> Plan:
    """Return the plan of ``"auto"`` with this structure as its only candidate.

    So embeddings, output heads and very wide weights are not rotated.
    """
    blocks = partition_parameters(parameters, layers, "parameter")
    return make_plan(blocks, layers, "auto", memory, (structure,))


def split_model(parameters: Mapping[str, Tensor], plan: Plan, *, online: bool, on_cpu: bool = False) -> list[Part]:
    """Return the parts of a model that AdamW trains, with the blocks of a plan in rotated coordinates.

    Args:
        parameters: the parameters by name.
        plan: the structure of each block.
        online: whether the bases follow the gradients' Gram matrices.
        on_cpu: whether it trains on the CPU.
    """
    inside = {name for block in plan.chosen for name in block.parameters}
    blocks = [
        _describe_block(parameters, block, structure, online=online, on_cpu=on_cpu)
        for block, structure in plan.chosen.items()
    ]
    return blocks + [describe_adamw(parameter) for name, parameter in parameters.items() if name not in inside]


def _describe_block(
    parameters: Mapping[str, Tensor], block: Block, structure: Structure, *, online: bool, on_cpu: bool
) -> Part:
    shapes, cost, item = structure.basis_shapes(block), structure.cost(block), block.dtype.itemsize
    change = structure.empty_change(block)
    nbytes = sum(parameters[name].nbytes for name in block.parameters)
    coordinates = item * sum(math.prod(shape) for shape in change.coordinate_shapes())
    sides = [shape[-2] for shape in shapes.values()] if online else []
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
    flops = cost.flops + 2 * block.size * sum(sides)
    return Part(block.shapes, memory, flops, "rows" if by_rows else "whole")


def describe_frozen(parameter: Tensor) -> Part:
    """Describe a parameter that is not trained."""
    return Part((parameter.shape,), Memory(parameters=parameter.nbytes))


def describe_adamw(parameter: Tensor) -> Part:
    """Describe a parameter under AdamW: two moments."""
    size = parameter.nbytes
    return Part((parameter.shape,), Memory(parameters=size, gradients=size, moments=2 * size))


def describe_egop(parameter: Tensor, block: Block | None, *, on_cpu: bool = False) -> Part:
    """Describe a parameter under EGOP: two moments and a basis with its copy for products; others as under AdamW."""
    if block is None:
        return describe_adamw(parameter)
    structure, item = egop.Shared(side="smaller"), block.dtype.itemsize
    cost, (*stack, rows, columns) = structure.cost(block), structure.empty_change(block).coordinate_shapes()[0]
    memory = Memory(
        parameters=parameter.nbytes,
        gradients=parameter.nbytes,
        coordinates=item * block.size if parameter.itemsize < item else 0,  # the copy in single precision
        moments=2 * item * block.size,
        bases=cost.bytes + (cost.bytes if on_cpu else cost.bytes // 2),  # on a GPU products are in bfloat16
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
