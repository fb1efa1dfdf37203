"""Online and WhenDrifted: the basis learnt from the training gradients as they come."""

from __future__ import annotations

import fnmatch
import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from egop.basis import (
    CHANGES,
    ONLINE,
    Layer,
    Partition,
    Reparameterization,
    StructureChoice,
    check_structure,
    make_plan,
    partition_parameters,
    plain_name,
)
from egop.numerics import identity
from egop.optimizer import Moments, Rebasable, Refresh, Refresher, check_decay, check_moments, check_positive
from egop.refresh.beginnings import Choose
from egop.refresh.grams import GramMatrices
from egop.refresh.methods import FROM_SCRATCH, ITERATION
from egop.refresh.schedules import InTurn, OnceDrifted
from egop.refresh.streaming import Streaming
from egop.runs import parse_bytes


@dataclass(frozen=True)
class Online(Refresh):
    """Keep the basis current from the training gradients themselves; nothing is sampled.

    Running means of the gradients' Gram matrices are updated every step. The basis is renewed by one step of orthogonal
    iteration (multiply by the Gram matrix, orthonormalise). Without a basis to start with, the first gradient
    gives one, by a full eigendecomposition; ``optimizer.renew_basis()`` does that on demand. Of Gram matrices wider
    than 2048 it gives the 256 strongest directions, and the iteration finds the others. A first step that takes long
    for that shows a progress bar.

    Layers that are unfrozen later, and those of groups that are added, get their basis from their first gradient. One
    that is frozen keeps its basis. If there is no weight to rotate, the first step warns of that.

    Args:
        every: how many steps lie between two renewals.
        decay: of the running means.
        structure: when the optimizer has no basis to start with: a structure (``Kronecker``, ``Shared`` or ``Full``), a
            mapping of name patterns to structures, or ``"auto"``, for each weight the richer of ``Kronecker`` and
            ``Shared`` that fits; embeddings, output heads and very wide layers are left, and
            ``optimizer.refresher.unrotated`` says why. A structure that is named is for all weights, these too:
            leave them out by name patterns.
        partition: which parameters form a block, likewise.
        memory: what all bases together may take, likewise.
        moments: what becomes of the inner optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
        spread: renew the blocks in turn, every block once in ``every`` steps, so that all steps take about as long;
            False renews all of them in one step, as SOAP does.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(every=5), lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.basis), optimizer.refresher.unrotated
        (['0.weight'], {'2.weight': 'the output head'})
    """

    every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"
    spread: bool = True

    def __post_init__(self) -> None:
        check_positive("every", self.every)
        check_decay(self.decay)
        check_moments(self.moments)
        check_structure(self.structure)

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        _check_renewable(self, optimizer)
        _warn_of_guesses(self, optimizer)
        schedule = InTurn(self.every, spread=self.spread)
        return Streaming(_choose(self), GramMatrices(self.decay), schedule, ITERATION, self.moments)


@dataclass(frozen=True)
class WhenDrifted(Refresh):
    """As :class:`Online`, but the basis is renewed only when it no longer diagonalises the gradients' Gram matrices.

    Args:
        tolerance: how large the part of a Gram matrix off the diagonal may be, relative to all of it (Frobenius norms).
        check_every: how many steps lie between two checks.
        decay: of the running means.
        structure: when the optimizer has no basis to start with, as in :class:`Online`.
        partition: likewise.
        memory: likewise.
        moments: what becomes of the inner optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> refresh = egop.WhenDrifted(0.2, check_every=20, structure=egop.Kronecker())
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    """

    tolerance: float = 0.1
    check_every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"

    def __post_init__(self) -> None:
        check_positive("check_every", self.check_every)
        check_decay(self.decay)
        check_moments(self.moments)
        check_structure(self.structure)
        if not 0 < self.tolerance < 1:
            raise ValueError(f"Invalid tolerance value: {self.tolerance}. Must be between 0 and 1.")

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        _check_renewable(self, optimizer)
        _warn_of_guesses(self, optimizer)
        schedule = OnceDrifted(self.check_every, self.tolerance)
        return Streaming(_choose(self), GramMatrices(self.decay), schedule, FROM_SCRATCH, self.moments)


def _choose(config: Online | WhenDrifted) -> Choose:
    return functools.partial(_identities, config=config)


