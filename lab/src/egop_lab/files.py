"""Files that are written completely or not at all."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to ``path`` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON; numbers that are not finite become ``null``."""
    with replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(replace_nonfinite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def replace_nonfinite(value: Any) -> Any:
    """Replace numbers that are not finite by None, also inside containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(entry) for entry in value]
    return value
