"""What follows the draws: gradients where the training stands, what each form brings and takes, a learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from egop.basis import ONLINE_CANDIDATES, Basis, Block, Role, make_plan, partition_parameters
from egop.diagnostics import costs, forms, off_axes
from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.curvature import PROBES, curvature
from egop.diagnostics.evidence import evidence
from egop.diagnostics.expected import FormDiagnosis
from egop.diagnostics.factories import first_line
from egop.diagnostics.learning_rates import STEPS, rate_of
from egop.estimation import Objective

__all__ = ["Following", "rotatable"]

# The gradients of so many batches are looked at where the training stands, and those of so many steps of AdamW from
# there, or a twentieth of the training where that is less. The rate of these steps is AdamW's own.
_BATCHES, _EARLY, _PART, _RATE = 32, 15, 0.05, 1e-3
# About so many runs are needed for a learning rate, of so many steps at least.
_RUNS, _FEWEST = 8, 10


class Following:
    """What follows the draws: each stage adds to a diagnosis and is shown; Ctrl-C ends with what is there."""

    def __init__(
        self,
        objective: Objective,
        weights: list[Block],
        steps: int | None,
        budget: float,
        seed: int,
        bar: tqdm,
        show: Callable[[Diagnosis], object],
    ) -> None:
        self.objective, self.weights, self.steps, self.budget = objective, weights, steps, budget
        self.seed, self.bar, self.show = seed, bar, show

    def of(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis with all stages, or those until Ctrl-C."""
        for stage, missing in (
            (self.gradients, "the gradients of the training have not been looked at"),
            (self.forms, "the steps of the forms have not been timed"),
            (self.rate, "no learning rate has been looked for"),
        ):
            self.show(replace(diagnosis, partial=f"{missing} yet"))
            try:
                diagnosis = stage(diagnosis)
                self.bar.total = self.bar.n  # a stage may need fewer parts than it may take
                self.bar.refresh()
            except KeyboardInterrupt:
                return replace(diagnosis, partial=f"interrupted: {missing}")
        return diagnosis

    def begin(self, words: str, count: int) -> Callable[[], object]:
        """Go on with the bar; what is to be called after each of so many parts."""
        self.bar.set_description(words)
        self.bar.total = self.bar.n + count
        return lambda: self.bar.update()

    def gradients(self, diagnosis: Diagnosis) -> Diagnosis:
        """Where the training stands, and along a few steps of it."""
        early = _EARLY if self.steps is None else min(_EARLY, max(2, round(_PART * self.steps)))
        tick = self.begin("Looking at gradients", _BATCHES + early + 2 * PROBES)
        here = off_axes.here(self.objective, self.weights, _BATCHES, self.seed, tick)
        along = off_axes.along(self.objective, self.weights, early, _RATE, self.seed, tick)
        basis = diagnosis.basis
        diagnosis = replace(diagnosis, here=here, along=along)
        if basis is None:
            return diagnosis
        try:
            return replace(diagnosis, curvature=curvature(self.objective, basis, self.seed, tick))
        except RuntimeError as error:  # of memory, or of an operation without second derivative
            return replace(diagnosis, without_curvature=first_line(error))

    def forms(self, diagnosis: Diagnosis) -> Diagnosis:
        """What each form is expected to bring, and what it takes here."""
        against = _against(diagnosis, self.objective, self.weights)
        tick = self.begin("Timing steps", forms.TURNS * sum(not words for words in against.values()))
        found = []
        for name, words in against.items():
            similar = evidence().similar(None if diagnosis.curvature is None else diagnosis.curvature.promise)
            form = FormDiagnosis(name, tuple(sorted(problem.steps[name] for problem in similar)), against=words)
            if not words:
                form = self.timed(form, diagnosis, tick)
            found.append(form)
        return replace(diagnosis, forms=tuple(found))

    def timed(self, form: FormDiagnosis, diagnosis: Diagnosis, tick: Callable[[], object]) -> FormDiagnosis:
        """A form with what it takes, measured and predicted."""
        assert diagnosis.pass_seconds is not None
        basis = _promising(diagnosis) if form.name == forms.FIXED else None
        try:
            taken = forms.measured(self.objective, form.name, basis, self.seed, tick)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return replace(form, against=f"it does not fit into memory ({first_line(error)})")
        if not taken.blocks:
            return replace(form, against="it leaves every weight of this model as it is")
        usual = diagnosis.pass_seconds + taken.plain
        device = self.objective.parameters[next(iter(taken.blocks)).parameters[0]].device
        before = diagnosis.draws * diagnosis.pass_seconds / (self.steps * usual) if self.steps is not None else 0.0
        return replace(
            form,
            step=(diagnosis.pass_seconds + taken.seconds) / usual,
            predicted=1 + costs.of_form(form.name, taken.blocks, device) / usual,
            bytes=taken.bytes,
            before=before if form.name == forms.FIXED else 0.0,
        )

    def rate(self, diagnosis: Diagnosis) -> Diagnosis:
        """A learning rate for what is advised."""
        form = diagnosis.advised
        if form is None or form.step is None or diagnosis.pass_seconds is None:
            return diagnosis
        fitting = self.budget / (_RUNS * form.step * diagnosis.pass_seconds)
        length = min(STEPS, int(fitting))
        if length < _FEWEST:
            return replace(
                diagnosis, without_rate=f"looking for one would take more than budget={self.budget:g} seconds"
            )
        tick = self.begin("Trying learning rates", _RUNS)
        make = forms.maker(form.name, _promising(diagnosis))
        try:
            found = rate_of(self.objective, make, steps=length, seed=self.seed, tick=tick)
        except ValueError as error:
            return replace(diagnosis, without_rate=str(error))
        return replace(diagnosis, rate=found)


def rotatable(objective: Objective, layers: dict[str, Role], memory: int) -> list[Block]:
    """What could be rotated: what ``Online`` takes; where that is nothing, all matrices; of a function all tensors."""
    blocks = partition_parameters(objective.parameters, layers, "parameter")
    if objective.module is None:
        return blocks
    try:
        chosen = list(make_plan(blocks, layers, "auto", memory, ONLINE_CANDIDATES).chosen)
    except MemoryError:
        chosen = []
    return chosen or [block for block in blocks if len(block.shapes[0]) > 1]


def _promising(diagnosis: Diagnosis) -> Basis | None:
    """The basis of the blocks that are promising."""
    good = [block.name for block in diagnosis.blocks if block.verdict == "promising"]
    changes = [] if diagnosis.basis is None else [diagnosis.basis[name] for name in good if name in diagnosis.basis]
    return Basis(changes) if changes else None


def _against(diagnosis: Diagnosis, objective: Objective, weights: list[Block]) -> dict[str, str]:
    """Why each form cannot be advised, whatever it takes; nothing where it can."""
    least, found = evidence().threshold, diagnosis.curvature
    seen = [each for each in (diagnosis.here, diagnosis.along) if each is not None]
    words = ""
    if not weights:
        words = "there is no weight that a basis could be found for"
    elif seen and not any(each.is_seen for each in seen):
        words = "gradients do not lie off the axes more than noise would, neither here nor after a few steps"
    elif found is not None and found.promise < least:
        words = "so little curvature is on the axes of the draws' basis that no problem like it gained a tenth"
    against = dict.fromkeys(forms.FORMS, words)
    if not words and _promising(diagnosis) is None:
        against[forms.FIXED] = "no block is promising"
    if not words and objective.module is None:
        others = [form for form in forms.FORMS if form != forms.FIXED]
        against |= dict.fromkeys(others, "a function of tensors has no layers to follow")
    return against
