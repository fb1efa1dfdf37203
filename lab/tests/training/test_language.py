"""One run of the language model: what it is trained on, by which optimizer, and how it ends."""

from __future__ import annotations

import math

import pytest
import torch

import egop
from egop_lab.data.text import load
from egop_lab.methods import LANGUAGE, get_methods
from egop_lab.training import timed_runs
from egop_lab.training.language import Run
from fakes import TINY_LANGUAGE, text_folder

CPU = torch.device("cpu")
CONFIG = TINY_LANGUAGE | {"heads": 2, "weight decay": 0.1}
METHODS = get_methods(LANGUAGE)
ADAMW, FIXED, PERIODIC, ONLINE, BOTH_SIDES, SOAP, MUON = METHODS


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return load(text_folder(tmp_path_factory.mktemp("data")), CPU, smallest=1)


class Noted:
    """Batches, and a list of those that were taken."""

    def __init__(self, batches, seen):
        self.batches, self.seen = batches, seen

    def __iter__(self):
        for batch in self.batches:
            self.seen.append(batch.clone())
            yield batch


def test_all_methods_see_the_same_batches(text):
    seen = {}
    for method in (ADAMW, PERIODIC, ONLINE):
        config = CONFIG | {"method": method, "lr": 1e-3, "seed": 3, "steps": 12}
        run = Run(text, config, CPU)
        seen[method] = []
        run.batches = Noted(run.batches, seen[method])
        run(progress=False)
    assert len(seen[ADAMW]) == 12
    assert not torch.equal(seen[ADAMW][0], seen[ADAMW][1])
    for method in (PERIODIC, ONLINE):
        assert all(map(torch.equal, seen[ADAMW], seen[method]))


def test_weights_of_the_blocks_get_bases_and_the_others_none(text):
    config = CONFIG | {"method": FIXED, "lr": 1e-3, "seed": 0}
    run = Run(text, config, CPU)
    expected = {f"blocks.0.{name}.weight" for name in ("qkv", "mixed", "wider", "narrower")}
    fixed = METHODS[FIXED].make(run.make_setup())
    assert isinstance(fixed, egop.ReparameterizedOptimizer)
    for method, kind in ((FIXED, "Shared"), (ONLINE, "Shared"), (BOTH_SIDES, "Kronecker")):
        optimizer = METHODS[method].make(run.make_setup())
        run.training_loss(next(iter(run.batches))).backward()
        optimizer.step()
        assert {name: change.kind for name, change in optimizer.basis.items()} == dict.fromkeys(expected, kind)
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_muon_and_adamw_step_as_one(text):
    config = CONFIG | {"method": MUON, "lr": 1e-3, "seed": 0}
    run = Run(text, config, CPU)
    optimizer = METHODS[MUON].make(run.make_setup())
    before = {name: value.clone() for name, value in run.model.named_parameters()}
    for rate, moves in ((0.0, False), (0.1, True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        run.training_loss(next(iter(run.batches))).backward()
        optimizer.step()
        for name, value in run.model.named_parameters():
            assert torch.equal(value, before[name]) is not moves, name


def test_the_learning_rate_warms_up_and_stays(text):
    config = CONFIG | {"method": ADAMW, "lr": 1e-3, "seed": 0}
    run = Run(text, config, CPU)
    run.optimizer = METHODS[ADAMW].make(run.make_setup())
    rates = [run.optimizer.param_groups[0]["lr"] for _ in range(2) for _ in run]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])


def test_a_run_that_diverges_is_a_result(text):
    for method in (ADAMW, SOAP):
        config = CONFIG | {"method": method, "lr": 1e30, "seed": 0}
        found = Run(text, config, CPU)(progress=False)
        assert found["diverged"]
        assert len(found["validation loss"]) == 7
        assert math.isnan(found["validation loss"][-1])


def test_a_decomposition_that_fails_is_a_run_that_diverges(text, monkeypatch):
    def fail(*arguments, **options):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(timed_runs, "train", fail)
    found = Run(text, CONFIG | {"method": ADAMW, "lr": 1e-3, "seed": 0, "steps": 4}, CPU)(progress=False)
    assert found["diverged"]
    assert len(found["validation loss"]) == len(found["seconds"]) == 2
    assert all(map(math.isnan, found["validation loss"]))


def test_a_run_gives_the_same_again_whatever_ran_before_it(text):
    config = CONFIG | {"method": PERIODIC, "lr": 2e-3, "seed": 0}
    once, _, again = (Run(text, config | {"method": method}, CPU)(False) for method in (PERIODIC, SOAP, PERIODIC))
    assert again["validation loss"] == once["validation loss"]
