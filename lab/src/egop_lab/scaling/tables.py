"""Tables that compare what each method takes for one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

import egop
from egop.basis import find_roles
from egop_lab.formatting import format_bytes, format_count, format_table, pluralize
from egop_lab.scaling.parts import (
    Memory,
    Part,
    Traffic,
    add_up,
    describe_adamw,
    describe_egop,
    describe_frozen,
    describe_muon,
    describe_soap,
    plan_structure,
    split_model,
)

EVERY = egop.Online().every
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
class Estimate:
    """Memory, communication and matrix products of one method.

    Attributes:
        method: its name.
        rotated: the fraction of the parameters that get a basis.
        device: memory on one device; the same under DDP, where every device holds everything.
        fsdp2: memory on each device under FSDP2; None if the method does not run there.
        traffic: collectives under FSDP2. Under DDP there are none, since all devices have the same gradients.
        flops: floating-point operations of the basis products in one step, on one device and under DDP: online those of
            the Gram matrices too, but not the renewals. For Muon and EGOP those of the Newton-Schulz iteration too.
        fsdp2_flops: the same on each device under FSDP2.
    """

    method: str
    rotated: float
    device: Memory
    fsdp2: Memory | None
    traffic: Traffic | None
    flops: int
    fsdp2_flops: int | None


@dataclass(frozen=True)
class Report:
    """The estimates of several methods for one model.

    Attributes:
        parameters: the number of parameters.
        tensors: the number of tensors.
        ranks: the number of devices under FSDP2.
        tokens: tokens per device in a step, if known.
        estimates: one per method.
        notes: what could not be computed, in sentences.
    """

    parameters: int
    tensors: int
    ranks: int
    tokens: int | None
    estimates: list[Estimate]
    notes: list[str]

    @property
    def own_flops(self) -> int | None:
        """Operations of the model's forward and backward pass on one device: 6 per parameter and token."""
        return None if self.tokens is None else 6 * self.parameters * self.tokens

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
            f"gathers: all-gathers of the optimizer in each step under FSDP2; reduces: all-reduces every {EVERY} steps",
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
        return [
            *row,
            *("-" if flops is None else self._format_flops(flops) for flops in (cost.flops, cost.fsdp2_flops)),
        ]

    def _format_flops(self, flops: int) -> str:
        if not flops:
            return "0"
        return format_count(flops) if self.own_flops is None else f"{flops / self.own_flops:.1%}"


def compare_methods(
    model: nn.Module,
    structures: Sequence[egop.Structure] = STRUCTURES,
    *,
    ranks: int = 8,
    memory: int | None = None,
    tokens: int | None = None,
) -> Report:
    """Estimate AdamW, Muon, SOAP, EGOP, and AdamW in each of some structures for a model.

    Args:
        model: the model, on any device including meta.
        structures: each rotates the weights that ``"auto"`` would rotate with it, see :func:`plan_structure`.
        ranks: the number of devices.
        memory: limit for all bases together, in bytes; None for no limit.
        tokens: for a language model, tokens per device in a step.
    """
    tensors = dict(model.named_parameters())
    parameters = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    layers = find_roles(parameters, model)
    rest = [describe_frozen(tensor) for tensor in tensors.values() if not tensor.requires_grad]
    limit = sys.maxsize if memory is None else memory
    costs = [
        _estimate("AdamW", rest + [describe_adamw(tensor) for tensor in parameters.values()], ranks),
        _estimate("Muon", rest + [describe_muon(tensor, layers[name]) for name, tensor in parameters.items()], ranks),
        _estimate("SOAP", rest + [describe_soap(tensor) for tensor in parameters.values()], ranks, fsdp2=False),
    ]
    notes: list[str] = []
    blocks = {block.name: block for block in egop.EGOP(model).plan.chosen}
    parts = [describe_egop(tensor, blocks.get(name)) for name, tensor in parameters.items()]
    costs.append(_estimate("EGOP", rest + parts, ranks))
    for structure in structures:
        name = _name(structure)
        try:
            plan = plan_structure(parameters, layers, structure, limit)
        except MemoryError as error:
            notes.append(f"{name}: {error}")
            continue
        if not plan.chosen:
            notes.append(f"{name}: no weight is small enough for it, apart from embeddings and heads.")
            continue
        for online in (False, True) if structure.change_type.is_renewable() else (False,):
            parts = split_model(parameters, plan, online=online)
            costs.append(_estimate(f"{name}, {'online' if online else 'fixed'}", rest + parts, ranks))
    return Report(sum(tensor.numel() for tensor in tensors.values()), len(tensors), ranks, tokens, costs, notes)


def _estimate(method: str, parts: Sequence[Part], ranks: int, *, fsdp2: bool = True) -> Estimate:
    size, rotated = sum(part.size for part in parts), sum(part.size for part in parts if part.memory.bases)
    shares = [part.share(ranks) if part.way == "rows" else 1.0 for part in parts]
    return Estimate(
        method=method,
        rotated=rotated / size,
        device=add_up(part.memory for part in parts),
        fsdp2=add_up(part.sharded(ranks) for part in parts) if fsdp2 else None,
        traffic=_add_traffic(parts) if fsdp2 else None,
        flops=sum(part.flops for part in parts),
        fsdp2_flops=round(sum(part.flops * own for part, own in zip(parts, shares, strict=True))) if fsdp2 else None,
    )


def _add_traffic(parts: Sequence[Part]) -> Traffic:
    loads = [part.traffic() for part in parts]
    counts = {key: sum(getattr(load, key) for load in loads) for key in ("gathers", "gathered", "reduces", "reduced")}
    return Traffic(**counts, at_least=any(load.at_least for load in loads))


def _name(structure: egop.Structure) -> str:
    """Return ``Auxiliary(16)`` or ``Shared``."""
    rank = getattr(structure, "rank", None)
    return type(structure).__name__ if rank is None else f"{type(structure).__name__}({rank})"


def _format(size: int) -> str:
    return format_bytes(size) if size else "0"
