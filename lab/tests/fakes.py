"""Experiments with made-up results, and tiny data: how claims come out when the records say so."""

import random

import numpy as np
from PIL import Image

from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store


def faked(experiment, outcome, path, preset="quick"):
    """An experiment of tuned methods and a store with all its records; ``outcome(config)`` is the result of a run."""

    class Faked(experiment):
        def _run_tasks(self, tasks, store, context, what):
            for task in tasks:
                for rate in task.rates:
                    configs = store.missing(self._configs(context.preset, task, rate))
                    store.add(*(Record(config, outcome(config)) for config in configs))

    made, store = Faked(), Store(path / "records.jsonl")
    made.run(store, Context(preset=preset, progress=False))
    return made, store


def verdicts(experiment, store, preset="quick"):
    return {judged.id.partition("/")[2]: judged.verdict for judged in experiment.judge(store, preset)}


def in_this_process(function, configs, store, context, description):
    """Stands in for the pool of processes, whose start takes longer than a toy run."""
    for config in configs:
        store.add(function(config))


# So small that all methods run in seconds.
TINY_LANGUAGE = {
    "rates": [2e-3, 8e-3],
    "further rates": [],
    "steps": 24,
    "tuning steps": 4,
    "interval": 4,
    "windows": 6,
    "layers": 1,
    "width": 8,
    "context": 8,
    "batch": 4,
    "warm-up": 4,
    "samples": 2,
    "period": 8,
}


def text_folder(place):
    """A folder with a text of four words."""
    words = random.Random(0)
    (place / "wikitext-2").mkdir()
    for name, count in (("train", 4000), ("valid", 400)):
        text = " ".join(words.choice(("one", "two", "three", "four")) for _ in range(count))
        (place / "wikitext-2" / f"wiki.{name}.tokens").write_text(text)
    return str(place)


def image_folder(place):
    """A folder with images of three colours."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", 9), ("val", 5)):
        for label in range(3):
            (place / split / str(label)).mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 100, (20, 24, 3)) + 150 * np.eye(3, dtype=int)[label]
                Image.fromarray(pixels.astype(np.uint8)).save(place / split / str(label) / f"{index}.png")
    return str(place)
