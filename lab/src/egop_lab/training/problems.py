"""Many small problems of different kinds: each is trained in about a second, and judged by one loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop_lab.data import synthetic
from egop_lab.data.digits import digits
from egop_lab.models import gpt, tiny, vit
from egop_lab.models.small import cross_entropy, linear_network, perceptron

__all__ = ["PROBLEMS", "Problem", "Task"]

Loss = Callable[[nn.Module, Any], Tensor]
_DENSE, _AXES = "convex, dense eigenvectors", "convex, eigenvectors on axes"
_IDLE = "cannot help"


@dataclass(frozen=True)
class Task:
    """A problem made for a seed.

    Attributes:
        model: at its start.
        loss: of the model and a batch.
        batches: gone through again and again.
        judged: the batch whose loss is what counts: held-out data, or all of it where nothing is to be learned.
        rho: where gradients are drawn for a basis from before the training.
    """

    model: nn.Module
    loss: Loss
    batches: Sequence[Any]
    judged: Any
    rho: egop.Distribution = field(default_factory=egop.Initialization)


@dataclass(frozen=True)
class Problem:
    """A kind of training.

    Attributes:
        id: its name, which also decides the half of the study that it is in.
        kind: what it is an example of.
        make: the task of a seed.
        steps: of a training.
        rate: the middle one of the learning rates that AdamW begins with.
        draws: of gradients, for a basis from before the training.
    """

    id: str
    kind: str
    make: Callable[[int], Task]
    steps: int = 300
    rate: float = 8e-3
    draws: int = 64


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _built(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A network whose start depends on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _drawn(tensors: Sequence[Tensor], size: int, generator: torch.Generator, count: int = 400) -> list[Any]:
    """Batches of examples at random."""
    places = torch.randint(len(tensors[0]), (count, size), generator=generator)
    return [tuple(tensor[rows] for tensor in tensors) for rows in places]


def _squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def _next_symbol(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (symbols,) = batch
    return F.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())


# --- convex -----------------------------------------------------------------------------------------------------------


def _least_squares(seed: int, *, dense: bool, batch: int | None, size: int = 48) -> Task:
    """Ill-conditioned; with batches there is noise in the targets, else none."""
    generator = _generator(seed)
    count = 2048 if batch else 256
    x = synthetic.features(count, size, generator, decay=1.0, dense=dense)
    y = x @ torch.randn(size, 1, generator=generator)
    if batch:
        y += 0.1 * torch.randn(count, 1, generator=generator)
    batches = [(x, y)] if batch is None else _drawn((x, y), batch, generator)
    return Task(_built(seed, lambda: nn.Linear(size, 1, bias=False)), _squares, batches, (x, y))


def _logistic(seed: int, *, dense: bool, size: int = 48) -> Task:
    generator = _generator(seed)
    x = synthetic.features(2048, size, generator, decay=1.0, dense=dense)
    wanted = x @ (4 * torch.randn(size, 1, generator=generator))
    y = (torch.rand(wanted.shape, generator=generator) < wanted.sigmoid()).float()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return Task(_built(seed, lambda: nn.Linear(size, 1)), loss, _drawn((x, y), 64, generator), (x, y))


@functools.cache
def _digits(coordinates: str = "pixels") -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """To train and to judge with: pixels, transposed ones, or principal components, which have no correlations."""
    data = digits()
    parts = [(part.features, part.labels) for part in (data.train, data.validation)]
    if coordinates == "transposed":
        parts = [(x.view(-1, 8, 8).mT.flatten(1), y) for x, y in parts]
    elif coordinates == "components":
        mean = parts[0][0].mean(0)
        axes = torch.linalg.eigh((parts[0][0] - mean).T.cov())[1]
        parts = [((x - mean) @ axes, y) for x, y in parts]
    elif coordinates == "sums":  # of rows and columns
        images = [(x.view(-1, 8, 8), y) for x, y in parts]
        parts = [(torch.cat([x.mean(1), x.mean(2)], 1), y) for x, y in images]
    return parts[0], parts[1]


def _classifier(seed: int, build: Callable[[], nn.Module], coordinates: str = "pixels", **options: Any) -> Task:
    train, judged = _digits(coordinates)
    return Task(_built(seed, build), cross_entropy, _drawn(train, 64, _generator(seed)), judged, **options)


# --- matrices ---------------------------------------------------------------------------------------------------------


def _low_rank(generator: torch.Generator, rows: int, columns: int, rank: int = 4) -> Tensor:
    """With singular values that fall."""
    left, right = (torch.randn(size, rank, generator=generator) for size in (rows, columns))
    return (left * 2.0 ** -torch.arange(rank)) @ right.T


def _matrix(seed: int, *, kind: str, rows: int = 24, columns: int = 16) -> Task:
    """A matrix to be found as a product: from all entries, half of them, or random measurements."""
    generator = _generator(seed)
    wanted = _low_rank(generator, rows, columns)
    seen = torch.ones(rows, columns)
    if kind == "completion":
        seen = (torch.rand(rows, columns, generator=generator) < 0.6).float()
    model = _built(seed, lambda: tiny.Factors(rows, columns, 6))
    if kind != "sensing":
        batch = (wanted, seen)

        def entries(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return ((model() - batch[0]) * batch[1]).square().sum() / batch[1].sum()

        return Task(model, entries, [batch], batch, egop.Initialization())
    maps = torch.randn(800, rows * columns, generator=generator) / 10
    found = maps @ wanted.flatten()

    def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[0] @ model().flatten() - batch[1]).square().mean()

    return Task(model, measured, _drawn((maps, found), 100, generator), (maps, found))


def _deep_linear(seed: int) -> Task:
    generator = _generator(seed)
    x = synthetic.features(2048, 32, generator, decay=0.75, dense=True)
    y = x @ torch.randn(32, 8, generator=generator)
    return Task(_built(seed, lambda: linear_network(32, 24, 24, 8)), _squares, _drawn((x, y), 64, generator), (x, y))


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(seed: int, *, mixed: bool) -> Task:
    """Friedman's function; mixed, its features come through a badly conditioned matrix."""
    generator = _generator(seed)
    x, y = synthetic.friedman(4096, generator)
    if mixed:
        x = (x @ synthetic.rotation(10, generator)) * torch.logspace(0, -1.5, 10) @ synthetic.rotation(10, generator)
    model = _built(seed, lambda: perceptron(10, 48, 48, 1))
    return Task(model, _squares, _drawn((x[:3072], y[:3072]), 64, generator), (x[3072:], y[3072:]))


