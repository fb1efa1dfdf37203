"""The demo's second half: a small language model, AdamW beside ``egop.EGOP``, by the clock.

The text is there wherever egop is: its own source, as bytes; the last tenth is for validation. Both optimizers have
the same start, batches, schedule (warm-up, then constant, then linear to zero), decays, weight decay and learning rate:
the one of a grid by factors of two at which AdamW's validation loss after the 200 steps of seed 0 is lowest.

    AdamW  0.001: 2.313   **0.002: 2.091**   0.004: 2.139   0.008: 2.370
    EGOP                  **0.002: 1.485**   0.004: 1.346   0.008: 1.355   0.016: 1.425

The text changes with every version of egop, and these numbers with it, a little.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm

import egop
from egop_lab.data.text import Text, Windows
from egop_lab.formatting import format_table
from egop_lab.models.gpt import GPT, initialize_
from egop_lab.plots.picture import Panel, Series, Span
from egop_lab.training.loop import train

STEPS = 200
EVERY = 10  # steps per turn, and between two evaluations
LEARNING_RATES = {"AdamW": 2e-3, "EGOP": 2e-3}
RATES = "Both at AdamW's best learning rate of a grid by factors of two, found with 200 steps of seed 0."
_SIZES = {"layers": 3, "width": 96, "heads": 4, "context": 64}
_BATCH, _HELD = 32, 32  # windows in a batch, and of validation text
_WARM_UP, _DECAY = 40, 0.4  # in steps, and as a share of all steps


@dataclass(frozen=True)
class LanguageRun:
    """One of the two alternating training runs; index 0 is the start."""

    optimizer: str
    lr: float
    loss: tuple[float, ...]
    seconds: tuple[float, ...]
    steps: tuple[int, ...]

    def reached(self, loss: float) -> tuple[int, float] | None:
        """Return the steps and seconds after which the loss is at most this, or None."""
        turns = zip(self.steps, self.seconds, self.loss, strict=True)
        return next(((steps, seconds) for steps, seconds, value in turns if value <= loss), None)


@dataclass(frozen=True)
class Language:
    """Results of the demo's second half, the language model."""

    parameters: int
    characters: int
    runs: tuple[LanguageRun, LanguageRun]

    @property
    def reached(self) -> tuple[int, float] | None:
        """Steps and seconds in which EGOP reaches AdamW's final loss, or None."""
        adamw, rotated = self.runs
        return rotated.reached(adamw.loss[-1])


def run(*, steps: int = STEPS, seed: int = 0, progress: bool = True) -> Language:
    """Train with AdamW and EGOP, alternating between them."""
    text = read_own_source()
    sides = [_Side(name, lr, text, steps, seed) for name, lr in LEARNING_RATES.items()]
    with tqdm(total=2 * steps, desc="language model, in turns", unit="step", disable=not progress) as bar:
        for count in (min(EVERY, steps - first) for first in range(0, steps, EVERY)):
            for side in sides:
                side.train(count)
                bar.update(count)
            bar.set_postfix_str(", ".join(f"{side.name} {side.loss[-1]:.2f}" for side in sides), refresh=False)
    size = sum(parameter.numel() for parameter in sides[0].model.parameters())
    adamw, rotated = (side.to_run() for side in sides)
    return Language(size, len(text.train) + len(text.validation), (adamw, rotated))


