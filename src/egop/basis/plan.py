"""The plan: which structure each block gets, what it costs, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
        return [
            BlockInfo.from_plan(block, structure, self.why.get(block.name, ""))
            for block, structure in self.chosen.items()
        ]

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
    if isinstance(structure, Structure):
        unrotated = {} if all_weights else _find_unrotated(blocks, roles, padded, (structure, *candidates))
        asked = {block: (structure, _FOR_ALL) for block in blocks if block.name not in unrotated}
        return _plan_as_asked(asked, unrotated, memory, padded)
    if isinstance(structure, Mapping):
        asked = {}
        for pattern, own in structure.items():
            names = match([pattern], [block.name for block in blocks], "block")
            for block in blocks:
                if block.name in names:
                    asked.setdefault(block, (own, f"matches '{pattern}'"))
        asked = {block: asked[block] for block in blocks if block in asked}
        unrotated = {block.name: "no pattern matches it" for block in blocks if block not in asked}
        return _plan_as_asked(asked, unrotated, memory, padded)
    return _plan_automatically(blocks, roles, memory, padded, candidates)


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


def _plan_as_asked(
    asked: Mapping[Block, tuple[Structure, str]], unrotated: dict[str, str], memory: int, padded: Collection[str]
) -> Plan:
    chosen: dict[Block, Structure] = {}
    why: dict[str, str] = {}
    for block, (structure, reason) in asked.items():
        pieces = _split_block(block, structure, padded)
        chosen |= pieces
        why |= _give_reasons(pieces, structure, reason)
    for block, structure in chosen.items():
        structure.check(block)
    _check_memory(chosen, memory)
    return Plan(chosen, why, unrotated)


def _split_block(block: Block, structure: Structure, padded: Collection[str]) -> dict[Block, Structure]:
    """Split a block into the blocks that a structure needs.

    An embedding with a padding row gets its own block with ``Shared()`` if the structure would mix its rows.
    """
    pieces: dict[Block, Structure] = {}
    for piece in [block] if structure.joint or len(block.shapes) == 1 else block.per_tensor():
        with_padding = [name for name in piece.parameters if name in padded]
        if not with_padding or structure.empty_change(piece).is_rowwise:
            pieces[piece] = structure
            continue
        rest, embeddings = piece.split_off(with_padding)
        pieces |= dict.fromkeys(rest, structure) | dict.fromkeys(embeddings, Shared())
    return pieces


def _give_reasons(pieces: Mapping[Block, Structure], structure: Structure, reason: str) -> dict[str, str]:
    return {piece.name: reason if own == structure else _COLUMNS_ONLY for piece, own in pieces.items()}


class _Option(NamedTuple):
    """A structure for a block, the blocks it is split into, and the bytes of their bases."""

    structure: Structure
    pieces: dict[Block, Structure]
    bytes: int


def _find_unrotated(
    blocks: Sequence[Block], roles: Mapping[str, Role], padded: Collection[str], candidates: Sequence[Structure]
) -> dict[str, str]:
    """Return why ``"auto"`` leaves blocks out regardless of memory: their role or their width."""
    unrotated: dict[str, str] = {}
    for block in blocks:
        reasons = [roles[name].skip_reason for name in block.parameters]
        if all(reasons):
            unrotated[block.name] = reasons[0]
        elif not any(_make_option(structure, block, padded) for structure in candidates):
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
    options: dict[Block, list[_Option]] = {}
    for block in blocks:
        if block.name not in unrotated:
            made = [_make_option(structure, block, padded) for structure in candidates]
            options[block] = _drop_full([option for option in made if option is not None])
    # Give as many blocks as possible their leanest option, then upgrade while there is memory.
    leanest_first = sorted(options, key=lambda block: options[block][-1].bytes)
    fitting = []
    for block in leanest_first:
        needed = options[block][-1].bytes
        if needed <= memory:
            fitting.append(block)
            memory -= needed
        else:
            unrotated[block.name] = f"needs at least {format_bytes(needed)}, and {format_bytes(memory)} are left"
    if leanest_first and not fitting:
        block = leanest_first[0]
        raise MemoryError(
            f"No basis fits into memory={format_bytes(memory)}: the smallest, of block '{block.name}', takes "
            f"{format_bytes(options[block][-1].bytes)}. Raise memory=."
        )
    why: dict[str, str] = {}
    chosen: dict[Block, Structure] = {}
    for block in fitting:
        richest, leanest = options[block][0], options[block][-1]
        best = next(option for option in options[block] if option.bytes <= memory + leanest.bytes)
        memory -= best.bytes - leanest.bytes
        chosen |= best.pieces
        why |= _give_reasons(best.pieces, best.structure, _explain_choice(best.structure, richest.structure))
    order = {name: index for index, name in enumerate(name for block in blocks for name in block.parameters)}
    chosen = dict(sorted(chosen.items(), key=lambda item: order[item[0].parameters[0]]))
    return Plan(chosen, why, unrotated)


def _drop_full(options: list[_Option]) -> list[_Option]:
    """Drop Full if the block has rows of more than one entry that can share a basis."""
    shared = [piece for option in options if isinstance(option.structure, Shared) for piece in option.pieces]
    if any(max(Shared().basis_shapes(piece)["basis"]) > 1 for piece in shared):
        return [option for option in options if not isinstance(option.structure, Full)]
    return options


def _make_option(structure: Structure, block: Block, padded: Collection[str]) -> _Option | None:
    """Return what a structure costs for a block, or None if it does not apply or exceeds a limit."""
    try:
        pieces = _split_block(block, structure, padded)
        for piece, own in pieces.items():
            own.check(piece)
    except ValueError:
        return None
    if isinstance(structure, Full):
        if block.size > FULL_LIMIT:
            return None
    elif any(_is_too_costly(own, piece) for piece, own in pieces.items()):
        return None
    return _Option(structure, pieces, sum(own.cost(piece).bytes for piece, own in pieces.items()))


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


def _check_memory(chosen: Mapping[Block, Structure], memory: int) -> None:
    costs = {block: structure.cost(block).bytes for block, structure in chosen.items()}
    if sum(costs.values()) <= memory:
        return
    block = max(costs, key=lambda candidate: costs[candidate])
    shapes = " and ".join(" x ".join(map(str, shape)) for shape in chosen[block].basis_shapes(block).values())
    problem = f"Block '{block.name}' needs a {shapes} basis ({format_bytes(costs[block])})"
    if costs[block] <= memory:
        problem = f"All bases together need {format_bytes(sum(costs.values()))}; the largest is: {problem}"
    advice = "Raise memory=, choose a smaller structure such as egop.Shared() or egop.Auxiliary(rank=...)"
    raise MemoryError(f"{problem}, more than memory={format_bytes(memory)}. {advice}, or leave the block out.")