# --- sequences --------------------------------------------------------------------------------------------------------


def _windows(text: Tensor, length: int) -> Tensor:
    return text[: len(text) // length * length].view(-1, length)


def _rows(kind: str, seed: int, length: int = 33) -> tuple[Tensor, int]:
    """Sequences of symbols, and how many symbols there are."""
    generator = _generator(seed)
    if kind == "copies":
        return synthetic.copies(1500, length // 2, generator), synthetic.COPY_SYMBOLS
    if kind == "sums":
        return _windows(synthetic.sums(50_000, generator), length), synthetic.SUM_SYMBOLS
    return _windows(synthetic.words(50_000, generator), length), synthetic.WORD_SYMBOLS


def _small_gpt(symbols: int) -> nn.Module:
    return gpt.GPT(symbols, layers=2, width=32, heads=2, context=32)


def _sequences(seed: int, kind: str, build: Callable[[int], nn.Module], **options: Any) -> Task:
    rows, symbols = _rows(kind, seed)
    cut = len(rows) - 100
    batches = _drawn((rows[:cut],), 16, _generator(seed + 1))
    return Task(_built(seed, lambda: build(symbols)), _next_symbol, batches, (rows[cut:],), **options)


def _images_by_rows(seed: int, kind: Callable[..., nn.RNNBase]) -> Task:
    def build() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (8, 8)), tiny.Recurrent(kind, 8, 32, 10))

    return _classifier(seed, build)


def _patches(seed: int) -> Task:
    def build() -> nn.Module:
        shape = {"classes": 10, "side": 8, "patch": 2, "layers": 2, "width": 24, "heads": 2, "hidden": 48}
        return vit.VisionTransformer(**shape)

    (x, y), (judged, labels) = _digits()
    colours, seen = (part.view(-1, 1, 8, 8).expand(-1, 3, -1, -1) for part in (x, judged))
    batches = _drawn((colours, y), 32, _generator(seed))
    return Task(_built(seed, build), cross_entropy, batches, (seen, labels), egop.Initialization(vit.initialize_))


def _autoencoder(seed: int, build: Callable[[], nn.Module]) -> Task:
    (x, _), (judged, _) = _digits()
    return Task(_built(seed, build), _squares, _drawn((x, x), 64, _generator(seed)), (judged, judged))


