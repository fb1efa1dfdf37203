"""Small training problems of many kinds, each of which one CPU core trains in seconds."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from egop_lab.data import images, synthetic, text
from egop_lab.data.digits import digits
from egop_lab.models import gpt, tiny, vit
from egop_lab.models.small import cross_entropy, linear_network, perceptron

__all__ = ["PROBLEMS", "Problem", "Task"]

Loss = Callable[[nn.Module, Any], Tensor]
_BATCHES = 1000  # batches in one pass


@dataclass(frozen=True)
class Task:
    """A problem with its random choices made."""

    model: nn.Module  # before training
    loss: Loss  # of the model on a batch
    batches: Iterable[Any]  # to train on; can be iterated over again
    held_out: Sequence[Any]  # batches for evaluation; without noise, the same as those to train on


@dataclass(frozen=True)
class Problem:
    """A kind of training."""

    kind: str  # of model
    half: Literal["open", "frozen"]  # open ones may be used to tune the advice; frozen ones only judge it
    make: Callable[[int, str | None], Task]  # builds the task for a seed and a data folder
    steps: int = 500  # of a full training


class RandomBatches:
    """Batches of random rows of tensors; each pass draws the same ones."""

    def __init__(self, tensors: Sequence[Tensor], size: int, seed: int) -> None:
        self._tensors, self._size, self._seed = tensors, size, seed

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(_BATCHES):
            rows = torch.randint(len(self._tensors[0]), (self._size,), generator=generator)
            yield tuple(tensor[rows] for tensor in self._tensors)


_Build = Callable[[], nn.Module]
_Parts = tuple[Tensor, ...]


def _make_task(seed: int, build: _Build, loss: Loss, train: _Parts, held_out: _Parts, size: int) -> Task:
    """Build a task from tensors to train on and tensors to evaluate on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    chunks = list(zip(*(tensor.split(128) for tensor in held_out), strict=True))
    return Task(model, loss, RandomBatches(train, size, 1000 + seed), chunks)


def _squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


# --- images -----------------------------------------------------------------------------------------------------------


def _digits(
    seed: int, data: str | None, build: _Build, *, loss: Loss = cross_entropy, transposed: bool = False
) -> Task:
    split = digits()
    train, held_out = ((part.features - 0.3, part.labels) for part in (split.train, split.validation))
    if transposed:
        train, held_out = ((x.view(-1, 8, 8).mT.flatten(1), y) for x, y in (train, held_out))
    return _make_task(seed, build, loss, train, held_out, size=64)


