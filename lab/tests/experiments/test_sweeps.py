"""Sweeps do what is missing, nothing else."""

import pytest
import torch

from egop_lab.experiments.base import Experiment
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.records import Store


class Bowl(batched.Problem):
    def __init__(self, seeds):
        self.seeds = list(seeds)

    def start(self):
        return {"x": torch.tensor([[1.0 + seed] for seed in self.seeds], dtype=torch.float64)}

    def losses(self, point, step):
        return point["x"].square().sum(-1)

    def evaluate(self, point):
        return {"loss": self.losses(point, 0)}


class Toy(Experiment):
    id = "toy"

    @classmethod
    def declare(cls):
        return {"title": "Toy", "figures": "none", "full": {}}

    def run(self, context):
        pass

    def judge(self):
        return []


def sweep(**changed):
    settings = {
        "rates": {"SGD": [0.1, 0.2], "Adam": [0.1]},
        "seeds": [0, 1, 2],
        "coordinates": [ORIGINAL, EGOP],
        "steps": 4,
        "record_every": 2,
        "at_once": 2,
        "extra": {"size": 1},
    }
    return settings | changed


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Return a function that runs a sweep and returns its store and the trainings that it ran."""
    path = tmp_path / "records.jsonl"
    train = batched.train

    def run(what, problem=Bowl, version=1):
        trained = []

        def noted(made, optimizer, rates, *arguments, basis, **options):
            trained.append((tuple(made.seeds), optimizer, ORIGINAL if basis is None else EGOP, tuple(rates)))
            return train(made, optimizer, rates, *arguments, basis=basis, **options)

        monkeypatch.setattr(batched, "train", noted)
        monkeypatch.setattr(Toy, "version", version)
        store = Store(path)
        turned = batched.Basis(((("x",), torch.ones(1, 1, 1, dtype=torch.float64)),))
        Toy("quick", store).sweep(
            Context(progress=False),
            problem,
            lambda made, kind: (
                None
                if kind == ORIGINAL
                else batched.Basis(((("x",), turned.blocks[0][1].expand(len(made.seeds), 1, 1)),))
            ),
            **what,
        )
        return store, trained

    return run


def test_every_combination_gives_one_record(swept):
    store, trained = swept(sweep())
    assert len(store) == 3 * 2 * 3
    assert trained[0] == ((0, 1), "SGD", ORIGINAL, (0.1, 0.2))
    record = next(r for r in store if r.config["seed"] == 2 and r.config["lr"] == 0.2)
    assert record.config == {
        "experiment": "toy", "version": 1, "preset": "quick", "optimizer": "SGD", "coordinates": ORIGINAL,
        "lr": 0.2, "steps": 4, "size": 1, "seed": 2,
    }  # fmt: skip
    assert record.result["loss"] == pytest.approx([9 * 0.6**power for power in (0, 4, 8)], rel=1e-5)  # six digits


def test_nothing_that_is_finished_is_done_again(swept):
    first, _ = swept(sweep())
    lines = first.path.read_bytes()

    def never(seeds):
        raise AssertionError("there is nothing left to do")

    again, trained = swept(sweep(), problem=never)
    assert (trained, again.path.read_bytes()) == ([], lines)


def test_only_what_is_missing_is_done(swept):
    swept(sweep(seeds=[0, 1], rates={"SGD": [0.1]}))
    _, trained = swept(sweep(seeds=[0, 1]))
    assert trained == [
        ((0, 1), "SGD", ORIGINAL, (0.2,)),
        ((0, 1), "Adam", ORIGINAL, (0.1,)),
        ((0, 1), "SGD", EGOP, (0.2,)),
        ((0, 1), "Adam", EGOP, (0.1,)),
    ]


def test_a_run_that_was_cut_off_goes_on_where_it_was(swept):
    whole, _ = swept(sweep())
    expected = {record.key: record.result for record in Store(whole.path)}
    lines = whole.path.read_bytes().splitlines(keepends=True)
    whole.path.write_bytes(b"".join(lines[:4]) + lines[4][:30])  # two trials of two rates, and a torn line
    again, trained = swept(sweep())
    assert {record.key: record.result for record in Store(again.path)} == expected
    assert ((0, 1), "SGD", ORIGINAL, (0.1, 0.2)) not in trained


@pytest.mark.parametrize("changed", [{"steps": 5}, {"extra": {"size": 2}}, {"seeds": [3, 4, 5]}])
def test_a_changed_setting_never_reuses_a_record(swept, changed):
    before, _ = swept(sweep())
    count = len(before)
    after, trained = swept(sweep(**changed))
    assert len(after) == 2 * count
    assert len(trained) == 2 * 2 * 2


def test_a_new_version_of_the_experiment_never_reuses_a_record(swept):
    swept(sweep())
    store, _ = swept(sweep(), version=2)
    assert len(store) == 36
