"""The table of blocks that bases, plans and optimizers print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis
from egop.formatting import format_bytes, format_table, mask_layer_numbers, pluralize

_HEADER = ["block", "structure", "shape", "basis", "stable rank"]
# With more blocks than this, similar blocks of several layers share a row.
_MANY = 12


def format_blocks(
    changes: Sequence[ChangeOfBasis], spectra: Mapping[str, Spectrum], unrotated: Mapping[str, str]
) -> str:
    """Format changes of basis, and the weights left in original coordinates with the reason, as plain text."""
    rows = [_format_row(name, group, spectra) for name, group in _group(changes)]
    rows.append(["total", "", "", format_bytes(sum(change.nbytes for change in changes)), ""])
    columns = len(_HEADER) if any(row[-1] for row in rows) else len(_HEADER) - 1
    table = format_table(_HEADER[:columns], [row[:columns] for row in rows])
    return "\n".join([table, *(f"{name} is not rotated: {reason}" for name, reason in unrotated.items())])


def _group(changes: Sequence[ChangeOfBasis]) -> list[tuple[str, list[ChangeOfBasis]]]:
    if len(changes) <= _MANY:
        return [(change.block.name, [change]) for change in changes]
    groups: dict[tuple[object, ...], list[ChangeOfBasis]] = {}
    for change in changes:
        groups.setdefault((mask_layer_numbers(change.block.name), change.kind, change.block.shapes), []).append(change)
    return [
        (f"{masked} ({len(group)} similar)" if len(group) > 1 else group[0].block.name, group)
        for (masked, *_), group in groups.items()
    ]


def _format_row(name: str, group: Sequence[ChangeOfBasis], spectra: Mapping[str, Spectrum]) -> list[str]:
    first = group[0]
    return [
        name,
        first.kind,
        " + ".join(" x ".join(map(str, shape)) or "1" for shape in first.block.shapes),
        format_bytes(sum(change.nbytes for change in group)),
        _format_rank([spectra[change.block.name] for change in group if change.block.name in spectra]),
    ]


def _format_rank(spectra: Sequence[Spectrum]) -> str:
    """Format the stable rank. With too few draws it is a lower bound: chance makes spectra look steeper."""
    if not spectra:
        return ""
    ranks = sorted(spectrum.stable_rank for spectrum in spectra)
    size = len(spectra[0].eigenvalues)
    text = "–".join(dict.fromkeys(f"{rank:.1f}" for rank in (ranks[0], ranks[-1]))) + f" of {size}"
    few = [spectrum.samples for spectrum in spectra if not spectrum.is_supported]
    return f"{text} ({pluralize(min(few), 'draw')}: lower bound)" if few else text
