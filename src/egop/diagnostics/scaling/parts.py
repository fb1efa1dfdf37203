"""The parts of a model, blocks in coordinates and tensors without: what each holds, and how it is stepped.

Nothing here runs anything: the numbers come from shapes and from the structures' own costs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from egop.basis import (
    ONLINE,
    UP_FRONT,
    Block,
    Layer,
    Plan,
    Structure,
    StructureChoice,
    make_plan,
    partition_parameters,
)

# How FSDP2, which divides tensors by rows, steps a part:
#   "rows"      each device steps the rows that it has;
#   "gathered"  the gradient is gathered for the step, all state stays divided;
#   "whole"     parameters and gradients are gathered, and every device keeps and steps all coordinates of the block.
Way = Literal["rows", "gathered", "whole"]

SOAP_LIMIT = 10_000  # pytorch_optimizer's max_precondition_dim: wider sides are left
NEWTON_SCHULZ = 5  # iterations in a step of Muon and of PolarAdam


@dataclass(frozen=True)
class Memory:
    """Bytes that a device holds between two steps.

    Attributes:
        parameters: the model's.
        gradients: theirs, as after a backward pass.
        coordinates: what is stepped in place of the parameters of a block.
        moments: the optimizer's; for AdamW two for each coordinate, or parameter outside every block.
        bases: changes of basis.
        grams: running Gram matrices.
        rest: what a reduced basis leaves out of its parameters.
        copies: of the parameters in blocks, by which writes are noticed; on the CPU only.
        gathered: whole parameters of blocks that FSDP2 has in pieces, where a block needs them.
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
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Traffic:
    """Collectives of the optimizer on one device, beside those that the model needs under every optimizer.

    Attributes:
        gathers: all-gathers in each step.
        gathered: bytes of the tensors that they give.
        reduces: all-reduces in one round of renewals; fewer where neighbours are renewed together.
        reduced: bytes of the tensors that they add up.
        at_least: whether ``gathers`` and ``gathered`` are lower bounds.
    """

    gathers: int = 0
    gathered: int = 0
    reduces: int = 0
    reduced: int = 0
    at_least: bool = False


@dataclass(frozen=True)
class Part:
    """A block, or a tensor outside every block: what it holds on one device, and how FSDP2 steps it."""

    shapes: tuple[torch.Size, ...]
    memory: Memory
    flops: int = 0
    way: Way = "rows"
    work: int = 0  # of its decomposition, in proportion

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(math.prod(shape) for shape in self.shapes)

    def share(self, ranks: int) -> float:
        """The part of its entries that the first of so many devices has; none has more."""
        sizes = [math.ceil(shape[0] / ranks) * math.prod(shape[1:]) if shape else 1 for shape in self.shapes]
        return sum(sizes) / self.size if self.size else 0.0

    def sharded(self, ranks: int) -> Memory:
        """What it holds on the first of so many devices under FSDP2. Bases and Gram matrices are on all of them."""
        held = self.memory
        share = self.share(ranks)
        divided = ["parameters", "gradients"]
        if self.way == "whole":  # gathered from pieces that are padded to the same size
            held = replace(held, gathered=round(held.parameters * share * ranks))
        else:
            divided += ["coordinates", "moments", "rest", "copies"]
        return replace(held, **{name: round(getattr(held, name) * share) for name in divided})

    def traffic(self) -> Traffic:
        """Its collectives under FSDP2. Rows that stay where they are have nothing but Gram matrices to add up."""
        held = self.memory
        if self.way == "rows":
            return Traffic(reduces=int(held.grams > 0), reduced=held.grams)
        if self.way == "gathered":
            return Traffic(len(self.shapes), held.gradients, at_least=True)
        return Traffic(2 * len(self.shapes), held.parameters + held.gradients)


