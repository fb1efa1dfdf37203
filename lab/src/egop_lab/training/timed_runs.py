"""Series of long runs within a time budget."""

import math
import time
from collections.abc import Callable
from typing import Any

from egop_lab.training.context import Context, record_run
from egop_lab.training.records import Record, Store


class Trials:
    """A series of runs, done one after the other until the time budget ends; finished ones are skipped.

    ``warm_up`` is called with the configuration before a run that may be timed.
    """

    def __init__(
        self,
        store: Store,
        context: Context,
        make_config: Callable[..., dict[str, Any]],
        run: Callable[[dict[str, Any]], Callable[[bool], dict[str, Any]]],
        warm_up: Callable[[dict[str, Any]], None],
    ) -> None:
        self.store, self.context = store, context
        self.make_config, self._run, self._warm_up = make_config, run, warm_up
        self._began = time.monotonic()

    @property
    def done(self) -> list[Record]:
        """Finished runs on this data with these settings."""
        return [run for run in self.store if shared_config(run) == self.make_config()]

    @property
    def deadline(self) -> float:
        """Time after which no further run starts, by the monotonic clock."""
        budget = self.context.time_budget
        return math.inf if budget is None else self._began + budget

    def do(self, **entries: Any) -> bool:
        """Do one run unless it is finished; return False when the time is over."""
        config, context = self.make_config(**entries), self.context
        if config in self.store:
            return True
        if time.monotonic() > self.deadline:
            return False
        self._warm_up(config)
        record_run(self.store, config, lambda config: self._run(dict(config))(context.progress), context.device)
        return True


def shared_config(run: Record) -> dict[str, Any]:
    """Return the part of a configuration that all compared runs have in common."""
    keys = ("method", "lr", "steps", "epochs", "seed")
    return {key: value for key, value in run.config.items() if key not in keys}
