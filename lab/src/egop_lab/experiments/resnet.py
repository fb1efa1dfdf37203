"""ResNet-34 on ImageNet images: AdamW in both coordinates, SOAP and Muon; epochs and seconds to a validation loss."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from egop_lab.experiments.base import Experiment, Judgement, Table, add_alternatives
from egop_lab.experiments.resnet_long import LongRuns
from egop_lab.experiments.resnet_runs import ShortRuns
from egop_lab.plots.picture import Picture
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Store

_IMAGENETTE = 9469  # training images
_STEPS_THERE = 10_000  # in an epoch of the paper: 1.28 million images by 128


class ResnetExperiment(Experiment):
    """The paper's table of epochs and time at small scale, with more methods.

    A claim is judged by the long runs where its methods have all of theirs, else by the short ones.
    """

    id: ClassVar[str] = ShortRuns.id
    title: ClassVar[str] = ShortRuns.title
    figures: ClassVar[str] = ShortRuns.figures
    labels: ClassVar[tuple[str, ...]] = (
        "fig:new-resnet-fig-plus-table",
        "table:wallclock-time",
        "fig:ResNet-sup-val",
        "fig:ResNet-sup",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "data": "ImageNet, 1.28 million images of 1000 classes, on an RTX 6000 Ada",
        "rates": "a logarithmic sweep from 1e-05 to 1",
        "trials": "not named; median ± standard deviation",
        "epochs": "40",
        "tuning epochs": "10",
        "rate": "the highest accuracy of ten crops after the tuning epochs",
        "batch": "128",
        "weight decay": "0.0001",
        "side": "256",
        "crop": "224",
        "precision": "not named",
        "validation": "ten crops",
        "rho": "re-centred at the latest iterate",
        "target": "1.3, within 5 % of SOAP 100's lowest validation loss",
        "SOAP": "renewed never, every 100 and every 10000 steps (an epoch)",
    }
    short: ClassVar[ShortRuns] = ShortRuns()
    long: ClassVar[LongRuns] = LongRuns()

    def settings(self, preset: Preset) -> dict[str, Any]:
        short = self.short.settings(preset)
        if preset == "quick":
            return short
        long = self.long.settings(preset)
        return short | {
            "methods": list(dict.fromkeys([*long["methods"], *short["methods"]])),
            "epochs": f"{long['epochs']}; {short['epochs']} in the short runs",
            "tuning epochs": f"{long['tuning epochs']}; {short['tuning epochs']} in the short runs",
            "further rates": long["further rates"],
            "target": f"{long['target']}; in the short runs {short['target']}",
        }

    def run(self, store: Store, context: Context, *, processes: int = 1) -> None:
        """Do the runs that the store does not have yet, the long ones first: by order of importance.

        Args:
            store: the store of finished runs.
            context: preset, device, data, time.
            processes: number of processes that share the device for long runs. These are not timed: each method
                has one run that has the device to itself.
        """
        began = time.monotonic()
        if context.preset == "full" and not self.long.run_missing(store, context, processes):
            return
        if context.time_budget is not None:
            context = replace(context, time_budget=context.time_budget - (time.monotonic() - began))
        self.short.run(store, context)

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        long = {each.id: each for each in self.long.judge(store, preset)} if preset == "full" else {}
        short = self.short.judge(store, preset)
        rule = f"{self.short.settings(preset)['epochs']} epochs"
        return add_alternatives(
            [long.get(each.id, each) for each in short], rule, [replace(each, alternatives=()) for each in short]
        )

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        long = self.long.pictures(store, preset) if self._long_methods(store, preset) else []
        return [*long, *self.short.pictures(store, preset)]

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        long = self.long.tables(store, preset) if self._long_methods(store, preset) else []
        return [*long, *self.short.tables(store, preset)]

    def remarks(self, store: Store, preset: Preset) -> list[str]:
        run = self.short.finished_runs(store, preset)[-1]
        counts = run.config["data"]
        whose = "Imagenette's" if counts["train"] == _IMAGENETTE else "a folder's"
        remark = (
            f"The images are {whose} {counts['train']:,} of {counts['classes']} classes at {run.config['crop']} px, "
            f"not ImageNet's 1.28 million of 1,000 classes at 224 px, and there are {self._epochs(store, preset)} "
            "epochs of them, not 40: what is found is about this small task."
        )
        steps = counts["train"] // run.config["batch"]
        renewed = (
            f"An epoch has {steps} steps here and {_STEPS_THERE:,} in the paper: what is renewed each epoch is renewed "
            f"{_STEPS_THERE / steps:.0f} times as often by steps, and costs as much more of the time. SOAP 100 is "
            "renewed less than once an epoch here, a hundred times there."
        )
        return [remark, renewed, *self._long_remark(store, preset)]

    def _epochs(self, store: Store, preset: Preset) -> int:
        runs = self.long if self._long_methods(store, preset) else self.short
        return int(runs.settings(preset)["epochs"])

    def _long_methods(self, store: Store, preset: Preset) -> list[str]:
        """Return the methods that have all of their long runs, if there are enough of them to judge by."""
        if preset != "full":
            return []
        return list(self.long.complete_runs(store, preset))

    def _long_remark(self, store: Store, preset: Preset) -> list[str]:
        if preset != "full":
            return []
        settings = self.long.settings(preset)
        length = f"{settings['epochs']} epochs"
        there = self._long_methods(store, preset)
        if not there:
            begun = self.long.reported_runs(store, preset)
            return [f"Not run{' to their end' if begun else ''}: runs of {length}."]
        if missing := [method for method in settings["methods"] if method not in there]:
            return [f"Not run with {length}: {', '.join(missing)}; what is claimed of these is judged by short runs."]
        late = self.long.still_falling(store, preset)
        remark = (
            f"{len(late)} of {len(there)} methods have their lowest validation loss in the last tenth of the epochs: "
            f"these have not come to rest, as those of the paper had after {self.paper['epochs']} epochs."
        )
        return [remark]
