"""The benchmark runs, counts what it says it counts, and loses nothing. What it measures is no test."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from typer.testing import CliRunner

import egop
from egop_lab import cli
from egop_lab.bench import networks, run, setups, steps, tables
from egop_lab.bench.timing import Marks, interleave
from egop_lab.methods import BENCH as METHODS

CPU = torch.device("cpu")
SMALL = networks.perceptron((6, 8, 8, 3), 4)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *arguments])


@pytest.mark.slow
def test_a_smoke_run_has_every_part_and_nothing_fails(tmp_path):
    result = invoke("--smoke", "--device", "cpu", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 0, result.output
    assert result.output.count("numbers mean nothing") == 2
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["smoke"]
    assert kept["complete"]
    assert list(kept["parts"]) == list(run.PARTS)
    assert not run.failures(kept)
    shown = {(row["network"], row["method"]) for row in kept["parts"]["steps"]}
    assert shown == {
        (network, method) for network in ("MLP 12-16-16-4", "ResNet-6, width 4", "GPT 1x16") for method in METHODS
    }
    for part, rows in kept["parts"].items():
        assert all(any(key in row for row in rows) for _, key, _ in tables.COLUMNS[part][1]), part
    assert kept["machine"]["threads"] == torch.get_num_threads()
    assert torch.__version__.startswith(kept["machine"]["versions"]["torch"])  # which may lack the build


def test_one_part_alone(tmp_path):
    result = invoke("--smoke", "--device", "cpu", "--only", "bases", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 0, result.output
    assert list(json.loads((tmp_path / "bench.json").read_text())["parts"]) == ["bases"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--only", "stepps"], "There is no part stepps. There are: bases, steps"), (["--rounds", "0"], "--rounds")],
)
def test_wrong_options_are_named(arguments, expected):
    result = invoke("--smoke", *arguments)
    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused():
    result = invoke("--smoke", "--device", "cuda")
    assert result.exit_code == 2
    assert "There is no CUDA device here" in result.output


def test_a_part_that_fails_costs_no_other_part_and_is_reported(tmp_path, monkeypatch):
    def broken(setting):
        yield {"network": "first", "seconds": 1.0}
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(run.PARTS, "steps", broken)
    out = tmp_path / "bench.json"
    result = invoke("--smoke", "--device", "cpu", "--only", "steps", "--only", "bases", "--out", str(out))
    assert result.exit_code == 1
    assert "RuntimeError: out of luck" in result.output
    kept = json.loads(out.read_text())
    assert kept["parts"]["steps"][0]["network"] == "first"
    assert run.failures(kept) == ["steps: RuntimeError: out of luck"]
    assert len(kept["parts"]["bases"]) == 5


def test_an_interrupt_loses_no_row(tmp_path, monkeypatch):
    def interrupted(setting):
        yield {"network": "first", "seconds": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setitem(run.PARTS, "steps", interrupted)
    result = invoke("--smoke", "--device", "cpu", "--only", "steps", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 130
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["parts"] == {"steps": [{"network": "first", "seconds": 1.0}]}
    assert not kept["complete"]


def test_methods_take_turns_and_one_that_fails_leaves_the_others():
    order = []

    def turn(name):
        order.append(name)
        if name == "b":
            raise ValueError("no")
        return len(order)

    found, failed = interleave({name: lambda name=name: turn(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abcacac"
    assert set(found) == {"a", "c"}
    assert failed == {"b": "ValueError: no"}


def test_what_has_used_its_time_has_no_further_turn():
    found, _ = interleave({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, rounds=5, limit=0.01)
    assert (len(found["slow"]), len(found["fast"])) == (1, 5)


def test_marks_measure_the_time_between_them():
    marks = Marks(CPU)
    for pause in (0.0, 0.05):
        marks.mark()
        time.sleep(pause)
    marks.mark()
    short, long = marks.seconds()
    assert short < 0.04 < long


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("network", [SMALL, networks.resnet(2, 32, width=4, depths=(1, 1))], ids=["MLP", "ResNet"])
def test_every_method_trains_all_parameters_and_leaves_the_gradients_it_is_given(network, name):
    start = network.make(CPU)
    batches = network.batches(CPU, 2)
    gradients = steps.compute_gradients(network, start, batches)
    before = [[each.clone() for each in own] for own in gradients]
    trial = steps.Trial(network, METHODS[name], start, batches, gradients)
    trial.time_steps(11)
    pairs = zip(itertools.chain(*before), itertools.chain(*gradients), strict=True)
    assert all(torch.equal(was, now) for was, now in pairs)
    moved = [not torch.equal(a, b) for a, b in zip(start.parameters(), trial.model.parameters(), strict=True)]
    assert all(moved)


def test_a_round_has_whole_periods():
    trial = steps.Trial(SMALL, METHODS["SOAP"], SMALL.make(CPU), SMALL.batches(CPU, 2))
    counted = []
    trial.optimizer.step = lambda: counted.append(1)
    trial.turn(2)
    assert len(counted) == 20


def test_the_basis_for_timing_is_orthonormal_and_dense():
    model = SMALL.make(CPU)
    for structure in (egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=3)):
        basis = setups.make_basis(model, structure)
        assert len(basis) == 3
        for change in basis.values():
            basis = change.dense()
            torch.testing.assert_close(basis @ basis.mT, torch.eye(len(basis)).double(), rtol=0, atol=1e-5)
            assert all((tensor != 0).all() for tensor in change.tensors.values())


def test_a_table_shows_what_failed_below_what_was_measured():
    rows = [
        {"network": "A", "method": "AdamW", "step": 0.0123, "whole": 2.0},
        {"network": "A", "method": "SOAP", "failed": "RuntimeError: too large"},
    ]
    lines = tables.format_rows("steps", rows).splitlines()
    assert "12.3 ms" in lines[4]
    assert lines[5:] == ["failed: A, SOAP, RuntimeError: too large"]
