"""Nested values with something wrong in them, as a damaged or forged file may have."""

from __future__ import annotations

import copy
import json

from safetensors.torch import save_file

from egop.basis import files

WRONG = [
    None,
    True,
    -1,
    1.5,
    float("nan"),
    10**30,
    2**40,
    "x",
    "../../x",
    "/etc/passwd",
    [],
    [[]],
    [2, 3],
    {},
    {"x": 1},
]


def paths(value, at=()):
    """Yield the path of every entry of a nested value."""
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*at, key))


def changed(value, at, to):
    """Return a copy of a nested value with one entry replaced, or removed if ``to`` is ``...``."""
    if not at:
        return to
    value = copy.deepcopy(value)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = to
    return value


def forge(path, header, tensors):
    """Write a basis file with any content; its checksum is right."""
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, path, metadata={"egop": text, "crc32": str(files._checksum(text, tensors))})
