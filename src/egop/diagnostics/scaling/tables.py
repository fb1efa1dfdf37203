"""What each method takes for a model, side by side."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from egop.basis import Auxiliary, Full, Kronecker, Reduced, Shared, Structure, StructureChoice, layers_of
from egop.diagnostics.scaling.parts import Memory, Part, Traffic, adamw, frozen, muon, parts_of, plan_of, soap, total
from egop.distributed import owners_of
from egop.recipes import EGOP
from egop.refresh import Online
from egop.runs import counted, format_bytes, format_count, format_table, parse_bytes

EVERY = Online().every
EGOP_MEMORY: str = inspect.signature(EGOP).parameters["memory"].default
STRUCTURES: tuple[Structure, ...] = (Shared(), Kronecker(), Full(), Auxiliary(16), Reduced(16))


@dataclass(frozen=True)
class Estimate:
    """What one method takes.

    Attributes:
        method: its name.
        rotated: the share of the parameters that get a basis.
        device: memory on one device; the same under DDP, where every device holds everything.
        fsdp2: memory on each device under FSDP2; none where the method has no such form.
        kept: bytes of bases that a device keeps of those estimated with ``shard_bases=True``, at most; none where the
            method estimates none.
        traffic: collectives under FSDP2. Under DDP there are none: gradients, and so bases, are alike everywhere.
        flops: of the basis products in one step, on one device and under DDP; online with those of the Gram matrices,
            but without the renewals. Of Muon, the Newton-Schulz iteration; of EGOP, with it.
        fsdp2_flops: the same on each device under FSDP2.
    """

    method: str
    rotated: float
    device: Memory
    fsdp2: Memory | None
    kept: int | None
    traffic: Traffic | None
    flops: int
    fsdp2_flops: int | None


@dataclass(frozen=True)
class Report:
    """What several methods take for one model.

    Attributes:
        parameters: how many there are.
        tensors: in how many tensors.
        ranks: how many devices share the work under FSDP2.
        tokens: how many each device sees in a step, if known.
        estimates: one a method.
        notes: what could not be had, in words.
    """

    parameters: int
    tensors: int
    ranks: int
    tokens: int | None
    estimates: list[Estimate]
    notes: list[str]

    @property
    def own_flops(self) -> int | None:
        """Of the model's forward and backward pass on one device: 6 for each parameter and token."""
        return None if self.tokens is None else 6 * self.parameters * self.tokens

    def __str__(self) -> str:
        """The table, and how to read it."""
        header = ["method", "rotated", "one, DDP", "FSDP2", "bases", "kept", "gathers", "bytes", "reduces", "bytes"]
        header += ["products", "FSDP2"]
        tensors = counted(self.tensors, "tensor")
        lines = [
            f"{self.parameters:,} parameters in {tensors}; FSDP2 over {counted(self.ranks, 'device')}.",
            "",
            format_table(header, [self._row(estimate) for estimate in self.estimates]),
            "",
            "one, DDP and FSDP2: bytes per parameter of the model that a device holds between two steps",
            f"bases: all of them; kept: what one of {self.ranks} keeps of them after shard_bases=True, at most",
            f"gathers: all-gathers of the optimizer in each step under FSDP2; reduces: all-reduces every {EVERY} steps",
            "products: flops of basis products and Newton-Schulz iterations in a step"
            + ("" if self.tokens is None else f", over 6 x parameters x {self.tokens:,} tokens on each device"),
            *self.notes,
        ]
        return "\n".join(lines)

    def _row(self, cost: Estimate) -> list[str]:
        traffic, divided = cost.traffic, cost.fsdp2
        row = [cost.method, f"{cost.rotated:.0%}", f"{cost.device.total / self.parameters:.2f}"]
        row += ["-" if divided is None else f"{divided.total / self.parameters:.2f}"]
        row += [_bytes(cost.device.bases), "-" if cost.kept is None else _bytes(cost.kept)]
        if traffic is None:
            row += ["-"] * 4
        else:
            row += [f"{traffic.gathers}{'+' if traffic.at_least else ''}", _bytes(traffic.gathered)]
            row += [str(traffic.reduces), _bytes(traffic.reduced)]
        return [*row, self._flops(cost.flops), "-" if cost.fsdp2_flops is None else self._flops(cost.fsdp2_flops)]

    def _flops(self, flops: int) -> str:
        if not flops:
            return "0"
        return format_count(flops).strip() if self.own_flops is None else f"{flops / self.own_flops:.1%}"