def total(held: Iterable[Memory]) -> Memory:
    """What all parts hold together."""
    held = list(held)
    return Memory(**{field.name: sum(getattr(memory, field.name) for memory in held) for field in fields(Memory)})


def plan_of(
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, Layer],
    structure: StructureChoice,
    memory: int | None = None,
    *,
    online: bool,
) -> Plan:
    """The plan that ``"auto"`` makes when it has only this structure to choose from, or its own choice of them.

    So embeddings, output heads and what is too wide are left in original coordinates.
    """
    candidates = (structure,) if isinstance(structure, Structure) else ONLINE if online else UP_FRONT
    blocks = partition_parameters(parameters, layers, "parameter")
    return make_plan(blocks, layers, "auto", sys.maxsize if memory is None else memory, candidates)


def parts_of(
    parameters: Mapping[str, Tensor], plan: Plan, *, online: bool, polar: bool = False, on_cpu: bool = False
) -> list[Part]:
    """The parts of a model in AdamW, its blocks in the coordinates of a plan.

    Args:
        parameters: by name.
        plan: the structure of each block.
        online: whether the bases follow the gradients' Gram matrices.
        polar: whether blocks are stepped by ``PolarAdam``, as in ``EGOP``: two moments too, of whole matrices.
        on_cpu: whether it trains on the CPU.
    """
    inside = {name for block in plan.chosen for name in block.parameters}
    blocks = [
        _block(parameters, block, structure, online=online, polar=polar, on_cpu=on_cpu)
        for block, structure in plan.chosen.items()
    ]
    return blocks + [adamw(parameter) for name, parameter in parameters.items() if name not in inside]


def _block(
    parameters: Mapping[str, Tensor], block: Block, structure: Structure, *, online: bool, polar: bool, on_cpu: bool
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
        rest=0 if change.complete or not change.settings["keep_rest"] else item * block.size,
        copies=nbytes if on_cpu else 0,
    )
    by_rows = change.rowwise and block.has_outputs_first and not polar  # FSDP2 divides by the first dimension
    work = sum(math.prod(shape) * shape[-1] for shape in shapes.values())
    flops = cost.flops + 2 * block.size * sum(sides)
    if polar:
        flops += sum(math.prod(shape[:-2]) * _newton_schulz(*shape[-2:]) for shape in change.coordinate_shapes())
    return Part(block.shapes, memory, flops, "rows" if by_rows else "whole", work)


def frozen(parameter: Tensor) -> Part:
    """A parameter that is not trained."""
    return Part((parameter.shape,), Memory(parameters=parameter.nbytes))


def adamw(parameter: Tensor) -> Part:
    """Two moments, entry by entry."""
    size = parameter.nbytes
    return Part((parameter.shape,), Memory(parameters=size, gradients=size, moments=2 * size))


def muon(parameter: Tensor, layer: Layer) -> Part:
    """One moment, and an iteration on the whole matrix; AdamW for embeddings, heads, norms and biases."""
    if layer.role != "weight":
        return adamw(parameter)
    size = parameter.nbytes
    flops = _newton_schulz(len(parameter), parameter.numel() // len(parameter))
    return Part((parameter.shape,), Memory(parameters=size, gradients=size, moments=size), flops, "gathered")


def _newton_schulz(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ * (4 * short**2 * long + 2 * short**3)


def soap(parameter: Tensor) -> Part:
    """A Gram matrix and its eigenbasis for every dimension but the widest, of all tensors but vectors.

    A step has three projections (the gradient, its mean, the update back) and adds to the Gram matrices.
    """
    sides = [side for side in parameter.shape if side <= SOAP_LIMIT] if parameter.dim() > 1 else []
    size, matrices = parameter.nbytes, sum(side**2 for side in sides) * parameter.itemsize
    memory = Memory(parameters=size, gradients=size, moments=2 * size, bases=matrices, grams=matrices)
    return Part((parameter.shape,), memory, flops=4 * 2 * parameter.numel() * sum(sides))