def _identities(
    optimizer: Rebasable, names: Collection[str] | None, config: Online | WhenDrifted
) -> Reparameterization:
    """The original coordinates, in the structures that the basis is to have.

    Args:
        optimizer: whose parameters are meant, those that are trained.
        names: some of them; all by default.
        config: what is wanted.
    """
    everything = {
        plain_name(name): parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    named = {
        name: parameter
        for name, parameter in everything.items()
        if parameter.requires_grad and (names is None or name in names)
    }
    layers = {name: optimizer.layers[name] for name in named}
    partition = _partition_for(config.partition, list(everything), list(named))
    if not (partition if isinstance(partition, Mapping) else _weights(layers)):
        return Reparameterization([])
    blocks = partition_parameters(named, layers, partition)
    known = [*everything, *(config.partition if isinstance(config.partition, Mapping) else ())]
    structure = _structure_for(config.structure, known, [block.name for block in blocks])
    memory = parse_bytes(config.memory) - sum(block.change.nbytes for block in optimizer.blocks)
    plan = make_plan(blocks, layers, structure, max(0, memory), ONLINE)
    changes = []
    for block, structure in plan.chosen.items():
        shapes = structure.basis_shapes(block).items()
        changes.append(structure.change(block, {key: identity(shape, block.dtype) for key, shape in shapes}))
        if not changes[-1].is_renewable():
            raise ValueError(_not_renewable(config, changes[-1].kind))
    return Reparameterization(changes, unrotated=plan.unrotated)


def _weights(layers: Mapping[str, Layer]) -> list[str]:
    """Those of which a partition makes blocks."""
    return [name for name, layer in layers.items() if layer.role not in ("bias", "norm")]


def _partition_for(partition: Partition, everything: Sequence[str], these: Sequence[str]) -> Partition:
    """A partition by patterns without those that name what is frozen, or has a block; what names nothing is refused."""
    if not isinstance(partition, Mapping):
        return partition
    lists = {block: [each] if isinstance(each, str) else list(each) for block, each in partition.items()}
    meant = {block: [each for each in own if _is_for(each, everything, these)] for block, own in lists.items()}
    return {block: own for block, own in meant.items() if own or not lists[block]}


def _structure_for(structure: StructureChoice, everything: Sequence[str], these: Sequence[str]) -> StructureChoice:
    """The same for structures by patterns of block names."""
    if not isinstance(structure, Mapping):
        return structure
    layers = [name.rpartition(".")[0] for name in everything]
    return {key: each for key, each in structure.items() if _is_for(key, [*everything, *layers, "global"], these)}


def _is_for(pattern: str, everything: Sequence[str], these: Sequence[str]) -> bool:
    return bool(fnmatch.filter(these, pattern)) or not fnmatch.filter(everything, pattern)


def _check_renewable(config: Online | WhenDrifted, optimizer: Rebasable) -> None:
    kinds = sorted({block.change.kind for block in optimizer.blocks})
    if kinds and not any(block.change.is_renewable() for block in optimizer.blocks):
        raise ValueError(_not_renewable(config, ", ".join(kinds)))


def _warn_of_guesses(config: Online | WhenDrifted, optimizer: Rebasable) -> None:
    """Warn where weights will be chosen by what they are, and that is not known."""
    guessed = {name: layer for name, layer in optimizer.layers.items() if layer.guessed}
    if config.structure != "auto" or optimizer.blocks or not guessed:
        return
    rotated = [name for name, layer in guessed.items() if not layer.unrotated]
    alone = [f"{name} ({layer.unrotated})" for name, layer in guessed.items() if layer.unrotated]
    warnings.warn(
        f"egop.{type(config).__name__} chooses by what each weight is, and without its module that was guessed by name "
        f"and shape. Weights to rotate: {_listed(rotated)}. Left as they are: {_listed(alone)}. An embedding or an "
        "output head that is rotated slows training down. Give the optimizer the model itself, or model=model beside "
        "the parameters; or say what to rotate: structure={'name pattern': egop.Kronecker()}.",
        stacklevel=4,  # the line that makes the optimizer
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _not_renewable(config: Online | WhenDrifted, kinds: str) -> str:
    renewable = ", ".join(kind for kind, change in CHANGES.items() if change.is_renewable())
    return (
        f"egop.{type(config).__name__} renews bases of structure {renewable}, not {kinds}. "
        "Use egop.Every(...), which can renew every structure."
    )