def read_own_source() -> Text:
    """Read egop's own source as bytes."""
    folder = Path(str(resources.files("egop")))
    source = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    whole = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return Text(*whole.split([len(whole) - len(whole) // 10, len(whole) // 10]))


class _Side:
    """One of the two trainings."""

    def __init__(self, name: str, lr: float, text: Text, steps: int, seed: int) -> None:
        self.name, self.lr, self._text = name, lr, text
        self.model = GPT(**_SIZES)
        initialize_(self.model, torch.Generator().manual_seed(seed))
        self._optimizer = _optimizer(name, self.model, lr)
        self._scheduler = LambdaLR(self._optimizer, lambda step: _factor(step, steps))
        self._held = text.windows(_SIZES["context"] + 1, _HELD)
        self._generator = torch.Generator().manual_seed(seed)
        self.loss: list[float] = []
        self.seconds, self.steps = [0.0], [0]

    def train(self, steps: int) -> None:
        """Train for some more steps, and evaluate."""
        seed = int(torch.randint(2**31, (), generator=self._generator))
        length = _SIZES["context"] + 1
        batches = Windows(self._text.train, length=length, size=_BATCH, count=steps, seed=seed)
        curve = train(
            self.model,
            self._optimizer,
            _loss,
            batches,
            1,
            evaluate=lambda model: {"loss": _loss(model, self._held)},
            progress=False,
            scheduler=self._scheduler,
        )
        self.loss = [*(self.loss or curve.loss[:1]), curve.final]
        self.seconds.append(self.seconds[-1] + curve.seconds)
        self.steps.append(self.steps[-1] + steps)

    def to_run(self) -> LanguageRun:
        return LanguageRun(self.name, self.lr, tuple(self.loss), tuple(self.seconds), tuple(self.steps))


def _optimizer(name: str, model: nn.Module, lr: float) -> Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return egop.EGOP(model, lr=lr, weight_decay=0.1)


def _factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm-up, constant, and linear to zero."""
    return min(1.0, (step + 1) / min(_WARM_UP, max(1, steps // 2)), (steps - step) / max(1.0, _DECAY * steps))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the cross-entropy of every next byte, in nats."""
    batch = batch.long()
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def format_runs(language: Language) -> str:
    """Return the final numbers of both runs as a table."""
    rows = []
    for run in language.runs:
        reached = run.reached(language.runs[0].loss[-1])
        to_loss = ["never", "never"] if reached is None else [str(reached[0]), f"{reached[1]:.1f}"]
        rows.append([run.optimizer, f"{run.lr:g}", f"{run.loss[-1]:.3f}", *to_loss, f"{run.seconds[-1]:.1f}"])
    header = ["optimizer", "lr", "validation loss", "steps to same loss", "seconds to same loss", "seconds"]
    title = f"A language model: {language.parameters:,} parameters, {language.characters:,} bytes of text"
    legend = "same loss: as low as AdamW's final validation loss"
    return f"{title}\n\n{format_table(header, rows)}\n\n{legend}"


def panel(language: Language) -> Panel:
    """Draw the validation loss by seconds, and how much of AdamW's time is saved."""
    adamw, rotated = language.runs
    series = [
        Series(f"{run.optimizer}, lr {run.lr:g}", run.seconds, run.loss, method=run.optimizer, egop=run is rotated)
        for run in language.runs
    ]
    spans = []
    if language.reached is not None and language.reached[1] < adamw.seconds[-1]:
        words = f"the same loss in {language.reached[1]:.1f} of {adamw.seconds[-1]:.1f} s"
        spans = [Span(words, adamw.seconds[-1], language.reached[1], adamw.loss[-1], rotated.optimizer)]
    return Panel("A language model", "seconds of training", "validation loss", series, yscale="linear", spans=spans)


def summary(language: Language) -> str:
    """Return the closing words, computed from the numbers."""
    adamw, rotated = language.runs
    slower = rotated.seconds[-1] / adamw.seconds[-1]
    cost = f"A step of EGOP takes {slower:.2f} times AdamW's here."
    ends = f"It ends at {rotated.loss[-1]:.2f} nats for each byte, AdamW at {adamw.loss[-1]:.2f}."
    if language.reached is None:
        return f"EGOP does not reach AdamW's last loss in {rotated.steps[-1]} steps. {ends} {cost}"
    steps, seconds = language.reached
    took = adamw.seconds[-1]
    by_clock = f"{took / seconds:.1f} times as long" if seconds < took else "which is no gain by the clock"
    return (
        f"EGOP matches AdamW's final loss after {steps} of {rotated.steps[-1]} steps, in {seconds:.1f} s; AdamW took "
        f"{took:.1f} s, {by_clock}. {ends} {cost}"
    )