@functools.cache
def _load_imagenette(data: str | None, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    found = images.load(data, side=side, crop=side, device=torch.device("cpu"), limits=(None, 512))
    assert isinstance(found, images.HeldImages)
    train, held_out = ((images.normalize(pixels), labels) for pixels, labels in (found.train, found.held_out))
    return train, held_out


def _imagenette(seed: int, data: str | None, build: _Build, *, side: int) -> Task:
    train, held_out = _load_imagenette(data, side)
    return _make_task(seed, build, cross_entropy, train, held_out, size=48)


def _reconstruct(seed: int, data: str | None, build: _Build, *, source: str, noise: float = 0.0) -> Task:
    """Reproduce images, after noise was added to them."""
    if source == "digits":
        split = digits()
        parts = [split.train.features, split.validation.features]
    else:
        parts = [part[0] for part in _load_imagenette(data, 12)]
    dirty = [
        part + noise * torch.randn(part.shape, generator=torch.Generator().manual_seed(place))
        for place, part in enumerate(parts)
    ]
    return _make_task(seed, build, _squares, (dirty[0], parts[0]), (dirty[1], parts[1]), size=64)


def _contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the InfoNCE loss of two noisy views of each image."""
    noise = torch.randn((2, *batch[0].shape), generator=torch.Generator().manual_seed(int(batch[1].sum())))
    first, second = (F.normalize(model(batch[0] + 0.3 * part), dim=1) for part in noise)
    return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))


def _paint(seed: int, data: str | None) -> Task:
    """Fit one photograph as a function of the coordinates, given as Fourier features."""
    pixels = _load_imagenette(data, 24)[0][0][seed]
    places = torch.cartesian_prod(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24))
    waves = places @ (torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)) * 4)
    features, colours = torch.cat([waves.sin(), waves.cos()], 1), pixels.flatten(1).T
    both = (features, colours)
    return _make_task(seed, lambda: perceptron(64, 96, 96, 3), _squares, both, both, size=144)


def _convolutions(channels: int, inputs: int, pixels: int, norm: Callable[[int], nn.Module] | None = None) -> nn.Module:
    """Build three convolutions, two of which are followed by pooling, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after, pool in ((inputs, channels, True), (channels, channels, False), (channels, 2 * channels, True)):
        layers += [nn.Conv2d(before, after, 3, padding=1), *([norm(after)] if norm else []), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * channels * (pixels // 4) ** 2, 10))


class _Residual(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        parts = [(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)) for _ in range(2)]
        self.layers = nn.Sequential(*parts[0], nn.ReLU(), *parts[1])

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(inputs + self.layers(inputs))


def _residual_network(channels: int = 16) -> nn.Module:
    stem = (nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))
    return nn.Sequential(*stem, _Residual(channels), _Residual(channels), *head)


def _flat_images(*widths: int) -> nn.Module:
    """Build a perceptron on pixels with layer norm and dropout."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class _Mixer(nn.Module):
    """Two layers that mix tokens and channels in turn (MLP-Mixer), on rows of 8 x 8 digits."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.tokens = nn.ModuleList(perceptron(8, hidden, 8) for _ in range(2))
        self.channels = nn.ModuleList(perceptron(width, hidden, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        stream = self.embed(pixels.view(-1, 8, 8))
        for place, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            stream = stream + tokens(self.norms[2 * place](stream).mT).mT
            stream = stream + channels(self.norms[2 * place + 1](stream))
        return self.head(stream.mean(1))


class _Encoder(nn.Module):
    """Torch's transformer encoder: on symbols, with outputs for each, or on the rows of digits, with one output."""

    def __init__(self, outputs: int, length: int, *, width: int, symbols: int = 0, **options: Any) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Embedding(symbols, width) if symbols else nn.Linear(8, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)
        self.symbols = symbols

    def forward(self, inputs: Tensor) -> Tensor:
        embedded = self.embed(inputs if self.symbols else inputs.view(-1, 8, 8))
        stream = self.layers(embedded + self.places)
        return self.head(stream if self.symbols else stream.mean(1))


def _patches() -> nn.Module:
    return vit.VisionTransformer(classes=10, side=24, patch=6, layers=2, width=32, heads=4, hidden=64)


# --- text -------------------------------------------------------------------------------------------------------------

_LENGTH = 33


@functools.cache
def _load_text(data: str | None, name: str) -> tuple[Tensor, Tensor]:
    found = text.load(Path(data or "", "text", name))
    train = found.train[: len(found.train) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    return train.clamp(max=127).long(), found.windows(_LENGTH, 192).clamp(max=127).long()


def _predict_next(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (symbols,) = batch
    return F.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())


def _predict_hidden(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Compute the loss of every fifth symbol from the others."""
    (symbols,) = batch
    hidden = torch.zeros(_LENGTH, dtype=torch.bool)
    hidden[int(symbols[0, 0]) % 5 :: 5] = True
    logits = model(symbols.masked_fill(hidden, 0))
    return F.cross_entropy(logits[:, hidden].flatten(0, 1), symbols[:, hidden].flatten())


def _text(seed: int, data: str | None, build: _Build, *, name: str, loss: Loss = _predict_next) -> Task:
    train, held_out = _load_text(data, name)
    return _make_task(seed, build, loss, (train,), (held_out,), size=16)


def _gpt(width: int, layers: int) -> nn.Module:
    return gpt.GPT(128, layers=layers, width=width, heads=4, context=_LENGTH - 1)


def _recurrent(kind: Callable[..., nn.RNNBase]) -> nn.Module:
    return tiny.Recurrent(kind, 24, 64, symbols=128)


# --- matrices and functions -------------------------------------------------------------------------------------------


def _matrix(seed: int, data: str | None, *, kind: str, rows: int = 48, columns: int = 32, rank: int = 4) -> Task:
    """Find a low-rank matrix as a product of factors, from noisy entries or from noisy random measurements."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, rank, generator=generator) for size in (rows, columns))
    wanted = ((left * 2.0 ** -(0.5 * torch.arange(rank))) @ right.T).flatten()
    maps = torch.eye(rows * columns)[torch.randperm(rows * columns, generator=generator)]
    if kind == "sensing":
        maps = torch.randn(rows * columns, rows * columns, generator=generator) / columns
    values = maps @ wanted
    values += 0.1 * torch.randn(values.shape, generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[0] @ model().flatten() - batch[1]).square().mean()

    train, held_out = (maps[512:], values[512:]), (maps[:512], values[:512])
    return _make_task(seed, lambda: tiny.Factors(rows, columns, 6), loss, train, held_out, size=128)


def _linear(seed: int, data: str | None) -> Task:
    """Train a deep linear network on correlated features."""
    generator = torch.Generator().manual_seed(seed)
    x = synthetic.features(4096, 48, generator, decay=0.75, dense=True)
    y = x @ torch.randn(48, 12, generator=generator) + 0.05 * torch.randn(4096, 12, generator=generator)
    return _make_task(
        seed, lambda: linear_network(48, 48, 48, 12), _squares, (x[512:], y[512:]), (x[:512], y[:512]), size=64
    )


def _table(seed: int, data: str | None, *, mixed: bool) -> Task:
    """Learn Friedman's function of ten features; mixed, they are linear combinations of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, y = synthetic.friedman(6144, generator)
    if mixed:
        x = (x @ synthetic.rotation(10, generator)) * torch.logspace(0, -1, 10) @ synthetic.rotation(10, generator)
    return _make_task(
        seed, lambda: perceptron(10, 64, 64, 1), _squares, (x[1024:], y[1024:]), (x[:1024], y[:1024]), size=64
    )


def _poisson(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Compute the residual of -u'' = f on [0, 1], u = 0 at both ends, for u = sin(pi x) + sin(4 pi x) / 4."""
    with torch.enable_grad():  # also in evaluation
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        residual = bend / torch.pi**2 + torch.sin(torch.pi * x) + 4 * torch.sin(4 * torch.pi * x)
        ends = model(torch.tensor([[0.0], [1.0]]))
        return residual.square().mean() + 10 * ends.square().mean()


def _physics(seed: int, data: str | None) -> Task:
    points = torch.rand(4096, 1, generator=torch.Generator().manual_seed(seed))
    return _make_task(seed, lambda: tiny.tanh(1, 32, 32, 1), _poisson, (points[256:],), (points[:256],), size=64)


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def _pretrain(task: Task, steps: int, lr: float) -> nn.Module:
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in itertools.islice(task.batches, steps):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return model


@functools.cache
def _pretrain_cnn(seed: int) -> nn.Module:
    return _pretrain(_digits(seed, None, partial(_flat_to_convolutions, None)), 400, 2e-3)


@functools.cache
def _pretrain_gpt(seed: int, data: str | None) -> nn.Module:
    return _pretrain(_text(seed, data, partial(_gpt, 48, 2), name="tinyshakespeare"), 600, 4e-3)


def _further_digits(seed: int, data: str | None) -> Task:
    """Continue training a whole network, on transposed digits."""
    return _digits(seed, data, lambda: copy.deepcopy(_pretrain_cnn(seed)), transposed=True)


def _adapt_text(seed: int, data: str | None) -> Task:
    """Train adapters of a GPT that was trained on another text."""
    return _text(seed, data, lambda: tiny.adapted(copy.deepcopy(_pretrain_gpt(seed, data)), 8), name="wikitext-2")


def _flat_to_convolutions(norm: Callable[[int], nn.Module] | None) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *_convolutions(16, 1, 8, norm))  # type: ignore[misc]


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


_TABLE: list[tuple[str, Problem]] = [
    ("mlp-digits", Problem("MLP", "open", partial(_digits, build=lambda: perceptron(64, 128, 128, 10)))),
    ("mlp-norm-imagenette", Problem("MLP", "open", partial(
        _imagenette, build=lambda: _flat_images(432, 96, 96, 10), side=12))),
    ("table", Problem("MLP", "open", partial(_table, mixed=False))),
    ("cnn-digits", Problem("CNN", "open", partial(_digits, build=lambda: _flat_to_convolutions(None)))),
    ("cnn-norm-digits", Problem("CNN", "open", partial(_digits, build=lambda: _flat_to_convolutions(nn.BatchNorm2d)))),
    ("resnet-imagenette", Problem("residual network", "open", partial(
        _imagenette, build=_residual_network, side=24), 300)),
    ("gpt-shakespeare", Problem("transformer", "open", partial(
        _text, build=lambda: _gpt(48, 2), name="tinyshakespeare"), 400)),
    ("encoder-digits", Problem("transformer", "open", partial(
        _digits, build=lambda: _Encoder(10, 8, width=32, norm_first=True, dropout=0.0)), 350)),
    ("gru-shakespeare", Problem("recurrent network", "open", partial(
        _text, build=lambda: _recurrent(nn.GRU), name="tinyshakespeare"), 350)),
    ("autoencoder-digits", Problem("autoencoder", "open", partial(
        _reconstruct, build=lambda: perceptron(64, 96, 16, 96, 64), source="digits"))),
    ("matrix-completion", Problem("factors", "open", partial(_matrix, kind="completion"))),
    ("linear-network", Problem("factors", "open", _linear)),
    ("poisson", Problem("physics", "open", _physics)),
    ("lora-gpt", Problem("LoRA", "open", _adapt_text, 250)),
    ("mlp-imagenette", Problem("MLP", "frozen", partial(
        _imagenette, build=lambda: nn.Sequential(nn.Flatten(), *perceptron(432, 128, 64, 10)), side=12))),
    ("table-mixed", Problem("MLP", "frozen", partial(_table, mixed=True))),
    ("mixer-digits", Problem("MLP", "frozen", partial(_digits, build=_Mixer), 300)),
    ("cnn-imagenette", Problem("CNN", "frozen", partial(
        _imagenette, build=lambda: _convolutions(12, 3, 24), side=24), 200)),
    ("cnn-group-digits", Problem("CNN", "frozen", partial(
        _digits, build=lambda: _flat_to_convolutions(_group_norm)), 300)),
    ("encoder-wikitext", Problem("transformer", "frozen", partial(
        _text, build=lambda: _Encoder(128, _LENGTH, width=48, symbols=128, norm_first=True, dropout=0.0),
        name="wikitext-2", loss=_predict_hidden), 200)),
    ("gpt-wikitext", Problem("transformer", "frozen", partial(
        _text, build=lambda: _gpt(64, 2), name="wikitext-2"), 200)),
    ("vit-imagenette", Problem("transformer", "frozen", partial(_imagenette, build=_patches, side=24), 200)),
    ("lstm-wikitext", Problem("recurrent network", "frozen", partial(
        _text, build=lambda: _recurrent(nn.LSTM), name="wikitext-2"), 250)),
    ("denoising-imagenette", Problem("autoencoder", "frozen", partial(
        _reconstruct, source="imagenette", noise=0.5,
        build=lambda: nn.Sequential(nn.Flatten(), *perceptron(432, 64, 432), nn.Unflatten(1, (3, 12, 12)))))),
    ("contrast-digits", Problem("MLP", "frozen", partial(
        _digits, build=lambda: perceptron(64, 128, 64, 32), loss=_contrast))),
    ("matrix-sensing", Problem("factors", "frozen", partial(_matrix, kind="sensing"))),
    ("photograph", Problem("MLP", "frozen", _paint)),
    ("further-cnn", Problem("fine-tuning", "frozen", _further_digits, 250)),
]  # fmt: skip


PROBLEMS: Mapping[str, Problem] = dict(_TABLE)
