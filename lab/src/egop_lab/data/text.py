"""Text as bytes: a training part and a validation part, and windows of both."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from egop_lab.data.missing import MissingDataError


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


def load(place: Path) -> Text:
    """Load a text, gzipped or not: a folder with files called train... and valid..., or one file, split nine to one."""
    files = [place] if place.is_file() else sorted(file for file in place.glob("*") if ".txt" in file.suffixes)
    train, validation = ([file for file in files if part in file.name] for part in ("train", "val"))
    if not files:
        raise MissingDataError(f"There is no text at {place}: name a file, or a folder with train.txt and valid.txt.")
    parts = [_join(train), _join(validation)]
    if not (train and validation):
        whole = _join(files)
        parts = [whole[: len(whole) - len(whole) // 10], whole[len(whole) - len(whole) // 10 :]]
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts))


def _join(files: list[Path]) -> bytes:
    try:
        contents = [file.read_bytes() for file in files]
        return b"".join(gzip.decompress(part) if part[:2] == b"\x1f\x8b" else part for part in contents)
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"The text {files[0]} cannot be read ({error}).") from error
