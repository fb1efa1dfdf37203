"""Blocks that a refresh creates itself: at the first step, and later for parameters that start training late."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from egop.basis import (
    ONLINE_CANDIDATES,
    Basis,
    ChangeOfBasis,
    Partition,
    Plan,
    Role,
    Structure,
    StructureChoice,
    make_plan,
    partition_parameters,
)
from egop.formatting import list_first, parse_bytes
from egop.numerics import identity_matrices
from egop.optimizer import Rebasable, Refresh, Refresher, Stack, find_user_level, named_parameters


class BlockCreatingRefresher(Refresher):
    """A refresher that creates blocks in original coordinates, to get their first basis from their first gradient.

    Parameters start training late if they are unfrozen, or if their group is added. The existing blocks, the roles and
    the settings determine which of them get a block, so a resumed run makes the same choice. Only :attr:`created` and
    :attr:`waiting` have to be saved.

    Args:
        optimizer: the optimizer.
        refresh: the refresh.
        structure: a structure, structures by name pattern, or ``"auto"``. A single structure applies to all weights; if
            another optimizer steps the parameters outside, only to those that ``"auto"`` would rotate.
        partition: which parameters form a block.
        memory: the limit for all bases together.
        candidates: the structures that ``"auto"`` chooses from, richest first.
    """

    def __init__(
        self,
        optimizer: Rebasable,
        refresh: Refresh,
        structure: StructureChoice,
        partition: Partition,
        memory: int | str,
        candidates: Sequence[Structure] = ONLINE_CANDIDATES,
    ) -> None:
        super().__init__()
        self.refresh = refresh
        self._structure, self._partition, self._candidates = structure, partition, candidates
        self._memory = parse_bytes(memory)
        self._unrotated: dict[str, str] = {}
        self.restart()
        self.check(optimizer, [block.change for block in optimizer.blocks])
        self._warn_of_guesses(optimizer)

    def restart(self, created: Iterable[str] = (), waiting: Iterable[str] = ()) -> None:
        """Start from a loaded state."""
        self.created = set(created)  # names of the blocks that were created here
        self.waiting = set(waiting)  # names of those that do not have their first basis yet
        self._decided: set[str] = set()  # parameters that have been considered already
        self._undecided: list[tuple[str, Tensor]] = []  # all other parameters outside every block
        self._listed_for: tuple[list[Stack], int] | None = None  # the stacks and number of groups it was made for

    @property
    def unrotated(self) -> dict[str, str]:
        """The weights that the refresh has left without a basis, each with the reason."""
        return self._unrotated

    def can_renew(self, change: ChangeOfBasis) -> bool:
        """Return True if the refresh can renew a basis of this structure."""
        return change.is_renewable()

    def check(self, optimizer: Rebasable, changes: Sequence[ChangeOfBasis]) -> None:
        """Raise ValueError if none of the bases can be renewed."""
        if changes and not any(map(self.can_renew, changes)):
            kinds = ", ".join(sorted({change.kind for change in changes}))
            raise ValueError(
                f"egop.{self._name} cannot renew bases of structure {kinds}. Use egop.Every(...), which can renew "
                "every structure."
            )

    def plan(self, optimizer: Rebasable) -> Plan | None:
        """Return what the first step chooses or has chosen; None if a user has given or replaced the blocks."""
        return self._choose(optimizer) if not optimizer.blocks or self.find_created(optimizer) else None

    def before_step(self, optimizer: Rebasable) -> None:
        """Install pending bases, and create blocks for parameters that have none."""
        self.wait_for_refresh(optimizer)
        if self.steps == 0:
            self.prepare(optimizer)
        self._create_late(optimizer)

    def prepare(self, optimizer: Rebasable) -> None:
        """Create the first blocks, if the optimizer has none."""
        if optimizer.blocks or self._decided or self.steps > 0:
            return
        basis = self._make_basis(optimizer)
        self._unrotated = dict(basis.unrotated)
        optimizer.rebase(basis, moments="reset")
        self.waiting = {block.name for block in optimizer.blocks}
        self._mark_decided(_trained_names(optimizer), self.waiting)
        if not basis:
            warnings.warn(_no_weight_message(optimizer, basis.unrotated, self._name), stacklevel=2)

    def find_created(self, optimizer: Rebasable) -> set[str]:
        """Return the names of the blocks created here; none if a user has given or replaced the blocks."""
        return self.created if self.created <= {block.name for block in optimizer.blocks} else set()

    def on_rebase(self, names: Collection[str], *, replaced: bool) -> None:
        """Stop waiting for blocks that a user has given a basis; if all were replaced, create no more blocks."""
        self.waiting = self.waiting - set(names)
        if replaced or self.steps == 0:
            self.created, self._decided, self._listed_for = set(), set(), None

    def __getstate__(self) -> dict[str, Any]:
        """Leave everything that refers to this optimizer's parameters out of copies."""
        return self.__dict__ | {"_undecided": [], "_listed_for": None}

    @property
    def _name(self) -> str:
        return type(self.refresh).__name__

    def _choose(self, optimizer: Rebasable, names: Collection[str] | None = None) -> Plan:
        """Choose structures for these parameters, next to the existing blocks; or for all, as if there were none."""
        everything = named_parameters(optimizer.param_groups)
        trained = {
            name: parameter
            for name, parameter in everything.items()
            if parameter.requires_grad and (names is None or name in names)
        }
        real = {name: parameter for name, parameter in trained.items() if not parameter.is_complex()}
        layers = {name: optimizer.layers[name] for name in real}
        others = {name: optimizer.layers[name] for name in trained if name not in real}
        unrotated = dict.fromkeys(_weights(others), "complex numbers")
        partition = _partition_for(self._partition, list(everything), list(real))
        if not (partition if isinstance(partition, Mapping) else _weights(layers)):
            return Plan({}, unrotated)
        blocks = partition_parameters(real, layers, partition)
        known = [*everything, *(self._partition if isinstance(self._partition, Mapping) else ())]
        structure = _structure_for(self._structure, known, [block.name for block in blocks])
        used = 0 if names is None else sum(block.change.nbytes for block in optimizer.blocks)
        memory = max(0, self._memory - used)
        all_weights = optimizer.outside is None
        plan = make_plan(blocks, layers, structure, memory, self._candidates, all_weights=all_weights)
        return Plan(plan.chosen, plan.unrotated | unrotated)

    def _make_basis(self, optimizer: Rebasable, names: Collection[str] | None = None) -> Basis:
        """Return the original coordinates in the chosen structures."""
        plan = self._choose(optimizer, names)
        changes = []
        for block, structure in plan.chosen.items():
            shapes = structure.basis_shapes(block).items()
            change = structure.change(block, {key: identity_matrices(shape, block.dtype) for key, shape in shapes})
            self.check(optimizer, [change])
            changes.append(change)
        return Basis(changes, unrotated=plan.unrotated)

    def _create_late(self, optimizer: Rebasable) -> None:
        """Create blocks for parameters that were frozen or missing when the others were created."""
        stacks, groups = optimizer.stacks, len(optimizer.param_groups)
        if self._listed_for is None or self._listed_for[0] is not stacks or self._listed_for[1] != groups:
            self._list_undecided(optimizer)
            self._listed_for = stacks, groups
        late = [name for name, parameter in self._undecided if parameter.requires_grad and parameter.grad is not None]
        if not late:
            return
        before = {block.name for block in optimizer.blocks}
        try:
            basis = self._make_basis(optimizer, late)
            self._unrotated = self._unrotated | basis.unrotated
            if basis:
                optimizer.add_blocks(basis)
        except (MemoryError, ValueError) as error:  # no reason to stop training
            warnings.warn(
                f"Parameters that are trained from now on ({', '.join(late)}) get no basis: {error}", stacklevel=2
            )
        new = {block.name for block in optimizer.blocks} - before
        self.waiting = self.waiting | new
        self._mark_decided(late, new)

    def _list_undecided(self, optimizer: Rebasable) -> None:
        self.created = self.find_created(optimizer)
        self._undecided = []
        if self.created or not optimizer.blocks:  # if a user has given or replaced the blocks, add no others
            inside = {id(original) for block in optimizer.blocks for original in block.originals}
            self._undecided = [
                (name, parameter)
                for name, parameter in named_parameters(optimizer.param_groups).items()
                if id(parameter) not in inside and name not in self._decided
            ]

    def _mark_decided(self, names: Iterable[str], blocks: Iterable[str]) -> None:
        # New sets, because a copy of this refresher may share the old ones.
        self.created, self._decided = self.created | set(blocks), self._decided | set(names)
        self._listed_for = None

    def _warn_of_guesses(self, optimizer: Rebasable) -> None:
        """Warn if weights will be chosen by roles that were guessed from names and shapes."""
        guessed = {name: layer for name, layer in optimizer.layers.items() if layer.is_guess}
        is_single = isinstance(self._structure, Structure) and optimizer.outside is not None
        if optimizer.blocks or not guessed or not (is_single or self._structure == "auto"):
            return
        rotated = [name for name, layer in guessed.items() if not layer.skip_reason]
        skipped = [f"{name} ({layer.skip_reason})" for name, layer in guessed.items() if layer.skip_reason]
        warnings.warn(
            f"egop.{self._name} chooses weights by their roles. Without the model, the roles were guessed from names "
            f"and shapes. Weights to rotate: {list_first(rotated)}. Skipped weights: {list_first(skipped)}. "
            "Rotating an embedding or an output head slows training down. Give the optimizer the model itself, or "
            "model=model next to the parameters; or name the weights: "
            "egop.Online(structure={'name pattern': egop.Shared()}).",
            stacklevel=find_user_level(),  # the line that creates the optimizer
        )


