"""Records of finished runs, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from egop_lab.files import replace_nonfinite


@dataclass(frozen=True)
class Record:
    """One finished run."""

    config: Mapping[str, Any]  # all that decides the outcome: experiment, version, method, learning rate, seed, sizes
    result: Mapping[str, Any]  # numbers and lists of numbers; nan if not finite
    seconds: float = 0.0  # runs of one batch share their time
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)  # of the software

    @property
    def key(self) -> str:
        """Key of the configuration: a changed setting never finds an old record."""
        return config_key(self.config)


class RecordError(ValueError):
    """A record cannot be read; the message says where, and what to do."""


def config_key(config: Mapping[str, Any]) -> str:
    """Return a digest of a configuration that does not depend on the order of its entries."""
    text = json.dumps(config, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The finished runs of one experiment: JSON lines, appended and synced, so that a kill loses only unfinished runs.

    Runs that are added together share a line, in which what they have in common is written once. A line that is cut off
    (the process died while writing it) is dropped when the store is opened, and its runs are done again. Any other line
    that cannot be read is an error: records are never thrown away silently. The file is created with its folder when
    the first record is added. Without a path, records are only kept in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._records: dict[str, Record] = {}
        if path is not None and path.exists():
            self._read(path)

    def open_beside(self, id: str) -> Store:
        """Open the records of another experiment, in the same folder."""
        return Store(None if self.path is None else self.path.with_name(f"{id}{self.path.suffix}"))

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __contains__(self, config: Mapping[str, Any]) -> bool:
        return config_key(config) in self._records

    def get(self, config: Mapping[str, Any]) -> Record | None:
        """Return the record of a configuration if its run is finished, else None."""
        return self._records.get(config_key(config))

    def missing(self, configs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the configurations whose runs are not finished."""
        return [config for config in configs if config not in self]

    def add(self, *records: Record) -> None:
        """Append finished runs, all of them or none."""
        entries = [_make_entry(record) for record in records]
        if self.path is not None:
            _append(self.path, "".join(_to_json(entry) + "\n" for entry in _merge_entries(entries)))
        # Parse what was written, so that this process sees the same rounded numbers as one that resumes.
        self._records |= {record.key: record for record in map(_parse_record, entries)}

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                records = [_parse_record(entry) for entry in _split_entry(json.loads(line))]
            except (ValueError, TypeError, KeyError) as error:
                raise RecordError(
                    f"Line {number} of {path} is not a record ({error}). Repair or delete that line; "
                    "the other records are fine."
                ) from error
            self._records |= {record.key: record for record in records}


def _append(path: Path, lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # for example a full disk: undo the partial write
        if path.exists():
            os.truncate(path, size)
        raise


def _merge_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge entries from one machine, so that what all configurations share is written once."""
    places = {_to_json([entry["device"], entry["versions"]]) for entry in entries}
    if len(entries) < 2 or len(places) > 1:
        return entries
    first, *others = (entry["config"] for entry in entries)
    # Compare as text: 0 equals 0.0, but they are different configurations.
    common = {
        name: value
        for name, value in first.items()
        if all(name in other and _to_json(other[name]) == _to_json(value) for other in others)
    }
    runs = [
        {
            "config": {name: value for name, value in entry["config"].items() if name not in common},
            "result": entry["result"],
            "seconds": entry["seconds"],
        }
        for entry in entries
    ]
    return [{"config": common, "runs": runs, "device": entries[0]["device"], "versions": entries[0]["versions"]}]


def _split_entry(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Undo :func:`_merge_entries`."""
    if "runs" not in entry:
        return [entry]
    place = {name: entry[name] for name in ("device", "versions")}
    return [{**run, **place, "config": {**entry["config"], **run["config"]}} for run in entry["runs"]]


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _parse_record(entry: dict[str, Any]) -> Record:
    result = _map_leaves(lambda leaf: math.nan if leaf is None else leaf, entry["result"])
    return Record(**{**entry, "result": result})


def _make_entry(record: Record) -> dict[str, Any]:
    return {
        "config": dict(record.config),
        "result": _map_leaves(_round, replace_nonfinite(record.result)),
        "seconds": round(record.seconds, 3),
        "device": record.device,
        "versions": dict(record.versions),
    }


def _round(leaf: Any) -> Any:
    """Round to six digits: more than any figure shows, and a third of the bytes."""
    return float(f"{leaf:.6g}") if isinstance(leaf, float) else leaf


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map_leaves(function, entry) for key, entry in value.items()}
    return [_map_leaves(function, entry) for entry in value] if isinstance(value, list) else function(value)
