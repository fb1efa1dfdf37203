"""Texts, tokens and images on the device, in three parts: the test part is only for reported results."""

from __future__ import annotations

import functools
import gzip
import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egop_lab.data import images
from egop_lab.data.missing import MissingDataError

_PARTS = ("train", "validation", "test")
_END = "<|end|>"  # after each file of the corpus "code"
_FILES_FOR_BPE = 1200  # on which the tokenizer is trained


@dataclass(frozen=True)
class Text:
    """Training, validation and test part, each one long tensor of tokens."""

    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def digest(self) -> str:
        """Hash of all three parts, for records."""
        return hash_tensors(self.train, self.validation, self.test)


def hash_tensors(*tensors: Tensor) -> str:
    """Return a short hash of the values."""
    return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in tensors)).hexdigest()[:16]


def load_text(name: str, folder: str | None, device: torch.device, vocabulary: int = 256) -> Text:
    """Load ``"wikitext-2"`` as bytes or ``"code"`` as tokens from a folder, or make the ``"synthetic"`` text."""
    if name == "synthetic":
        return _make_text(device)
    if name == "wikitext-2":
        place = _find(folder, ("", name, f"text/{name}"), [f"*{part}*" for part in ("train", "valid", "test")])
        return Text(*(_read_bytes(place, part).to(device) for part in ("train", "valid", "test")))
    if name == "code":
        files = prepare_tokens(folder, vocabulary)
        return Text(*(torch.from_numpy(np.load(files[part]).astype(np.int32)).to(device) for part in _PARTS))
    raise ValueError(f"Invalid data name: {name!r}. Must be 'wikitext-2', 'code' or 'synthetic'.")


def load_images(name: str, folder: str | None, device: torch.device, crop: int) -> images.HeldImages:
    """Load ``"imagenette"`` (train/CLASS/*.jpg and val/CLASS/*.jpg) from a folder, or make ``"synthetic"`` images."""
    side = crop * 7 // 6
    if name == "synthetic":
        return images.HeldImages(*(_make_images(count, side, device) for count in (64, 32)), crop=crop)
    return images.load(folder, side=side, crop=crop, device=device, workers=8)


def prepare_tokens(folder: str | None, vocabulary: int) -> dict[str, Path]:
    """Return the files with the tokens of each part of ``"code"``, as uint16; make them if they are not there.

    The archive splits the corpus by file. Of its validation files the even ones are our validation part, the odd ones
    our test part. The tokenizer is a byte-level BPE trained on the first 1,200 training files.
    """
    place = _find(folder, ("", "code"), ["train.txt.xz", "val.txt.xz"])
    caches = {part: place / f"{part}.{vocabulary}.npy" for part in _PARTS}
    if not all(cache.exists() for cache in caches.values()):
        train, held_out = (_read_documents(place / f"{part}.txt.xz") for part in ("train", "val"))
        tokenizer = _train_tokenizer(train[:_FILES_FOR_BPE], vocabulary)
        for part, documents in zip(_PARTS, (train, held_out[::2], held_out[1::2]), strict=True):
            temporary = caches[part].with_suffix(".part")
            with temporary.open("wb") as file:
                np.save(file, _encode(tokenizer, documents))
            temporary.rename(caches[part])
    return caches


def _find(folder: str | None, names: tuple[str, ...], patterns: list[str]) -> Path:
    for place in [] if folder is None else [Path(folder, name) for name in names]:
        if all(list(place.glob(pattern)) for pattern in patterns):
            return place
    raise MissingDataError(
        f"There is no {names[-1]} in {folder}: --data must name a folder that has {', '.join(patterns)}, itself or in "
        f"{' or '.join(names[1:])}."
    )


def _read_bytes(place: Path, part: str) -> Tensor:
    (file,) = place.glob(f"*{part}*")
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _read_documents(archive: Path) -> list[str]:
    return lzma.decompress(archive.read_bytes()).decode().split("\0")[:-1]


def _train_tokenizer(documents: list[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _encode(tokenizer: Any, documents: list[str], at_once: int = 1000) -> np.ndarray[Any, Any]:
    end, tokens = tokenizer.token_to_id(_END), []
    for first in range(0, len(documents), at_once):
        encoded = tokenizer.encode_batch(documents[first : first + at_once])
        tokens += [np.array([*each.ids, end], dtype=np.uint16) for each in encoded]
    return np.concatenate(tokens)


def _make_text(device: torch.device) -> Text:
    """Make bytes of which each depends on the one before it, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (12_000,), generator=generator)
    text = (steps.cumsum(0) % 64).to(torch.uint8).to(device)
    return Text(text[:10_000], text[10_000:11_000], text[11_000:])


@functools.cache
def _make_images(count: int, side: int, device: torch.device) -> images.Batch:
    """Make noise that is brighter in one colour, which is the class."""
    labels = torch.arange(count) // 2 % 3
    pixels = torch.randint(0, 100, (count, 3, side, side), generator=torch.Generator().manual_seed(count))
    pixels[torch.arange(count), labels] += 150
    return pixels.to(device, torch.uint8), labels.to(device)