def _trained_names(optimizer: Rebasable) -> set[str]:
    return {name for name, parameter in named_parameters(optimizer.param_groups).items() if parameter.requires_grad}


def _weights(layers: Mapping[str, Role]) -> list[str]:
    """Return the names of the parameters that a partition puts into blocks."""
    return [name for name, layer in layers.items() if layer.kind not in ("bias", "norm")]


def _partition_for(partition: Partition, everything: Sequence[str], wanted: Sequence[str]) -> Partition:
    """Drop the patterns of a partition that only match parameters that are frozen or have a block."""
    if not isinstance(partition, Mapping):
        return partition
    patterns = {block: [names] if isinstance(names, str) else list(names) for block, names in partition.items()}
    kept = {block: [name for name in names if _applies(name, everything, wanted)] for block, names in patterns.items()}
    return {block: names for block, names in kept.items() if names or not patterns[block]}


def _structure_for(structure: StructureChoice, everything: Sequence[str], wanted: Sequence[str]) -> StructureChoice:
    """Drop the block-name patterns that match none of the wanted blocks but do match others."""
    if not isinstance(structure, Mapping):
        return structure
    layers = [name.rpartition(".")[0] for name in everything]
    return {key: value for key, value in structure.items() if _applies(key, [*everything, *layers, "global"], wanted)}


def _applies(pattern: str, everything: Sequence[str], wanted: Sequence[str]) -> bool:
    # Keep a pattern that matches nothing at all: it is a mistake, and the partition or the plan raises an error.
    return bool(fnmatch.filter(wanted, pattern)) or not fnmatch.filter(everything, pattern)


def _no_weight_message(optimizer: Rebasable, unrotated: Mapping[str, str], refresh: str) -> str:
    outside = optimizer.outside
    effect = "works like the inner one alone" if outside is None else f"leaves all parameters to {outside.__name__}"
    skipped = [f"'{name}' ({reason})" for name, reason in unrotated.items()]
    frozen = len(named_parameters(optimizer.param_groups)) - len(_trained_names(optimizer))
    text = f"{frozen} parameters are frozen; weights get a basis once they are unfrozen. " if frozen else ""
    return (
        f"egop.{refresh} found no weight to rotate, so for now the optimizer {effect}. Skipped weights: "
        f"{list_first(skipped)}. {text}Biases and norm layers are never rotated by default. To rotate more, name it: "
        "egop.Online(structure={'*': egop.Kronecker()}) for every weight, or with partition={'all': ['*']} and "
        "egop.Full() for everything."
    )
