"""What a loaded state and a refresh make of each other, where that is not what was asked for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence

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
        before: those of the optimizer before that; if it had some, no structure was wanted.
        refresher: the optimizer's own, if it has one.
    """
    kinds = {block.change.kind for block in blocks}
    told = ", ".join(sorted(kinds))
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
    elif not before and (wanted := _wanted(refresher)) and not kinds <= wanted:
        text = (
            f"The state has bases of structure {told}, and training goes on in these. The structure= of "
            f"{_name(refresher)}, {', '.join(sorted(wanted))}, is for an optimizer that has no basis."
        )
    if text is not None:
        warnings.warn(text, stacklevel=level_of_user())


def _name(refresher: Refresher) -> str:
    return f"egop.{type(refresher.refresh).__name__}"


def _wanted(refresher: Refresher) -> set[str]:
    """The kinds of bases that a refresh names; none where it leaves the choice open."""
    choice = getattr(refresher.refresh, "structure", "auto")
    structures = choice.values() if isinstance(choice, Mapping) else [choice]
    types = [getattr(structure, "change_type", None) for structure in structures]
    return set() if None in types else {change_type.kind for change_type in types if change_type is not None}


def level_of_user() -> int:
    """The stack level, for the function that calls this, of the first one that is neither egop's nor torch's."""
    modules = (frame.frame.f_globals.get("__name__", "") for frame in inspect.stack(context=0))
    return next((level for level, name in enumerate(modules) if name.partition(".")[0] not in ("egop", "torch")), 1)
