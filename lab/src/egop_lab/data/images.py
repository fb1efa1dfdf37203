"""Image folders, ``train/CLASS/*`` and ``val/CLASS/*``, held on the device as bytes.

Training sees random resized crops and flips, made on the device a batch at a time. Evaluation sees the central crop or
ten crops (corners, centre and their mirror images).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from egop_lab.data.missing import MissingDataError

Batch = tuple[Tensor, Tensor]  # normalised images and their labels

_ENDINGS = {".jpg", ".jpeg", ".png"}
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
_SCALE, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # ranges for a random crop: share of the area, aspect ratio


@dataclass(frozen=True)
class Files:
    """The files of one split and their labels; classes are numbered in the order of their folders' names."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def first(self, count: int | None) -> Files:
        """Return ``count`` files, spread evenly over all of them."""
        if count is None or count >= len(self.paths):
            return self
        rows = [index * len(self.paths) // count for index in range(count)]
        return Files(tuple(self.paths[row] for row in rows), tuple(self.labels[row] for row in rows))


def find(folder: str | None) -> tuple[Files, Files]:
    """Find the training and validation files: in the folder itself, or in ``imagenette`` or ``imagenet`` inside it."""
    places = [] if folder is None else [Path(folder), Path(folder, "imagenette"), Path(folder, "imagenet")]
    place = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
    if place is None:
        raise MissingDataError(
            f"There are no images{'' if folder is None else f' in {folder}'}: name a folder that has train/CLASS/*.jpg "
            "and val/CLASS/*.jpg (ImageNet, Imagenette, ...) with --data DIR."
        )
    names = sorted(entry.name for entry in (place / "train").iterdir() if entry.is_dir())
    splits = [_files(place / split, names) for split in ("train", "val")]
    for split, files in zip(("train", "val"), splits, strict=True):
        if not files.paths:
            raise MissingDataError(
                f"There is no .jpg, .jpeg or .png file in {place / split}/CLASS/: --data DIR must name a folder that "
                "has train/CLASS/*.jpg and val/CLASS/*.jpg."
            )
    return splits[0], splits[1]


def load(
    folder: str | None,
    *,
    side: int,
    crop: int,
    device: torch.device,
    limits: tuple[int | None, int | None] = (None, None),
    workers: int = 2,
) -> HeldImages:
    """Load the images of a folder with ``train`` and ``val``, at most ``limits`` of them, by some threads.

    The shorter side of an image is resized to ``side``; the network sees crops of a side of ``crop``.
    """
    train, validation = (files.first(limit) for files, limit in zip(find(folder), limits, strict=True))
    return HeldImages(*(_read_all(files, side, workers, device) for files in (train, validation)), crop=crop)


class HeldImages:
    """Training and validation images as uint8 tensors on the device, (n, 3, side, side): the central square of each."""

    def __init__(self, train: Batch, validation: Batch, *, crop: int) -> None:
        self.train, self.held_out, self.crop = train, validation, crop
        self.classes = int(train[1].max()) + 1
        self.counts = {"train": len(train[1]), "validation": len(validation[1]), "classes": self.classes}

    def training(self, size: int, seed: int) -> TrainingBatches:
        """Return batches of random crops, (size, 3, crop, crop), in a new order on every pass; all of the same size."""
        return TrainingBatches(*self.train, size, self.crop, seed)

    def validation(self, *, ten: bool) -> Iterator[Batch]:
        """Yield batches of views, (n, views, 3, crop, crop): the central crop, or ten."""
        images, labels = self.held_out
        for some, theirs in zip(images.split(100 if ten else 1000), labels.split(100 if ten else 1000), strict=True):
            yield normalize(make_views(some, self.crop, ten=ten)), theirs


class TrainingBatches:
    """Random crops of images, batch by batch."""

    def __init__(self, images: Tensor, labels: Tensor, size: int, crop: int, seed: int) -> None:
        self.images, self.labels, self.size, self.crop = images, labels, size, crop
        self.generator = torch.Generator(images.device).manual_seed(seed)

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.labels), generator=self.generator, device=self.images.device)
        for rows in order[: len(self) * self.size].split(self.size):
            yield normalize(random_crops(self.images[rows], self.crop, self.generator)), self.labels[rows]


