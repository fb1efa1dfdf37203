"""Texts as bytes on the device, in three parts: tuning sees the first two, the test part is for reported results."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from egop_lab.data.missing import MissingDataError


@dataclass(frozen=True)
class Parts:
    """Training, validation and test part, each one long tensor of tokens."""

    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def digest(self) -> str:
        """Hash of all three parts, for records."""
        parts = (self.train, self.validation, self.test)
        return hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts)).hexdigest()[:16]


def cut_windows(tokens: Tensor, length: int, count: int | None = None) -> Tensor:
    """Return windows without overlap, (n, length): all, or ``count`` of them spread evenly over the text."""
    rows = len(tokens) // length
    windows = tokens[: rows * length].view(rows, length)
    if count is None or count >= rows:
        return windows
    return windows[torch.arange(count, device=tokens.device) * rows // count]


def load_parts(name: str, folder: str | None, device: torch.device) -> Parts:
    """Load ``"wikitext-2"`` from a folder, or make the ``"synthetic"`` text for tests."""
    if name == "synthetic":
        return _make_text(device)
    if name != "wikitext-2":
        raise ValueError(f"Invalid data name: {name!r}. Must be 'wikitext-2' or 'synthetic'.")
    return Parts(*(_read_bytes(_find_wikitext(folder), part).to(device) for part in ("train", "valid", "test")))


def _find_wikitext(folder: str | None) -> Path:
    places = [] if folder is None else [Path(folder, name) for name in ("", "wikitext-2", "text/wikitext-2")]
    for place in places:
        if all(list(place.glob(f"*{part}*")) for part in ("train", "valid", "test")):
            return place
    raise MissingDataError(
        f"There is no WikiText-2 in {folder}: --data must name a folder with train*, valid* and test* files "
        "(gzipped or not), or one that has them in wikitext-2 or text/wikitext-2."
    )


def _read_bytes(place: Path, part: str) -> Tensor:
    (file,) = place.glob(f"*{part}*")
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _make_text(device: torch.device) -> Parts:
    """Make bytes of which each depends on the one before it, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (12_000,), generator=generator)
    text = (steps.cumsum(0) % 64).to(torch.uint8).to(device)
    return Parts(text[:10_000], text[10_000:11_000], text[11_000:])
