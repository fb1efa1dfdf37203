"""The plan: which structure each block gets, and why some get none."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from egop.basis.display import format_blocks
from egop.basis.partition import Block, match
from egop.basis.roles import Role
from egop.basis.structures import Full, Kronecker, Shared, Structure
from egop.formatting import format_bytes, pluralize

StructureChoice = Literal["auto"] | Structure | Mapping[str, Structure]

# The candidates of "auto", richest first: for a basis estimated from samples, and for one that follows training.
# Full is meant for vectors: for matrices Shared was as good, at a fraction of the time and memory.
ESTIMATE_CANDIDATES: tuple[Structure, ...] = (Full(), Shared())
ONLINE_CANDIDATES: tuple[Structure, ...] = (Kronecker(), Shared())

# "auto" builds no dense basis for more entries than this: the decomposition alone would take minutes.
FULL_LIMIT = 4096
# "auto" rotates no side wider than this. (The widest layers of ResNet-34 have 4608 inputs.)
WIDTH_LIMIT = 8192
# "auto" rotates nothing whose decomposition, n³ for a basis of width n, takes more work per entry of the weight than
# this. (In ResNet-34 it is at most 41 thousand; 10 rows of 3072 columns have nearly a million, 10 seconds on a CPU.)
WORK_LIMIT = 2**20

_TOO_WIDE = "too wide: a basis would take too long"


@dataclass(frozen=True, repr=False)
class Plan:
    """The structure of each block, and why other weights stay in original coordinates.

    Attributes:
        chosen: the structures, by block.
        unrotated: why the other weights are left in original coordinates, by block name.
    """

    chosen: dict[Block, Structure]
    unrotated: dict[str, str]

    def __str__(self) -> str:
        changes = [structure.empty_change(block) for block, structure in self.chosen.items()]
        return format_blocks(changes, {}, self.unrotated)

    def __repr__(self) -> str:
        return f"Plan({pluralize(len(self.chosen), 'block')}, {len(self.unrotated)} not rotated)"


def make_plan(
    blocks: Sequence[Block],
    roles: Mapping[str, Role],
    structure: StructureChoice,
    memory: int,
    candidates: Sequence[Structure] = ESTIMATE_CANDIDATES,
    *,
    all_weights: bool = True,
) -> Plan:
    """Choose the structure of each block.

    Args:
        blocks: the blocks.
        roles: the role of each parameter.
        structure: one structure for all blocks; a mapping of block-name patterns to structures (the first match counts,
            other blocks are left out); or ``"auto"``: for each block the richest candidate that fits, leaving
            embeddings, output heads and very wide weights in original coordinates. An embedding with a padding row
            gets ``Shared()``, which keeps its rows apart, instead of a structure that would mix them.
        memory: limit for all bases together, in bytes.
        candidates: what ``"auto"`` chooses from, richest first.
        all_weights: apply a single structure to all blocks; if False, only to those that ``"auto"`` would rotate.
    """
    check_structure(structure)
    padded = {name for name, role in roles.items() if role.has_padding_row}
    if structure == "auto":
        return _plan_automatically(blocks, roles, memory, padded, candidates)
    unrotated: dict[str, str] = {}
    if isinstance(structure, Mapping):
        patterns = {pattern: match([pattern], [block.name for block in blocks], "block") for pattern in structure}
        asked = {}
        for block in blocks:
            pattern = next((pattern for pattern, names in patterns.items() if block.name in names), None)
            if pattern is None:
                unrotated[block.name] = "no pattern matches it"
            else:
                asked[block] = structure[pattern]
    else:
        assert isinstance(structure, Structure)
        if not all_weights:
            _, unrotated = _measure(blocks, roles, padded, (structure, *candidates))
        asked = {block: structure for block in blocks if block.name not in unrotated}
    chosen: dict[Block, Structure] = {}
    for block, own in asked.items():
        chosen |= _split_block(block, own, padded)
    _check_choice(chosen, memory)
    return Plan(chosen, unrotated)


def check_structure(structure: object) -> None:
    """Raise TypeError unless given ``"auto"``, a structure, or a mapping of block-name patterns to structures."""
    if isinstance(structure, Mapping):
        for pattern, value in structure.items():
            if not isinstance(value, Structure):
                hint = call_hint(value, Structure)
                raise TypeError(f"Pattern '{pattern}' needs a structure such as egop.Full(), got {value!r}.{hint}")
    elif not isinstance(structure, Structure) and structure != "auto":
        raise TypeError(
            f"Invalid structure value: {structure!r}. Must be 'auto', a structure such as egop.Full(), or a mapping of "
            f"block-name patterns to structures.{call_hint(structure, Structure)}"
        )


def call_hint(given: object, kind: type) -> str:
    """Return a hint to call the class if a class was given instead of an instance, otherwise an empty string."""
    return f" Call it: egop.{given.__name__}()." if isinstance(given, type) and issubclass(given, kind) else ""


def _split_block(block: Block, structure: Structure, padded: Collection[str]) -> dict[Block, Structure]:
    """Split a block into its tensors if the structure takes one tensor at a time.

    An embedding with a padding row gets ``Shared()`` if the structure would mix its rows.
    """
    pieces: dict[Block, Structure] = {}
    for piece in [block] if structure.joint or len(block.shapes) == 1 else block.per_tensor():
        has_padding = any(name in padded for name in piece.parameters)
        pieces[piece] = Shared() if has_padding and not structure.empty_change(piece).is_rowwise else structure
    return pieces


def _plan_automatically(
    blocks: Sequence[Block],
    roles: Mapping[str, Role],
    memory: int,
    padded: Collection[str],
    candidates: Sequence[Structure],
) -> Plan:
    sizes, unrotated = _measure(blocks, roles, padded, candidates)
    # Give as many blocks as possible their leanest structure, then upgrade while there is memory.
    leanest = {block: list(options.values())[-1] for block, options in sizes.items()}
    fitting = []
    for block, needed in sorted(leanest.items(), key=lambda item: item[1]):
        if needed <= memory:
            fitting.append(block)
            memory -= needed
        elif fitting:
            unrotated[block.name] = f"needs at least {format_bytes(needed)}; {format_bytes(memory)} are left"
        else:
            raise MemoryError(
                f"No basis fits into memory={format_bytes(memory)}: the smallest, of block '{block.name}', takes "
                f"{format_bytes(needed)}. Raise memory=."
            )
    best = {}
    for block in fitting:
        memory += leanest[block]
        best[block] = next(structure for structure, size in sizes[block].items() if size <= memory)
        memory -= sizes[block][best[block]]
    chosen: dict[Block, Structure] = {}
    for block in blocks:
        chosen |= _split_block(block, best[block], padded) if block in best else {}
    return Plan(chosen, unrotated)


def _measure(
    blocks: Sequence[Block], roles: Mapping[str, Role], padded: Collection[str], candidates: Sequence[Structure]
) -> tuple[dict[Block, dict[Structure, int]], dict[str, str]]:
    """Return the bytes that each candidate takes for each block, and why other blocks are left out."""
    sizes: dict[Block, dict[Structure, int]] = {}
    unrotated: dict[str, str] = {}
    for block in blocks:
        reasons = [roles[name].skip_reason for name in block.parameters]
        if all(reasons):
            unrotated[block.name] = reasons[0]
        elif options := _measure_candidates(block, padded, candidates):
            sizes[block] = options
        else:
            unrotated[block.name] = _TOO_WIDE
    return sizes, unrotated


def _measure_candidates(block: Block, padded: Collection[str], candidates: Sequence[Structure]) -> dict[Structure, int]:
    """Return the bytes that each candidate takes for a block, without those that do not apply or exceed a limit."""
    sizes: dict[Structure, int] = {}
    for structure in candidates:
        pieces = _split_block(block, structure, padded)
        try:
            for piece, own in pieces.items():
                own.check(piece)
        except ValueError:
            continue
        is_full = isinstance(structure, Full)
        if block.size <= FULL_LIMIT if is_full else not any(_is_too_costly(own, each) for each, own in pieces.items()):
            sizes[structure] = sum(own.cost(piece).bytes for piece, own in pieces.items())
    if Shared() in sizes and any(max(Shared().basis_shapes(piece)["basis"]) > 1 for piece in block.per_tensor()):
        sizes.pop(Full(), None)  # rows of more than one entry can share a basis
    return sizes


def _is_too_costly(structure: Structure, block: Block) -> bool:
    shapes = structure.basis_shapes(block).values()
    work = sum(math.prod(shape) * shape[-1] for shape in shapes)
    return any(min(shape[-2:]) > WIDTH_LIMIT for shape in shapes) or work > WORK_LIMIT * block.size


def _check_choice(chosen: Mapping[Block, Structure], memory: int) -> None:
    """Raise ValueError if a structure does not fit its block, MemoryError if all bases together need too much."""
    for block, structure in chosen.items():
        structure.check(block)
    costs = {block: structure.cost(block).bytes for block, structure in chosen.items()}
    if sum(costs.values()) > memory:
        largest = max(costs, key=lambda block: costs[block])
        raise MemoryError(
            f"The bases need {format_bytes(sum(costs.values()))}, more than memory={format_bytes(memory)}. The "
            f"largest, of block '{largest.name}', takes {format_bytes(costs[largest])}. Raise memory=, choose a "
            "smaller structure such as egop.Shared() or egop.Auxiliary(rank=...), or leave the block out."
        )
