"""Which structure each block gets, what it costs, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from egop.basis import showing
from egop.basis.partition import Block, match
from egop.basis.roles import Layer
from egop.basis.structures import Auxiliary, Full, Kronecker, Shared, Structure
from egop.basis.structures.views import matrix_shape
from egop.formatting import format_bytes, format_html_table, format_percent, format_table, pluralize

# What "auto" chooses from, richest first: where gradients are sampled, and where those of the training are followed.
# Full is for vectors: where rows can share a basis that was as good, in a fraction of the time and memory.
UP_FRONT: tuple[Structure, ...] = (Full(), Shared())
ONLINE: tuple[Structure, ...] = (Kronecker(), Shared())

_HEADER = ["block", "structure", "bytes", showing.COST]

StructureChoice = Literal["auto"] | Structure | Mapping[str, Structure]

# "auto" builds no dense basis beyond this many entries: the decomposition alone would take minutes.
FULL_LIMIT = 4096
# "auto" rotates no side wider than this. (The widest layers of ResNet-34 have 4608 inputs.)
WIDTH_LIMIT = 8192
# Nor where a decomposition, n³ for a basis of width n, is more work than this for each entry of the weight. (In
# ResNet-34 that is 41 thousand at most; 10 rows of 3072 columns have nearly a million, and take 10 seconds on a CPU.)
WORK_LIMIT = 2**20

_COLUMNS_ONLY = "columns only: its padding row must not mix with others"


@dataclass(frozen=True, repr=False)
class Plan:
    """The structure of each block, and why the others stay in original coordinates.

    Attributes:
        chosen: the structures, by block.
        why: why each was chosen, by block name.
        unrotated: why the others were left alone, by block name.
    """

    chosen: dict[Block, Structure]
    why: dict[str, str]
    unrotated: dict[str, str]

    def __str__(self) -> str:
        """The plan as a table."""
        rows = self._rows()
        table = format_table(_HEADER, [row[:-1] for row in rows]).splitlines()
        width = max(len(line) for line in table)
        return "\n".join(
            [f"{table[0]:<{width}}  why", f"{table[1]}  ---"]
            + [f"{line:<{width}}  {row[-1]}" for line, row in zip(table[2:], rows, strict=True)]
            + [showing.COST_MEANS]
        )

    def _rows(self) -> list[list[str]]:
        """What the table says of each block; why comes last."""
        rows = []
        for block, structure in self.chosen.items():
            cost = structure.cost(block)
            share = format_percent(showing.cost_of(cost.flops, block.size))
            rows.append([block.name, type(structure).__name__, format_bytes(cost.bytes), share, self.why[block.name]])
        return rows + [[name, "-", "", "", why] for name, why in self.unrotated.items()]

    def __repr__(self) -> str:
        """In a line."""
        return f"Plan({pluralize(len(self.chosen), 'block')}, {len(self.unrotated)} left as they are)"

    def _repr_html_(self) -> str:
        """The table, for a notebook."""
        table = format_html_table([*_HEADER, "why"], self._rows())
        return f"<p>{escape(repr(self))}</p>{table}<p><small>{escape(showing.COST_MEANS)}</small></p>"


def make_plan(
    blocks: Sequence[Block],
    layers: Mapping[str, Layer],
    structure: StructureChoice,
    memory: int,
    candidates: Sequence[Structure] = UP_FRONT,
    *,
    all_weights: bool = True,
) -> Plan:
    """Decide on the structure of each block.

    Args:
        blocks: the blocks.
        layers: what each parameter is.
        structure: one for all; by block-name patterns (the first match counts, others are left); or ``"auto"``: for
            each block the richest of the candidates that fits. Embeddings, output heads and what is wider than a limit
            are then left in original coordinates. An embedding with a padding row gets ``Shared()``, which keeps its
            rows apart, in place of a structure that would mix them.
        memory: what all bases together may take, in bytes.
        candidates: what ``"auto"`` chooses from, richest first.
        all_weights: whether one structure is for all blocks, or for those alone that ``"auto"`` would rotate.
    """
    check_structure(structure)
    if isinstance(structure, Structure):
        unrotated = {} if all_weights else _left(blocks, layers, (structure, *candidates))
        told = {block: structure for block in blocks if block.name not in unrotated}
        return _as_told(told, unrotated, memory, _padded(layers))
    if isinstance(structure, Mapping):
        matched = {pattern: set(match([pattern], [b.name for b in blocks], "block")) for pattern in structure}
        lists = {b: [structure[pattern] for pattern in structure if b.name in matched[pattern]] for b in blocks}
        unrotated = {block.name: "no pattern names it" for block in blocks if not lists[block]}
        told = {block: structures[0] for block, structures in lists.items() if structures}
        return _as_told(told, unrotated, memory, _padded(layers))
    return _automatic(blocks, layers, memory, candidates)


def check_structure(structure: object) -> None:
    """Raise an error for what is not ``"auto"``, a structure, or a mapping of block-name patterns to structures."""
    if isinstance(structure, Mapping):
        for pattern, value in structure.items():
            if not isinstance(value, Structure):
                advice = call_it(value, Structure)
                raise TypeError(f"Pattern '{pattern}' needs a structure such as egop.Full(), got {value!r}.{advice}")
    elif not isinstance(structure, Structure) and structure != "auto":
        raise TypeError(
            f"Invalid structure value: {structure!r}. Must be 'auto', a structure such as egop.Full(), or a mapping of "
            f"block-name patterns to structures.{call_it(structure, Structure)}"
        )


def call_it(given: object, kind: type) -> str:
    """What to do with a class of this kind that was given where one of its objects is wanted; nothing for others."""
    return f" Call it: egop.{given.__name__}()." if isinstance(given, type) and issubclass(given, kind) else ""


def _as_told(told: Mapping[Block, Structure], unrotated: dict[str, str], memory: int, padded: Collection[str]) -> Plan:
    chosen: dict[Block, Structure] = {}
    why: dict[str, str] = {}
    for block, structure in told.items():
        pieces = _pieces(block, structure, padded)
        chosen |= pieces
        why |= _reasons(pieces, structure, "its structure was named")
    for block, structure in chosen.items():
        structure.check(block)
    _check_memory(chosen, memory)
    return Plan(chosen, why, unrotated)


def _pieces(block: Block, structure: Structure, padded: Collection[str]) -> dict[Block, Structure]:
    """Return the blocks that a structure makes of one, with the structure of each.

    Args:
        block: one or several tensors.
        structure: for all of them.
        padded: names of embeddings with a padding row. Where the structure would mix their rows, they get a block of
            their own, and only their columns are rotated.
    """
    pieces: dict[Block, Structure] = {}
    for piece in [block] if structure.joint or len(block.shapes) == 1 else block.divided():
        apart = [name for name in piece.parameters if name in padded]
        if not apart or not structure.mixes_rows(piece):
            pieces[piece] = structure
            continue
        rest, embeddings = piece.split(apart)
        pieces |= dict.fromkeys(rest, structure) | dict.fromkeys(embeddings, Shared())
    return pieces


def _reasons(pieces: Mapping[Block, Structure], structure: Structure, reason: str) -> dict[str, str]:
    """Return why each piece has its structure, by name."""
    return {piece.name: reason if own == structure else _COLUMNS_ONLY for piece, own in pieces.items()}


def _padded(layers: Mapping[str, Layer]) -> set[str]:
    return {name for name, layer in layers.items() if layer.padded}


def _left(blocks: Sequence[Block], layers: Mapping[str, Layer], candidates: Sequence[Structure]) -> dict[str, str]:
    """Why ``"auto"`` leaves blocks however much memory there is: what they are, or how wide."""
    unrotated: dict[str, str] = {}
    padded = _padded(layers)
    for block in blocks:
        reasons = [layers[name].unrotated for name in block.parameters]
        if all(reasons):
            unrotated[block.name] = reasons[0]
        elif not any(_option(structure, block, padded) for structure in candidates):
            unrotated[block.name] = _too_wide(block)
    return unrotated


def _automatic(
    blocks: Sequence[Block], layers: Mapping[str, Layer], memory: int, candidates: Sequence[Structure]
) -> Plan:
    unrotated = _left(blocks, layers, candidates)
    padded = _padded(layers)
    options = {
        block: _without_needless([option for structure in candidates if (option := _option(structure, block, padded))])
        for block in blocks
        if block.name not in unrotated
    }
    # First the leanest for as many blocks as possible, then richer ones while there is memory.
    picked: dict[Block, int] = {}
    small_first = sorted(options, key=lambda block: options[block][-1][2])
    for block in small_first:
        needed = options[block][-1][2]
        if needed <= memory:
            picked[block] = len(options[block]) - 1
            memory -= needed
        else:
            unrotated[block.name] = f"{format_bytes(needed)} at least, and {format_bytes(memory)} are left"
    if small_first and not picked:
        block = small_first[0]
        raise MemoryError(
            f"No basis fits into memory={format_bytes(memory)}: the smallest, of block '{block.name}', takes "
            f"{format_bytes(options[block][-1][2])}. Raise memory=."
        )
    why: dict[str, str] = {}
    chosen: dict[Block, Structure] = {}
    for block in small_first:
        if block not in picked:
            continue
        lean = options[block][picked[block]]
        for structure, pieces, needed in options[block]:
            if needed <= memory + lean[2]:
                memory -= needed - lean[2]
                chosen |= pieces
                why |= _reasons(pieces, structure, _reason(structure, options[block][0][0]))
                break
    order = {name: place for place, name in enumerate(name for block in blocks for name in block.parameters)}
    chosen = dict(sorted(chosen.items(), key=lambda item: order[item[0].parameters[0]]))
    return Plan(chosen, why, unrotated)


# A structure, the blocks that it makes of one with the structure of each, and their bytes.
_Option = tuple[Structure, dict[Block, Structure], int]


def _without_needless(options: list[_Option]) -> list[_Option]:
    """Without Full, where rows or kernels of more than one entry can share a basis."""
    shared = [pieces for structure, pieces, _ in options if isinstance(structure, Shared)]
    if not any(max(Shared().basis_shapes(piece)["basis"]) > 1 for pieces in shared for piece in pieces):
        return options
    return [option for option in options if not isinstance(option[0], Full)]


def _option(structure: Structure, block: Block, padded: Collection[str] = ()) -> _Option | None:
    try:
        pieces = _pieces(block, structure, padded)
        for piece, own in pieces.items():
            own.check(piece)
    except ValueError:
        return None
    if isinstance(structure, Full):
        if block.size > FULL_LIMIT:
            return None
    elif any(_is_costly(own, piece) for piece, own in pieces.items()):
        return None
    return structure, pieces, sum(own.cost(piece).bytes for piece, own in pieces.items())


def _is_costly(structure: Structure, block: Block) -> bool:
    """Whether a basis is too wide, or takes too long for what it is for: found once, then followed step by step."""
    shapes = structure.basis_shapes(block).values()
    work = sum(math.prod(shape) * shape[-1] for shape in shapes)
    return any(min(shape[-2:]) > WIDTH_LIMIT for shape in shapes) or work > WORK_LIMIT * block.size


def _too_wide(block: Block) -> str:
    sides = [side for part in block.divided() if len(part.shapes[0]) > 1 for side in matrix_shape(part)]
    if sides and max(sides) <= WIDTH_LIMIT:
        return f"more than {FULL_LIMIT} entries, and too wide for so few of them: a basis would take too long"
    return f"more than {FULL_LIMIT} entries, and wider than {WIDTH_LIMIT}"


def _reason(structure: Structure, richest: Structure) -> str:
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
    what = f"Block '{block.name}' needs a {shapes} basis ({format_bytes(costs[block])})"
    if costs[block] <= memory:
        what = f"All bases together need {format_bytes(sum(costs.values()))}; the largest is: {what}"
    leaner = []
    for structure in (Auxiliary(rank=min(1000, max(1, block.size // 10))), Shared()):
        option = _option(structure, block)
        if option and option[2] < costs[block] and option[2] <= memory:
            rank = f"rank={structure.rank}" if isinstance(structure, Auxiliary) else ""
            leaner.append(f"egop.{type(structure).__name__}({rank}) ({format_bytes(option[2])})")
    advice = f"Use structure={' or '.join(leaner)}." if leaner else "Raise memory=, or leave the block out."
    raise MemoryError(f"{what}, more than memory={format_bytes(memory)}. {advice}")
