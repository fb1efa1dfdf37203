"""The plan: which structure each block gets, what it costs, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from egop.basis.display import BlockInfo, format_blocks
from egop.basis.partition import Block, match
from egop.basis.roles import Role
from egop.basis.structures import Full, Kronecker, Shared, Structure
from egop.basis.structures.views import matrix_shape
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

# The structure of each block and the reason for it.
_Choice = dict[Block, tuple[Structure, str]]

_FOR_ALL = "the structure for all weights"
_COLUMNS_ONLY = "columns only: its padding row must not mix with others"


@dataclass(frozen=True, repr=False)
class Plan:
    """The structure of each block, and why other weights stay in original coordinates.

    Attributes:
        chosen: the structures, by block.
        why: why each structure was chosen, by block name.
        unrotated: why the other weights are left in original coordinates, by block name.
    """

    chosen: dict[Block, Structure]
    why: dict[str, str]
    unrotated: dict[str, str]

    def block_info(self) -> list[BlockInfo]:
        """Return the rows of the table."""
        rows = []
        for block, structure in self.chosen.items():
            row = BlockInfo.from_change(structure.empty_change(block))
            rows.append(replace(row, structure=type(structure).__name__, why=self.why.get(block.name, "")))
        return rows

    def __str__(self) -> str:
        return format_blocks(self.block_info(), self.unrotated)

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
    unrotated: dict[str, str] = {}
    if isinstance(structure, Structure):
        if not all_weights:
            unrotated = _find_unrotated(blocks, roles, padded, (structure, *candidates))
        asked = {block: (structure, _FOR_ALL) for block in blocks if block.name not in unrotated}
    elif isinstance(structure, Mapping):
        patterns = {pattern: match([pattern], [block.name for block in blocks], "block") for pattern in structure}
        asked = {}
        for block in blocks:
            pattern = next((pattern for pattern, names in patterns.items() if block.name in names), None)
            if pattern is None:
                unrotated[block.name] = "no pattern matches it"
            else:
                asked[block] = structure[pattern], f"matches '{pattern}'"
    else:
        return _plan_automatically(blocks, roles, memory, padded, candidates)
    chosen: _Choice = {}
    for block, (own, reason) in asked.items():
        chosen |= _split_block(block, own, padded, reason)
    _check_choice(chosen, memory)
    return _build_plan(chosen, unrotated)


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


def _build_plan(chosen: _Choice, unrotated: dict[str, str]) -> Plan:
    structures = {block: structure for block, (structure, _) in chosen.items()}
    return Plan(structures, {block.name: reason for block, (_, reason) in chosen.items()}, unrotated)


def _split_block(block: Block, structure: Structure, padded: Collection[str], reason: str) -> _Choice:
    """Split a block into the blocks that a structure needs.

    An embedding with a padding row gets its own block with ``Shared()`` if the structure would mix its rows.
    """
    pieces: _Choice = {}
    for piece in [block] if structure.joint or len(block.shapes) == 1 else block.per_tensor():
        with_padding = [name for name in piece.parameters if name in padded]
        if not with_padding or structure.empty_change(piece).is_rowwise:
            pieces[piece] = structure, reason
            continue
        rest, embeddings = piece.split_off(with_padding)
        pieces |= dict.fromkeys(rest, (structure, reason)) | dict.fromkeys(embeddings, (Shared(), _COLUMNS_ONLY))
    return pieces


def _find_unrotated(
    blocks: Sequence[Block], roles: Mapping[str, Role], padded: Collection[str], candidates: Sequence[Structure]
) -> dict[str, str]:
    """Return why ``"auto"`` leaves blocks out regardless of memory: their role or their width."""
    unrotated: dict[str, str] = {}
    for block in blocks:
        reasons = [roles[name].skip_reason for name in block.parameters]
        if all(reasons):
            unrotated[block.name] = reasons[0]
        elif not _measure(block, padded, candidates):
            unrotated[block.name] = _explain_width(block)
    return unrotated


def _plan_automatically(
    blocks: Sequence[Block],
    roles: Mapping[str, Role],
    memory: int,
    padded: Collection[str],
    candidates: Sequence[Structure],
) -> Plan:
    unrotated = _find_unrotated(blocks, roles, padded, candidates)
    sizes = {block: _measure(block, padded, candidates) for block in blocks if block.name not in unrotated}
    # Give as many blocks as possible their leanest structure, then upgrade while there is memory.
    leanest = {block: list(sizes[block].values())[-1] for block in sizes}
    fitting = []
    for block, needed in sorted(leanest.items(), key=lambda item: item[1]):
        if needed <= memory:
            fitting.append(block)
            memory -= needed
        elif fitting:
            unrotated[block.name] = f"needs at least {format_bytes(needed)}, and {format_bytes(memory)} are left"
        else:
            raise MemoryError(
                f"No basis fits into memory={format_bytes(memory)}: the smallest, of block '{block.name}', takes "
                f"{format_bytes(needed)}. Raise memory=."
            )
    chosen: _Choice = {}
    for block in fitting:
        memory += leanest[block]
        richest, best = next(iter(sizes[block])), next(own for own, size in sizes[block].items() if size <= memory)
        memory -= sizes[block][best]
        chosen |= _split_block(block, best, padded, _explain_choice(best, richest))
    order = {name: index for index, name in enumerate(name for block in blocks for name in block.parameters)}
    return _build_plan(dict(sorted(chosen.items(), key=lambda item: order[item[0].parameters[0]])), unrotated)


def _measure(block: Block, padded: Collection[str], candidates: Sequence[Structure]) -> dict[Structure, int]:
    """Return the bytes that each candidate takes for a block, without those that do not apply or exceed a limit."""
    sizes: dict[Structure, int] = {}
    for structure in candidates:
        try:
            pieces = [(piece, own) for piece, (own, _) in _split_block(block, structure, padded, "").items()]
            for piece, own in pieces:
                own.check(piece)
        except ValueError:
            continue
        is_full = isinstance(structure, Full)
        if block.size <= FULL_LIMIT if is_full else not any(_is_too_costly(own, piece) for piece, own in pieces):
            sizes[structure] = sum(own.cost(piece).bytes for piece, own in pieces)
    if Shared() in sizes and any(max(Shared().basis_shapes(piece)["basis"]) > 1 for piece in block.per_tensor()):
        sizes.pop(Full(), None)  # rows of more than one entry can share a basis
    return sizes


def _is_too_costly(structure: Structure, block: Block) -> bool:
    shapes = structure.basis_shapes(block).values()
    work = sum(math.prod(shape) * shape[-1] for shape in shapes)
    return any(min(shape[-2:]) > WIDTH_LIMIT for shape in shapes) or work > WORK_LIMIT * block.size


def _explain_width(block: Block) -> str:
    sides = [side for part in block.per_tensor() if len(part.shapes[0]) > 1 for side in matrix_shape(part)]
    if sides and max(sides) <= WIDTH_LIMIT:
        return f"more than {FULL_LIMIT} entries, and too wide for so few of them: a basis would take too long"
    return f"more than {FULL_LIMIT} entries, and wider than {WIDTH_LIMIT}"


def _explain_choice(structure: Structure, richest: Structure) -> str:
    if isinstance(structure, Full):
        return f"no rows to share a basis; at most {FULL_LIMIT} entries"
    if structure != richest:
        return "the richest that fits the memory"
    return "rows share a basis" if isinstance(structure, Shared) else "the richest that applies"


def _check_choice(chosen: _Choice, memory: int) -> None:
    """Raise ValueError if a structure does not fit its block, MemoryError if all bases together need too much."""
    for block, (structure, _) in chosen.items():
        structure.check(block)
    costs = {block: structure.cost(block).bytes for block, (structure, _) in chosen.items()}
    if sum(costs.values()) <= memory:
        return
    block = max(costs, key=lambda candidate: costs[candidate])
    shapes = " and ".join(" x ".join(map(str, shape)) for shape in chosen[block][0].basis_shapes(block).values())
    problem = f"Block '{block.name}' needs a {shapes} basis ({format_bytes(costs[block])})"
    if costs[block] <= memory:
        problem = f"All bases together need {format_bytes(sum(costs.values()))}; the largest is: {problem}"
    advice = "Raise memory=, choose a smaller structure such as egop.Shared() or egop.Auxiliary(rank=...)"
    raise MemoryError(f"{problem}, more than memory={format_bytes(memory)}. {advice}, or leave the block out.")
