"""Experiments with made-up results, and tiny data: how claims come out when the records say so."""

import numpy as np
from PIL import Image

from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store


def faked(experiment, outcome, path, preset="quick"):
    """Return an experiment of tuned methods with all its records; ``outcome(config)`` is the result of a run."""

    class Faked(experiment):
        def _run_tasks(self, tasks, context):
            configs = self.store.missing(config for task in tasks for config in self._configs(task))
            self.store.add(*(Record(config, outcome(config)) for config in configs))

    made = Faked(preset, Store(path / "records.jsonl"))
    made.run(Context(progress=False))
    return made


def verdicts(experiment):
    return {judged.id.partition("/")[2]: judged.verdict for judged in experiment.judge()}


def in_this_process(function, configs, store, context, description):
    """Do the runs in this process: starting a pool of processes takes longer than a toy run."""
    for config in configs:
        store.add(function(config))


def image_folder(place):
    """Write a folder of images in three colours and return its path."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", 9), ("val", 5)):
        for label in range(3):
            (place / split / str(label)).mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 100, (20, 24, 3)) + 150 * np.eye(3, dtype=int)[label]
                Image.fromarray(pixels.astype(np.uint8)).save(place / split / str(label) / f"{index}.png")
    return str(place)
