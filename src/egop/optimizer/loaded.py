"""What a loaded state and a refresh make of each other, where that is not what was asked for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence

from egop.basis import ChangeOfBasis, Structure
from egop.optimizer.binding import BoundBlock
from egop.optimizer.refreshing import Refresher


def warn_of_loaded(
    with_refresh: bool,
    blocks: Sequence[BoundBlock],
    before: Sequence[BoundBlock],
    refresher: Refresher | None,
) -> None:
    """Warn when the bases of a state that was loaded stay as they are, or are not of the structure that was wanted.

    Args:
        with_refresh: whether the state was saved with a refresh.
        blocks: the blocks that were loaded.
        before: those of the optimizer before that; if it was given others than the refresh names, these are not wanted.
        refresher: the optimizer's own, if it has one.
    """
    kinds = {block.change.kind for block in blocks}
    told = _listed(kinds)
    text = None
    if refresher is None:
        if with_refresh:
            text = (
                "The bases were being renewed when this state was saved. This optimizer has no refresh=, so they stay "
                "as they are: give it the refresh= of the optimizer that was saved."
            )
    elif blocks and not any(refresher.can_renew(block.change) for block in blocks):
        text = (
            f"The state has bases of structure {told}, which {_name(refresher)} cannot renew, so they stay as they "
            "are. Use egop.Every(...), which can renew every structure."
        )
    elif (wanted := _wanted(refresher)) and all(_is_of(block.change, wanted) for block in before):
        others = [block.change.structure() for block in blocks if not _is_of(block.change, wanted)]
        same_kind = {type(structure) for structure in others} <= {type(structure) for structure in wanted}
        if others and same_kind:  # then it is their settings that differ
            told, asked = _listed(map(repr, others)), _listed(map(repr, wanted))
        else:
            asked = _listed(structure.change_type.kind for structure in wanted)
        if others:
            text = (
                f"The state has bases of structure {told}, and training goes on in these. The structure= of "
                f"{_name(refresher)}, {asked}, is for an optimizer that has no basis. To use that, load the model's "
                "weights alone and start with a new optimizer."
            )
    if text is not None:
        warnings.warn(text, stacklevel=level_of_user())


def _name(refresher: Refresher) -> str:
    return f"egop.{type(refresher.refresh).__name__}"


def _wanted(refresher: Refresher) -> list[Structure]:
    """Return the structures that a refresh names; none where it leaves the choice open."""
    choice = getattr(refresher.refresh, "structure", "auto")
    named = list(choice.values()) if isinstance(choice, Mapping) else [choice]
    structures = [each for each in named if isinstance(each, Structure) and hasattr(each, "change_type")]
    return structures if len(structures) == len(named) else []


def _is_of(change: ChangeOfBasis, structures: Iterable[Structure]) -> bool:
    """Return True if one of the structures would give a block a change of basis of this kind and settings."""
    return any(
        isinstance(change, structure.change_type) and structure.empty_change(change.block).settings == change.settings
        for structure in structures
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words)))


def level_of_user() -> int:
    """The stack level, for the function that calls this, of the first one that is neither egop's nor torch's."""
    modules = (frame.frame.f_globals.get("__name__", "") for frame in inspect.stack(context=0))
    return next((level for level, name in enumerate(modules) if name.partition(".")[0] not in ("egop", "torch")), 1)
