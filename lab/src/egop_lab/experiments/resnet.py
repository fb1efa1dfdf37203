"""ResNet-34 on images: AdamW in both coordinate systems, SOAP and Muon; epochs and seconds to a validation loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from egop_lab.experiments.base import Experiment, Judgement, Preset, Table, add_alternatives
from egop_lab.experiments.resnet_long import LongRuns
from egop_lab.experiments.resnet_runs import ShortRuns
from egop_lab.plots.picture import Picture
from egop_lab.training.context import Context
from egop_lab.training.records import Store

_IMAGENETTE = 9469  # training images
_STEPS_THERE = 10_000  # in an epoch of the paper: 1.28 million images by 128


class ResnetExperiment(Experiment):
    """The paper's table of epochs and time at small scale, with more methods.

    A claim is judged by the long runs where its methods have all of theirs, else by the short ones.
    """

    id: ClassVar[str] = ShortRuns.id

    def __init__(self, preset: Preset = "quick", store: Store | None = None) -> None:
        super().__init__(preset, store)
        self.short, self.long = ShortRuns(preset, self.store), LongRuns(preset, self.store)

    @property
    def settings(self) -> dict[str, Any]:
        short = self.short.settings
        if self.preset == "quick":
            return short
        long = self.long.settings
        return short | {
            "methods": list(dict.fromkeys([*long["methods"], *short["methods"]])),
            "epochs": f"{long['epochs']}; {short['epochs']} in the short runs",
            "tuning epochs": f"{long['tuning epochs']}; {short['tuning epochs']} in the short runs",
            "further rates": long["further rates"],
            "target": f"{long['target']}; in the short runs {short['target']}",
        }

    def run(self, context: Context) -> None:
        if self.preset == "full":
            self.long.run(context)
        self.short.run(context)

    def judge(self) -> list[Judgement]:
        long = {each.id: each for each in self.long.judge()} if self.preset == "full" else {}
        short = self.short.judge()
        rule = f"{self.short.settings['epochs']} epochs"
        return add_alternatives(
            [long.get(each.id, each) for each in short], rule, [replace(each, alternatives=()) for each in short]
        )

    def pictures(self) -> list[Picture]:
        long = self.long.pictures() if self._long_methods() else []
        return [*long, *self.short.pictures()]

    def tables(self) -> list[Table]:
        long = self.long.tables() if self._long_methods() else []
        return [*long, *self.short.tables()]

    def remarks(self) -> list[str]:
        run = self.short.finished_runs()[-1]
        counts = run.config["data"]
        whose = "Imagenette's" if counts["train"] == _IMAGENETTE else "a folder's"
        remark = (
            f"The images are {whose} {counts['train']:,} of {counts['classes']} classes at {run.config['crop']} px, "
            f"not ImageNet's 1.28 million of 1,000 classes at 224 px, and there are {self._epochs()} "
            "epochs of them, not 40: what is found is about this small task."
        )
        steps = counts["train"] // run.config["batch"]
        renewed = (
            f"An epoch has {steps} steps here and {_STEPS_THERE:,} in the paper: what is renewed each epoch is renewed "
            f"{_STEPS_THERE / steps:.0f} times as often by steps, and costs as much more of the time. SOAP 100 is "
            "renewed less than once an epoch here, a hundred times there."
        )
        return [remark, renewed, *self._long_remark()]

    def _epochs(self) -> int:
        runs = self.long if self._long_methods() else self.short
        return int(runs.settings["epochs"])

    def _long_methods(self) -> list[str]:
        """Return the methods that have all of their long runs, if there are enough of them to judge by."""
        return list(self.long.complete_runs()) if self.preset == "full" else []

    def _long_remark(self) -> list[str]:
        settings, there = self.long.settings, self._long_methods()
        missing = [method for method in settings["methods"] if method not in there] if self.preset == "full" else []
        length, names = f"{settings['epochs']} epochs", ", ".join(missing)
        return [f"Not run with {length}: {names}; what is claimed of these is judged by short runs."] if missing else []