# --- physics ----------------------------------------------------------------------------------------------------------


def _slope(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def _poisson(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """-u'' = f on [0, 1] with u = 0 at both ends, for u = sin πx + sin(4πx)/4."""
    with torch.enable_grad():  # judged without gradients, and still differentiated by x
        x = batch[0].detach().requires_grad_()
        bend = _slope(_slope(model(x), x), x)
        pi = torch.pi
        residual = bend + pi**2 * torch.sin(pi * x) + 4 * pi**2 * torch.sin(4 * pi * x)
        ends = model(torch.tensor([[0.0], [1.0]], dtype=x.dtype))
        return residual.square().mean() / pi**4 + 10 * ends.square().mean()


def _burgers(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """u_t + u u_x = ν u_xx on [-1, 1] from -sin πx, with u = 0 at both ends."""
    with torch.enable_grad():
        x, t = batch[0][:, :1].detach().requires_grad_(), batch[0][:, 1:].detach().requires_grad_()
        u = model(torch.cat([x, t], 1))
        along = _slope(u, x)
        residual = _slope(u, t) + u * along - 0.05 * _slope(along, x)
        start = model(torch.cat([x, torch.zeros_like(t)], 1)) + torch.sin(torch.pi * x)
        ends = model(torch.cat([torch.sign(x), t], 1))
        return residual.square().mean() + start.square().mean() + ends.square().mean()


def _physics(seed: int, loss: Loss, inputs: int) -> Task:
    generator = _generator(seed)
    model = _built(seed, lambda: tiny.tanh(inputs, 24, 24, 1))
    low = torch.tensor([-1.0, 0.0])[:inputs] if inputs == 2 else torch.zeros(1)
    points = low + (1 - low) * torch.rand(4000, inputs, generator=generator)
    return Task(model, loss, _drawn((points,), 64, generator), (points[:512],))


# --- trained before ---------------------------------------------------------------------------------------------------


def _trained(task: Task, steps: int, lr: float) -> nn.Module:
    """A copy of the model, trained with AdamW."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batches[step % len(task.batches)]).backward()
        optimizer.step()
    return model


@functools.lru_cache(maxsize=8)
def _trained_classifier(seed: int) -> nn.Module:
    return _trained(_classifier(seed, lambda: perceptron(64, 48, 48, 10)), 400, 4e-3)


@functools.lru_cache(maxsize=8)
def _trained_gpt(seed: int) -> nn.Module:
    return _trained(_sequences(seed, "words", _small_gpt), 300, 8e-3)


def _further(seed: int, trained: Callable[[int], nn.Module], rank: int = 0) -> nn.Module:
    """A copy of a trained network to be trained further: all of it, or adapters."""
    model = copy.deepcopy(trained(seed))
    return _built(seed, lambda: tiny.adapted(model, rank)) if rank else model


def _further_images(seed: int, rank: int = 0) -> Task:
    """On images that are transposed."""
    rho = egop.Recentered(0.02 if rank else 0.0)
    return _classifier(seed, lambda: _further(seed, _trained_classifier, rank), "transposed", rho=rho)


def _further_text(seed: int, rank: int = 0) -> Task:
    """On a text of other words."""
    rho = egop.Recentered(0.02 if rank else 0.0)
    return _sequences(seed + 500, "words", lambda _: _further(seed, _trained_gpt, rank), rho=rho)


# --- what cannot be helped --------------------------------------------------------------------------------------------


def _white_noise(seed: int, rows: int = 16, columns: int = 24) -> Task:
    """All directions are alike, and so is the noise of the gradients."""
    noise = torch.randn(400, rows, columns, generator=_generator(seed))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        (weight,) = model.parameters()
        return 0.5 * weight.square().sum() + (batch * weight).sum()

    model = _built(seed, lambda: nn.Linear(columns, rows, bias=False))
    return Task(model, loss, list(noise), torch.zeros(rows, columns))


def _entries(seed: int) -> Task:
    """Least squares for every entry of a matrix by itself, badly conditioned."""
    generator = _generator(seed)
    scales = torch.exp(1.5 * torch.randn(12, 16, generator=generator))
    x = torch.randn(2048, 12, 16, generator=generator) * scales
    y = x * torch.randn(12, 16, generator=generator) / scales.sqrt()
    return Task(_built(seed, lambda: tiny.Elementwise(12, 16)), _squares, _drawn((x, y), 32, generator), (x, y))


_make = functools.partial
_gpt = _make(_sequences, build=_small_gpt, rho=egop.Initialization(gpt.initialize_))

_LIST = [
    Problem("quadratic-axes", _AXES, _make(_least_squares, dense=False, batch=None), 400, 3.2e-2, 128),
    Problem("quadratic-dense", _DENSE, _make(_least_squares, dense=True, batch=None), 400, 3.2e-2, 128),
    Problem("least-squares-axes", _AXES, _make(_least_squares, dense=False, batch=32), 400, 3.2e-2, 128),
    Problem("least-squares-dense", _DENSE, _make(_least_squares, dense=True, batch=32), 400, 3.2e-2, 128),
    Problem("logistic-axes", _AXES, _make(_logistic, dense=False), 400, 6.4e-2, 128),
    Problem("logistic-dense", _DENSE, _make(_logistic, dense=True), 400, 6.4e-2, 128),
    Problem("softmax-digits", _DENSE, _make(_classifier, build=lambda: nn.Linear(64, 10)), 300, 3.2e-2),
    Problem(
        "softmax-components", _AXES, _make(_classifier, build=lambda: nn.Linear(64, 10), coordinates="components"), 300
    ),
    Problem("factorisation", "matrix", _make(_matrix, kind="factorisation"), 300, 3.2e-2),
    Problem("completion", "matrix", _make(_matrix, kind="completion"), 300, 3.2e-2),
    Problem("sensing", "matrix", _make(_matrix, kind="sensing"), 300, 3.2e-2),
    Problem("deep-linear", "matrix", _deep_linear),
    Problem("mlp-digits", "MLP, digits", _make(_classifier, build=lambda: perceptron(64, 32, 10))),
    Problem("mlp-digits-deep", "MLP, digits", _make(_classifier, build=lambda: tiny.tanh(64, 32, 32, 32, 10))),
    Problem(
        "mlp-components", _IDLE, _make(_classifier, build=lambda: perceptron(64, 32, 10), coordinates="components")
    ),
    Problem("mlp-sums", "MLP, table", _make(_classifier, build=lambda: perceptron(16, 48, 10), coordinates="sums")),
    Problem("mlp-friedman", "MLP, table", _make(_table, mixed=False)),
    Problem("mlp-friedman-mixed", "MLP, table", _make(_table, mixed=True)),
    Problem("cnn-digits", "CNN", _make(_classifier, build=tiny.convolutions), 250),
    Problem("cnn-depthwise", "CNN", _make(_classifier, build=tiny.depthwise), 250),
    Problem("gpt-words", "GPT", _make(_gpt, kind="words"), 300),
    Problem("gpt-sums", "GPT", _make(_gpt, kind="sums"), 300),
    Problem("gpt-copies", "GPT", _make(_gpt, kind="copies"), 300),
    Problem("vit-digits", "ViT", _patches, 250),
    Problem("gru-digits", "RNN", _make(_images_by_rows, kind=nn.GRU), 250),
    Problem("rnn-digits", "RNN", _make(_images_by_rows, kind=nn.RNN), 250),
    Problem(
        "gru-words",
        "RNN",
        _make(_sequences, kind="words", build=lambda symbols: tiny.Recurrent(nn.GRU, 16, 48, symbols, symbols)),
        150,
    ),
    Problem("autoencoder", "autoencoder", _make(_autoencoder, build=lambda: perceptron(64, 48, 8, 48, 64))),
    Problem("autoencoder-tanh", "autoencoder", _make(_autoencoder, build=lambda: tiny.tanh(64, 32, 8, 32, 64))),
    Problem("pinn-poisson", "physics-informed", _make(_physics, loss=_poisson, inputs=1), 400),
    Problem("pinn-burgers", "physics-informed", _make(_physics, loss=_burgers, inputs=2), 400),
    Problem("further-mlp", "fine-tuning", _further_images, 200, 4e-3),
    Problem("further-gpt", "fine-tuning", _further_text, 150, 4e-3),
    Problem("lora-mlp", "LoRA", _make(_further_images, rank=4), 200),
    Problem("lora-gpt", "LoRA", _make(_further_text, rank=2), 150),
    Problem("white-noise", _IDLE, _white_noise, 300),
    Problem("entries", _IDLE, _entries, 300, 3.2e-2),
    Problem("bigrams", _IDLE, _make(_sequences, kind="words", build=tiny.Bigrams), 300, 3.2e-2),
]

PROBLEMS: Mapping[str, Problem] = {problem.id: problem for problem in _LIST}