def report(
    model: nn.Module,
    structures: Sequence[StructureChoice] = STRUCTURES,
    *,
    ranks: int = 8,
    memory: int | None = None,
    tokens: int | None = None,
) -> Report:
    """What AdamW, Muon, SOAP, EGOP, and AdamW in each of some structures take for a model.

    Args:
        model: on any device, also on the meta device.
        structures: with each, every weight is rotated for which ``"auto"`` would take it, see :func:`plan_of`.
        ranks: how many devices share the work.
        memory: what all bases together may take, in bytes; no limit by default.
        tokens: how many a device sees in a step, for a language model.
    """
    for name, value in (("ranks", ranks), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"Invalid {name} value: {value}. Must be at least 1.")
    every = dict(model.named_parameters())
    if not any(tensor.numel() for tensor in every.values()):
        raise ValueError(f"The model has no parameters ({type(model).__name__}): there is nothing to plan.")
    parameters = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
    layers = layers_of(parameters, model)
    rest = [frozen(tensor) for tensor in every.values() if not tensor.requires_grad]
    costs = [
        _estimate("AdamW", rest + [adamw(tensor) for tensor in parameters.values()], ranks),
        _estimate("Muon", rest + [muon(tensor, layers[name]) for name, tensor in parameters.items()], ranks),
        _estimate("SOAP", rest + [soap(tensor) for tensor in parameters.values()], ranks, fsdp2=False, kept=False),
    ]
    notes: list[str] = []
    try:
        plan = EGOP(model, memory=sys.maxsize if memory is None else memory).plan
    except MemoryError as error:
        notes.append(f"EGOP: {error}")
    else:
        costs.append(_estimate("EGOP", rest + parts_of(parameters, plan, online=True, polar=True), ranks, kept=False))
        if memory is None and costs[-1].device.bases > parse_bytes(EGOP_MEMORY):
            notes.append(f"EGOP: more than the {EGOP_MEMORY} that its bases may take by default; give it memory=.")
    for structure in structures:
        for online in (False, True) if _is_renewable(structure) else (False,):
            method = f"{_name(structure)}, {'online' if online else 'fixed'}"
            try:
                plan = plan_of(parameters, layers, structure, memory, online=online)
            except MemoryError as error:
                notes.append(f"{_name(structure)}: {error}")
                continue
            if plan.chosen:
                costs.append(_estimate(method, rest + parts_of(parameters, plan, online=online), ranks))
            else:
                notes.append(f"{_name(structure)}: no weight is small enough for it, embeddings and heads aside.")
    return Report(
        sum(tensor.numel() for tensor in every.values()), len(every), ranks, tokens, costs, list(dict.fromkeys(notes))
    )


def _estimate(method: str, parts: Sequence[Part], ranks: int, *, fsdp2: bool = True, kept: bool = True) -> Estimate:
    size, rotated = sum(part.size for part in parts), sum(part.size for part in parts if part.memory.bases)
    shares = [part.share(ranks) if part.way == "rows" else 1.0 for part in parts]
    return Estimate(
        method=method,
        rotated=rotated / size,
        device=total(part.memory for part in parts),
        fsdp2=total(part.sharded(ranks) for part in parts) if fsdp2 else None,
        kept=_largest_share(parts, ranks) if kept else None,
        traffic=_traffic(parts) if fsdp2 else None,
        flops=sum(part.flops for part in parts),
        fsdp2_flops=round(sum(part.flops * own for part, own in zip(parts, shares, strict=True))) if fsdp2 else None,
    )


def _traffic(parts: Sequence[Part]) -> Traffic:
    loads = [part.traffic() for part in parts]
    counts = {key: sum(getattr(load, key) for load in loads) for key in ("gathers", "gathered", "reduces", "reduced")}
    return Traffic(**counts, at_least=any(load.at_least for load in loads))


def _largest_share(parts: Sequence[Part], ranks: int) -> int:
    """The bytes of the bases of whoever has most, when blocks are divided as for an estimation."""
    shares = [0] * ranks
    for part, owner in zip(parts, owners_of([part.work for part in parts], ranks), strict=True):
        shares[owner] += part.memory.bases
    return max(shares)


def _is_renewable(structure: StructureChoice) -> bool:
    return structure == "auto" or (isinstance(structure, Structure) and structure.change_type.is_renewable())


def _name(structure: StructureChoice) -> str:
    """``Auxiliary(16)``, ``Shared`` or ``auto``."""
    name = structure if isinstance(structure, str) else type(structure).__name__
    rank = getattr(structure, "rank", None)
    return name if rank is None else f"{name}({rank})"


def _bytes(size: int) -> str:
    return format_bytes(size) if size else "0"
