"""Models with their data on a device: what a run trains and evaluates."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from egop_lab.data.text import Windows, cut_windows
from egop_lab.gpu import capture_graphs, compute_outputs
from egop_lab.models import gpt, residual, vit
from egop_lab.race.data import hash_tensors, load_images, load_text
from egop_lab.race.tasks import Task

Batch = tuple[Tensor, Tensor]  # inputs and targets


class Loss(nn.Module):
    """Mean cross-entropy, in nats; the model computes in bfloat16 on a GPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        return F.cross_entropy(compute_outputs(self.model, inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a model learns from.

    Attributes:
        draw: returns training batches, from a seed and their number.
        parts: batches of the parts ``"curve"`` (some validation data, used during a run), ``"validation"``, ``"test"``.
        digest: hash of all parts, for records.
    """

    draw: Callable[[int, int], Iterable[Batch]]
    parts: Mapping[str, Sequence[Batch]]
    digest: str


class Problem:
    """A model and its data; made once for each task and used for all its runs.

    Args:
        task: sizes of model and batch.
        folder: where the data are.
        device: where to train.
        fast: on a GPU, replay training as a CUDA graph, or compile it if the task says so.
    """

    def __init__(self, task: Task, folder: str | None, device: torch.device, *, fast: bool = True) -> None:
        self.device = device
        self.data = (_read_text if task.network == "gpt" else _read_images)(task, folder, device)
        build, self._initialize = _NETWORKS[task.network]
        self._initial = build(task.model)  # on the CPU, where a seed gives the same numbers everywhere
        self.model = build(task.model).to(device)
        self.hidden = list(_find_hidden(self.model, task.network))
        self.loss: Callable[..., Tensor] = Loss(self.model)
        if device.type == "cuda":
            if task.network != "gpt":
                self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if fast:
                (sample,) = self.data.draw(0, 1)
                self.loss = torch.compile(self.loss) if task.compiled else capture_graphs(Loss(self.model), *sample)

    def reset(self, seed: int) -> None:
        """Initialise the model."""
        self._initialize(self._initial, torch.Generator().manual_seed(seed))
        self.model.load_state_dict(self._initial.state_dict())
        self.model.zero_grad()

    def batches(self, seed: int, steps: int) -> Iterable[Batch]:
        """Return one training batch for each step."""
        return self.data.draw(2 * seed, steps)

    @torch.no_grad()
    def evaluate(self, part: str) -> dict[str, float]:
        """Compute loss and accuracy on a part, in evaluation mode."""
        self.model.eval()
        sums, count = torch.zeros(2, dtype=torch.float64), 0
        for inputs, targets in self.data.parts[part]:
            logits = compute_outputs(self.model, inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
            right = (logits.argmax(-1) == targets).double().mean()
            sums += torch.stack((loss.double(), right)).cpu() * len(inputs)
            count += len(inputs)
        self.model.train()
        return dict(zip(("loss", "accuracy"), (sums / count).tolist(), strict=True))


def make_problem(task: Task, folder: str | None, device: torch.device, *, fast: bool = True) -> Problem:
    """Make the problem of a task. Keep only one per process: discarding one CUDA graph can break another."""
    gc.collect()  # the last one may be part of a cycle
    return Problem(task, folder, device, fast=fast)


_NETWORKS: dict[str, tuple[Callable[[Mapping[str, Any]], nn.Module], Callable[..., nn.Module]]] = {
    "gpt": (lambda sizes: gpt.GPT(**sizes), gpt.initialize_),
    "resnet": (lambda sizes: residual.ResidualNetwork(**sizes), residual.initialize_),
    "vit": (lambda sizes: vit.VisionTransformer(**sizes), vit.initialize_),
}


def _find_hidden(model: nn.Module, network: str) -> Iterator[str]:
    """Yield the names of the weights that methods step: a GPT's blocks, or all layers of a classifier but the last."""
    if network == "gpt":
        yield from (n for n, weight in model.named_parameters() if n.startswith("blocks.") and weight.dim() > 1)
    else:
        layers = [name for name, part in model.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)]
        yield from (f"{name}.weight" for name in layers[:-1])


def _read_text(task: Task, folder: str | None, device: torch.device) -> Data:
    """Load a text; batches are windows at random places or, of tokens, all windows in a new order on every pass."""
    length = task.model["context"] + 1
    text = load_text(task.data, folder, device, task.model.get("vocabulary", 256))
    windows = {
        "curve": cut_windows(text.validation, length, task.windows),
        "validation": cut_windows(text.validation, length),
        "test": cut_windows(text.test, length),
    }
    size = task.batch // 4 if task.data == "code" else 2 * task.batch  # many logits take much memory
    parts = {part: [_shift(some) for some in every.split(size)] for part, every in windows.items()}

    def draw(seed: int, steps: int) -> Iterator[Batch]:
        if task.data == "code":
            shuffled = _shuffle(cut_windows(text.train, length), task.batch, seed)
            return map(_shift, itertools.islice(shuffled, steps))
        return map(_shift, Windows(text.train, length=length, size=task.batch, count=steps, seed=seed))

    return Data(draw=draw, parts=parts, digest=text.digest)


def _shift(windows: Tensor) -> Batch:
    windows = windows.long()
    return windows[:, :-1], windows[:, 1:]


def _shuffle(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        for some in order[: len(rows) // size * size].split(size):
            yield rows[some]


def _read_images(task: Task, folder: str | None, device: torch.device) -> Data:
    """Load images: random crops to train with, central crops of two halves of the validation images."""
    images = load_images(task.data, folder, device, task.crop)
    views = [(views[:, 0], labels) for views, labels in images.validation(ten=False)]
    inputs, labels = (torch.cat(each) for each in zip(*views, strict=True))
    halves = [list(zip(inputs[half::2].split(500), labels[half::2].split(500), strict=True)) for half in (0, 1)]
    parts = {"curve": halves[0], "validation": halves[0], "test": halves[1]}

    def draw(seed: int, steps: int) -> Iterator[Batch]:
        passes = itertools.repeat(images.training(task.batch, seed))
        return itertools.islice(itertools.chain.from_iterable(passes), steps)

    return Data(draw=draw, parts=parts, digest=hash_tensors(*images.train, *images.held_out))
