"""Warn when the bases of a loaded state differ from what the refresh would create."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from egop.basis import ChangeOfBasis, Structure
from egop.optimizer.binding import BoundBlock
from egop.optimizer.checks import find_user_level
from egop.optimizer.refreshing import Refresher


def warn_of_loaded_bases(
    with_refresh: bool,
    blocks: Sequence[BoundBlock],
    before: Sequence[BoundBlock],
    refresher: Refresher | None,
) -> None:
    """Warn if the loaded bases will not be renewed, or are not of the structure that the refresh names.

    Args:
        with_refresh: whether the state was saved with a refresh.
        blocks: the loaded blocks.
        before: the earlier blocks; if they had other structures than the refresh names, the user gave them.
        refresher: the optimizer's refresher, if it has one.
    """
    kinds = {block.change.kind for block in blocks}
    found = _join_names(kinds)
    text = None
    if refresher is None:
        if with_refresh:
            text = (
                "The bases were being renewed when this state was saved. This optimizer has no refresh=, so they stay "
                "fixed: give it the refresh= of the optimizer that was saved."
            )
    elif blocks and not any(refresher.can_renew(block.change) for block in blocks):
        text = (
            f"The state has bases of structure {found}, which {_name(refresher)} cannot renew, so they stay "
            "fixed. Use egop.Every(...), which can renew every structure."
        )
    elif (wanted := _list_structures(refresher)) and all(_has_structure(block.change, wanted) for block in before):
        others = [block.change.structure() for block in blocks if not _has_structure(block.change, wanted)]
        same_kind = {type(structure) for structure in others} <= {type(structure) for structure in wanted}
        if others and same_kind:  # then only their settings differ
            found, asked = _join_names(map(repr, others)), _join_names(map(repr, wanted))
        else:
            asked = _join_names(structure.change_type.kind for structure in wanted)
        if others:
            text = (
                f"The state has bases of structure {found}, and training continues with these. The structure= of "
                f"{_name(refresher)}, {asked}, applies to an optimizer without a basis. To use it, load the model's "
                "weights alone and start with a new optimizer."
            )
    if text is not None:
        warnings.warn(text, stacklevel=find_user_level())


def _name(refresher: Refresher) -> str:
    return f"egop.{type(refresher.refresh).__name__}"


def _list_structures(refresher: Refresher) -> list[Structure]:
    """Return the structures that a refresh names; none where it leaves the choice open."""
    choice = getattr(refresher.refresh, "structure", "auto")
    named = list(choice.values()) if isinstance(choice, Mapping) else [choice]
    structures = [each for each in named if isinstance(each, Structure) and hasattr(each, "change_type")]
    return structures if len(structures) == len(named) else []


def _has_structure(change: ChangeOfBasis, structures: Iterable[Structure]) -> bool:
    """Return True if one of the structures would give this block its kind of basis, with the same settings."""
    return any(
        isinstance(change, structure.change_type) and structure.empty_change(change.block).settings == change.settings
        for structure in structures
    )


def _join_names(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words)))
