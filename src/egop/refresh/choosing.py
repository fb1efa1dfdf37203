"""Which parameters get a block that have none, and in which structure."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from egop.basis import (
    CHANGE_TYPES,
    ONLINE_CANDIDATES,
    Basis,
    Partition,
    Plan,
    Role,
    Structure,
    StructureChoice,
    make_plan,
    partition_parameters,
    strip_compile_prefix,
)
from egop.formatting import parse_bytes
from egop.numerics import identity
from egop.optimizer import Rebasable, level_of_user

_COMPLEX = "complex numbers"


@dataclass(frozen=True)
class Choice:
    """The choice of a refresh that makes blocks itself.

    Args:
        refresh: its name, for messages.
        structure: a structure, structures by name patterns, or ``"auto"``. One structure is for all weights; where
            another optimizer is there for what no block has, for those alone that ``"auto"`` would rotate.
        partition: which parameters form a block.
        memory: what all bases together may take.
        candidates: what ``"auto"`` chooses from, richest first.
    """

    refresh: str
    structure: StructureChoice
    partition: Partition
    memory: int | str
    candidates: Sequence[Structure] = ONLINE_CANDIDATES

    def __post_init__(self) -> None:
        parse_bytes(self.memory)  # what cannot be read is refused here, not in the first step

    def plan(self, optimizer: Rebasable, names: Collection[str] | None) -> Plan:
        """Which structure each weight is to have, and why.

        Args:
            optimizer: whose parameters are meant, those that are trained.
            names: some of them, beside the blocks that are there; all by default, as if there were none.
        """
        everything = {
            strip_compile_prefix(name): parameter
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        trained = {
            name: parameter
            for name, parameter in everything.items()
            if parameter.requires_grad and (names is None or name in names)
        }
        named = {name: parameter for name, parameter in trained.items() if not parameter.is_complex()}
        others = {name: optimizer.layers[name] for name in trained if name not in named}
        left = dict.fromkeys(_weights(others), _COMPLEX)
        layers = {name: optimizer.layers[name] for name in named}
        partition = _partition_for(self.partition, list(everything), list(named))
        if not (partition if isinstance(partition, Mapping) else _weights(layers)):
            return Plan({}, {}, left)
        blocks = partition_parameters(named, layers, partition)
        known = [*everything, *(self.partition if isinstance(self.partition, Mapping) else ())]
        structure = _structure_for(self.structure, known, [block.name for block in blocks])
        taken = 0 if names is None else sum(block.change.nbytes for block in optimizer.blocks)
        every = optimizer.outside is None
        memory = max(0, parse_bytes(self.memory) - taken)
        plan = make_plan(blocks, layers, structure, memory, self.candidates, all_weights=every)
        return Plan(plan.chosen, plan.why, plan.unrotated | left)

    def __call__(self, optimizer: Rebasable, names: Collection[str] | None) -> Basis:
        """The original coordinates, in the structures that the basis is to have; arguments as of :meth:`plan`."""
        plan = self.plan(optimizer, names)
        changes = []
        for block, structure in plan.chosen.items():
            shapes = structure.basis_shapes(block).items()
            changes.append(structure.change(block, {key: identity(shape, block.dtype) for key, shape in shapes}))
            if not changes[-1].is_renewable():
                raise ValueError(self._not_renewable(changes[-1].kind))
        return Basis(changes, unrotated=plan.unrotated)

    def check(self, optimizer: Rebasable) -> None:
        """Raise an error for bases that cannot be renewed; warn where weights are chosen by what was guessed."""
        kinds = sorted({block.change.kind for block in optimizer.blocks})
        if kinds and not any(block.change.is_renewable() for block in optimizer.blocks):
            raise ValueError(self._not_renewable(", ".join(kinds)))
        guessed = {name: layer for name, layer in optimizer.layers.items() if layer.is_guess}
        by_role = self.structure == "auto" or (isinstance(self.structure, Structure) and optimizer.outside is not None)
        if not by_role or optimizer.blocks or not guessed:
            return
        rotated = [name for name, layer in guessed.items() if not layer.skip_reason]
        alone = [f"{name} ({layer.skip_reason})" for name, layer in guessed.items() if layer.skip_reason]
        warnings.warn(
            f"egop.{self.refresh} chooses by what each weight is, and without its module that was guessed by name "
            f"and shape. Weights to rotate: {_listed(rotated)}. Left as they are: {_listed(alone)}. An embedding or an "
            "output head that is rotated slows training down. Give the optimizer the model itself, or model=model "
            "beside the parameters; or say what to rotate, in egop.Online(structure={'name pattern': egop.Shared()}).",
            stacklevel=level_of_user(),  # the line that makes the optimizer
        )

    def _not_renewable(self, kinds: str) -> str:
        renewable = ", ".join(kind for kind, change in CHANGE_TYPES.items() if change.is_renewable())
        return (
            f"egop.{self.refresh} renews bases of structure {renewable}, not {kinds}. "
            "Use egop.Every(...), which can renew every structure."
        )


def _weights(layers: Mapping[str, Role]) -> list[str]:
    """Those of which a partition makes blocks."""
    return [name for name, layer in layers.items() if layer.kind not in ("bias", "norm")]


def _partition_for(partition: Partition, everything: Sequence[str], these: Sequence[str]) -> Partition:
    """A partition by patterns without those that name what is frozen, or has a block; what names nothing is refused."""
    if not isinstance(partition, Mapping):
        return partition
    lists = {block: [names] if isinstance(names, str) else list(names) for block, names in partition.items()}
    meant = {block: [name for name in names if _is_for(name, everything, these)] for block, names in lists.items()}
    return {block: names for block, names in meant.items() if names or not lists[block]}


def _structure_for(structure: StructureChoice, everything: Sequence[str], these: Sequence[str]) -> StructureChoice:
    """The same for structures by patterns of block names."""
    if not isinstance(structure, Mapping):
        return structure
    layers = [name.rpartition(".")[0] for name in everything]
    return {key: value for key, value in structure.items() if _is_for(key, [*everything, *layers, "global"], these)}


def _is_for(pattern: str, everything: Sequence[str], these: Sequence[str]) -> bool:
    return bool(fnmatch.filter(these, pattern)) or not fnmatch.filter(everything, pattern)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"
