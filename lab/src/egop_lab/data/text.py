"""Text as bytes, held on the device: a training part and a validation part, and windows of both.

Where it is looked for, in this order: ``--data`` names a folder that has files for both parts (``train*`` and ``val*``,
ending in ``.txt``, ``.tokens`` or ``.raw``, gzipped or not: WikiText-2 as it is distributed), itself or in ``text``,
``wikitext-2`` or ``text/wikitext-2`` inside it; or it names a text file, or a folder of text files (or has one named
``text``), which are joined in the order of their names. The last tenth is then for validation.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from egop_lab.data.missing import MissingDataError

_ENDINGS = {".txt", ".tokens", ".raw"}
_INSIDE = ("", "text", "wikitext-2", "text/wikitext-2")
_ADVICE = (
    "Name a text file, or a folder that has train.txt and valid.txt (or WikiText-2's wiki.train.tokens and "
    "wiki.valid.tokens; gzipped or not), with --data PATH."
)


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate with, each one long uint8 tensor."""

    train: Tensor
    validation: Tensor

    def windows(self, length: int, count: int) -> Tensor:
        """Return at most ``count`` windows of the validation text, (n, length), spread evenly without overlap."""
        return cut_windows(self.validation, length, count)


def cut_windows(tokens: Tensor, length: int, count: int | None = None) -> Tensor:
    """Return windows without overlap, (n, length): all, or ``count`` of them spread evenly over the text."""
    rows = len(tokens) // length
    windows = tokens[: rows * length].view(rows, length)
    if count is None or count >= rows:
        return windows
    return windows[torch.arange(count, device=tokens.device) * rows // count]


class Windows:
    """Batches of windows of a text, (size, length), at random places; different ones on every pass.

    A window has ``length`` bytes, a batch ``size`` windows, a pass ``count`` batches. Two sources with the same seed
    give the same batches, pass by pass.
    """

    def __init__(self, text: Tensor, *, length: int, size: int, count: int, seed: int) -> None:
        self._text, self._length, self._size, self._count = text, length, size, count
        self._generator = torch.Generator().manual_seed(seed)
        self._within = torch.arange(length, device=text.device)

    def __iter__(self) -> Iterator[Tensor]:
        places = torch.randint(
            len(self._text) - self._length + 1, (self._count, self._size, 1), generator=self._generator
        )
        for rows in places.to(self._text.device):
            yield self._text[rows + self._within]


def load(place: str | None, device: torch.device, *, smallest: int) -> Text:
    """Load the text at a path, see above; its training part must have at least ``smallest`` bytes."""
    train, validation = _read(place)
    if len(train) < smallest or len(validation) < smallest // 100:
        raise MissingDataError(
            f"The text at {place} is too short: {len(train)} bytes to train on and {len(validation)} to validate with, "
            f"but {smallest} and {smallest // 100} are needed. {_ADVICE}"
        )
    parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in (train, validation)]
    return Text(parts[0], parts[1])


def _read(place: str | None) -> tuple[bytes, bytes]:
    """Return the training and the validation part."""
    root = None if place is None else Path(place)
    folders = [] if root is None else [root / name for name in _INSIDE]
    for folder in folders:
        train, validation = (
            [file for file in _files(folder) if part in file.name.lower()] for part in ("train", "val")
        )
        if train and validation:
            return _join(train), _join(validation)
    alone = [root] if root is not None and root.is_file() else next(filter(None, map(_files, folders[:2])), [])
    if not alone:
        raise MissingDataError(f"There is no text{'' if place is None else f' at {place}'}. {_ADVICE}")
    whole = _join(alone)
    middle = len(whole) - len(whole) // 10
    return whole[:middle], whole[middle:]


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and _plain(file).suffix.lower() in _ENDINGS)


def _plain(file: Path) -> Path:
    return file.with_suffix("") if file.suffix == ".gz" else file


def _join(files: list[Path]) -> bytes:
    try:
        contents = [file.read_bytes() for file in files]
        return b"".join(gzip.decompress(part) if part[:2] == b"\x1f\x8b" else part for part in contents)
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"The text {files[0]} cannot be read ({error}). {_ADVICE}") from error
