"""The demo's first half: the paper's digits network, in original and in EGOP coordinates from equivalent starts.

Learning rates were chosen for the original coordinates alone, by the paper's rule, and are used in both: for each
optimizer the highest median, over seeds 1 to 9, of the best validation accuracy within 100 epochs, on a grid of powers
of ten with doubling in between; ties go to the lower median of the final training loss. Around the best:

    Adam     0.04: 95.82 %   **0.08: 96.32 %**   0.1: 95.99 %            0.2: 90.80 %
    Adagrad  0.04: 94.98 %   0.08: 95.15 %       **0.1: 95.15 %** (tie)  0.2: 94.65 %   0.4: 95.15 %
    SGD      0.4: 95.32 %    0.8: 95.48 %        **1: 95.65 %**          2: 37.79 %

The demo trains once, with one seed. It shows what happens; it is not a measurement of how often.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import egop
from egop_lab.builders import build_torch_optimizer
from egop_lab.data.batches import Batches, DataSet
from egop_lab.data.digits import digits
from egop_lab.experiments import demo_language
from egop_lab.formatting import format_table, pluralize
from egop_lab.models.small import cross_entropy, digits_network, scores, xavier_
from egop_lab.plots.picture import Panel, Picture, Series, Span
from egop_lab.training.loop import Curve, train

EPOCHS = 100
BATCH_SIZE = 300
LEARNING_RATES = {"Adam": 0.08, "Adagrad": 0.1, "SGD": 1.0}

# Curves whose losses differ by less than this in the median epoch are the same up to rounding. Not in every epoch:
# where the loss jumps, training amplifies rounding for a while.
_SAME = 0.01


@dataclass(frozen=True)
class Run:
    """A curve and the settings of its training; ``coordinates`` is "original" or "EGOP"."""

    optimizer: str
    coordinates: str
    lr: float
    curve: Curve


@dataclass(frozen=True)
class Demo:
    """Everything the demo found; the table, the picture and the closing words are made from it."""

    epochs: int
    seed: int
    estimation_seconds: float  # to sample the gradients and find the basis
    spectra: Mapping[str, tuple[float, ...]]  # eigenvalues of each block, descending, by block name
    runs: tuple[Run, ...]  # for each optimizer in original, then in EGOP coordinates

    def pairs(self) -> list[tuple[Run, Run]]:
        """Return the runs of each optimizer in original and in EGOP coordinates."""
        return list(zip(self.runs[::2], self.runs[1::2], strict=True))


def run(
    *, epochs: int = EPOCHS, seed: int = 0, progress: bool = True, show: Callable[[str], None] | None = None
) -> Demo:
    """Estimate the basis, pass it to ``show`` as text, then train with each optimizer in both coordinate systems."""
    data = digits()
    start = xavier_(digits_network(), _generator(seed, "start"))
    began = time.perf_counter()
    basis = _estimate(start, data, seed, progress)
    estimation_seconds = time.perf_counter() - began
    if show is not None:
        show(str(basis))
    runs = []
    for name, lr in LEARNING_RATES.items():
        for coordinates, given in (("original", None), ("EGOP", basis)):
            model = copy.deepcopy(start)
            curve = train(
                model,
                build_torch_optimizer(name, model, lr, given),
                cross_entropy,
                Batches(*data.train.batch, size=BATCH_SIZE, generator=_generator(seed, "training batches")),
                epochs,
                evaluate=lambda model: scores(model, *data.to("cpu")),
                progress=progress,
                description=f"{name:>7}, {coordinates:<8} coordinates",
            )
            runs.append(Run(optimizer=name, coordinates=coordinates, lr=lr, curve=curve))
    spectra = {name: tuple(spectrum.eigenvalues.tolist()) for name, spectrum in basis.spectrum.items()}
    return Demo(epochs, seed, estimation_seconds, spectra, tuple(runs))


def _generator(seed: int, purpose: str) -> torch.Generator:
    """Return an independent random stream for each purpose, so that the start is not also the first sampled point."""
    purposes = ("start", "training batches", "sampling", "sampling batches")
    return torch.Generator().manual_seed(len(purposes) * seed + purposes.index(purpose))


def _estimate(model: nn.Module, data: DataSet, seed: int, progress: bool) -> egop.Basis:
    batches = Batches(*data.train.batch, size=BATCH_SIZE, generator=_generator(seed, "sampling batches"))
    return egop.estimate(
        egop.Objective(model, cross_entropy, batches),
        rho=egop.Initialization(init_fn=xavier_),
        partition="layer",
        structure=egop.Full(),
        generator=_generator(seed, "sampling"),
        progress=progress,
    )


def format_runs(demo: Demo) -> str:
    """Return the final numbers of all runs as a table."""
    rows = []
    for original, reparameterized in demo.pairs():
        for run in (original, reparameterized):
            curve = run.curve
            reached = curve.epochs_to(original.curve.final)
            loss = "diverged" if curve.diverged else f"{curve.final:.2e}"
            numbers = [f"{run.lr:g}", loss, f"{curve.metrics['test accuracy'][-1]:.1%}"]
            numbers += ["never" if reached is None else str(reached), f"{curve.seconds:.1f}"]
            rows.append([f"{run.optimizer}, {run.coordinates}", *numbers])
    header = ["optimizer, coordinates", "lr", "final loss", "test accuracy", "same loss", "seconds"]
    table = format_table(header, rows)
    title = f"After {pluralize(demo.epochs, 'epoch')}, from equivalent starts"
    return f"{title}\n\n{table}\n\nsame loss: epochs until as low as the final loss in original coordinates"


def picture(demo: Demo, language: demo_language.Language | None) -> Picture:
    """Put both halves side by side; the second one may be left out."""
    others = [] if language is None else [demo_language.panel(language)]
    caption = "Training loss of the digits network by epoch, and validation loss of a language model by seconds."
    return Picture("demo", caption, [panel(demo), *others])


def panel(demo: Demo) -> Panel:
    """Draw the training loss by epoch, and how much of the training EGOP coordinates save."""
    series: list[Series] = []
    spans: list[Span] = []
    for original, reparameterized in demo.pairs():
        for run in (original, reparameterized):
            label = run.optimizer if run is original else f"{run.optimizer}, EGOP"
            turned = run is reparameterized
            series.append(Series(label, range(len(run.curve.loss)), run.curve.loss, method=run.optimizer, egop=turned))
        saved = _find_saving(original, reparameterized)
        if saved is not None and not spans:  # the first optimizer's: more would hide the lines
            words = f"the same loss after {saved} of {demo.epochs} epochs"
            spans.append(Span(words, demo.epochs, saved, original.curve.final, original.optimizer))
    return Panel("The digits network", "epoch", "training loss", series, spans=spans)


def _find_saving(original: Run, reparameterized: Run) -> int | None:
    """Return the epoch in which EGOP coordinates reach the original's final loss, if earlier and if they differ."""
    before, after = original.curve, reparameterized.curve
    if before.diverged or after.diverged or _median_difference(before, after) < _SAME:
        return None
    reached = after.epochs_to(before.final)
    return reached if reached is not None and reached < len(before.loss) - 1 else None