def normalize(images: Tensor) -> Tensor:
    """Convert bytes to float32 and normalise with ImageNet's mean and deviation by channel; any leading dimensions."""
    mean, deviation = (torch.tensor(values, device=images.device)[:, None, None] for values in (_MEAN, _DEVIATION))
    return (images.float() / 255 - mean) / deviation


def crop_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw random boxes inside an image, (count, 4): left, top, width, height, in pixels.

    Area and shape are drawn as usual (8 to 100 % of the image, 3:4 to 4:3): the first of ten draws that fits, or the
    largest box of a permitted shape when none does.
    """
    drawn = torch.rand(2, count, 10, generator=generator, device=generator.device)
    area = height * width * (_SCALE[0] + (_SCALE[1] - _SCALE[0]) * drawn[0])
    low, high = (math.log(ratio) for ratio in _RATIO)
    ratio = (low + (high - low) * drawn[1]).exp()
    wide, tall = (area * ratio).sqrt(), (area / ratio).sqrt()
    fits = (wide <= width) & (tall <= height)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    found = fits.any(1)
    wide = torch.where(found, wide.gather(1, first)[:, 0], min(width, height * _RATIO[1]))
    tall = torch.where(found, tall.gather(1, first)[:, 0], min(height, width / _RATIO[0]))
    place = torch.rand(2, count, generator=generator, device=generator.device)
    return torch.stack([(width - wide) * place[0], (height - tall) * place[1], wide, tall], dim=1)


def random_crops(images: Tensor, crop: int, generator: torch.Generator) -> Tensor:
    """Crop, resize and randomly mirror each image: bytes as floats, (n, 3, crop, crop)."""
    count, _, height, width = images.shape
    left, top, wide, tall = crop_boxes(count, height, width, generator).unbind(1)
    flipped = torch.rand(count, generator=generator, device=generator.device) < 0.5
    middles = (torch.arange(crop, device=images.device) + 0.5) / crop  # of the wanted pixels, as shares of the box
    across = torch.where(flipped[:, None], 1 - middles, middles)
    x = (left[:, None] + wide[:, None] * across) * (2 / width) - 1
    y = (top[:, None] + tall[:, None] * middles) * (2 / height) - 1
    grid = torch.stack([x[:, None, :].expand(-1, crop, -1), y[:, :, None].expand(-1, -1, crop)], dim=-1)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def make_views(images: Tensor, crop: int, *, ten: bool) -> Tensor:
    """Return the central crop, (n, 1, 3, crop, crop); or ten: four corners, centre, and their mirror images."""
    height, width = images.shape[-2:]
    if min(height, width) < crop:
        raise ValueError(f"A crop of {crop} pixels does not fit into images of {height} x {width}.")
    below, right = height - crop, width - crop
    corners = [(0, 0), (0, right), (below, 0), (below, right)] if ten else []
    crops = torch.stack(
        [images[..., y : y + crop, x : x + crop] for y, x in [*corners, (round(below / 2), round(right / 2))]], dim=1
    )
    return torch.cat([crops, crops.flip(-1)], dim=1) if ten else crops


def _files(folder: Path, names: Sequence[str]) -> Files:
    pairs = [
        (path, label)
        for label, name in enumerate(names)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _ENDINGS
    ]
    return Files(tuple(path for path, _ in pairs), tuple(label for _, label in pairs))


def _read_all(files: Files, side: int, workers: int, device: torch.device) -> Batch:
    def read(path: Path) -> Tensor:
        return make_views(_read_image(path, side)[None], side, ten=False)[0, 0]

    with ThreadPoolExecutor(max(1, workers)) as pool:  # decoding releases Python's lock
        images = torch.stack(list(pool.map(read, files.paths)))
    return images.to(device), torch.tensor(files.labels, device=device)


def _read_image(path: Path, side: int) -> Tensor:
    """Read an image, resized so that its shorter side has the given length, as bytes of (3, height, width)."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except OSError as error:
        raise MissingDataError(f"The image {path} cannot be read ({error}): replace it or delete it.") from error
    scale = side / min(image.width, image.height)
    if scale != 1:
        image = image.resize((max(side, round(image.width * scale)), max(side, round(image.height * scale))), 2)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
