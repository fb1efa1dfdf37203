"""What runs leave behind as plain frozen values that plots and pages read; and files that are written whole."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Curve", "Run", "finite", "replacing", "write_json"]


@dataclass(frozen=True)
class Curve:
    """One training run by epoch; index 0 is the starting point.

    Attributes:
        loss: Loss over the whole training set.
        metrics: Whatever else was evaluated, by name, as long as ``loss``.
        seconds: Time spent in training steps; evaluation is not counted.
        diverged: Whether the loss became non-finite, which ended the run; the last entry is then that loss.
    """

    loss: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    diverged: bool = False

    @property
    def final(self) -> float:
        """The last loss."""
        return self.loss[-1]

    def epochs_to(self, target: float) -> int | None:
        """The first epoch after which the loss is at most ``target``; ``None`` when that never happens."""
        return next((epoch for epoch, loss in enumerate(self.loss) if loss <= target), None)


@dataclass(frozen=True)
class Run:
    """A curve and the settings it was made with; ``coordinates`` is "original" or "EGOP"."""

    optimizer: str
    coordinates: str
    lr: float
    curve: Curve


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to; it takes the name ``path`` only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all; numbers that are not finite become ``null``."""
    with replacing(path) as beside:
        beside.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """A value for JSON: numbers in it that are not finite become ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