def summary(demo: Demo) -> str:
    """Return the closing words, computed from the numbers."""
    sentences = [_verdict(original, reparameterized, demo.epochs) for original, reparameterized in demo.pairs()]
    before, after = (sum(run.curve.seconds for run in runs) for runs in (demo.runs[::2], demo.runs[1::2]))
    cost = f"On this small network training in EGOP coordinates takes {after / before:.2g} times as long."
    return " ".join([*sentences, cost, f"One seed ({demo.seed}), so this shows what can happen, not how often."])


def _verdict(original: Run, reparameterized: Run, epochs: int) -> str:
    name, before, after = original.optimizer, original.curve, reparameterized.curve
    if before.diverged or after.diverged:
        where = [run.coordinates for run in (original, reparameterized) if run.curve.diverged]
        return f"{name} diverged in {' and '.join(where)} coordinates."
    difference = _median_difference(before, after)
    if difference < _SAME:
        return (
            f"{name} is the same in both coordinate systems (in the median epoch, losses differ by {difference:.1g} of "
            "their size)."
        )
    reached = after.epochs_to(before.final)
    speed = (
        f"reaches the original's final loss after {reached} of {epochs} epochs"
        if reached is not None
        else f"does not reach the original's final loss in {epochs} epochs"
    )
    return f"{name} in EGOP coordinates {speed} and ends {_compare_losses(after.final, before.final)}."


def _compare_losses(loss: float, reference: float) -> str:
    if loss == 0:
        return "at zero"
    return f"{reference / loss:.2g} times lower" if loss < reference else f"{loss / reference:.2g} times higher"


def _median_difference(first: Curve, second: Curve) -> float:
    pairs = zip(first.loss, second.loss, strict=True)
    return statistics.median(abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs)
