"""The benchmark runs, counts what it says it counts, and loses nothing. What it measures is no test."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from egop_lab import cli
from egop_lab.bench import host, run


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
    assert not run.list_failures(kept)
    assert [row["method"] for row in kept["parts"]["host"]] == [host.ADAMW, host.FIXED, host.FULL]
    for part, rows in kept["parts"].items():
        assert all(any(key in row for row in rows) for _, key, _ in run.COLUMNS[part][1]), part
    assert kept["machine"]["threads"] == torch.get_num_threads()
    assert torch.__version__.startswith(kept["machine"]["versions"]["torch"])  # which may lack the build


def test_one_part_alone(tmp_path):
    result = invoke("--smoke", "--device", "cpu", "--only", "bases", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 0, result.output
    assert list(json.loads((tmp_path / "bench.json").read_text())["parts"]) == ["bases"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--only", "stepps"], "There is no part stepps. There are: bases, host"), (["--rounds", "0"], "--rounds")],
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
    def broken(*arguments):
        yield {"network": "first", "seconds": 1.0}
        raise RuntimeError("out of luck")

    monkeypatch.setitem(run.PARTS, "host", broken)
    out = tmp_path / "bench.json"
    result = invoke("--smoke", "--device", "cpu", "--only", "host", "--only", "bases", "--out", str(out))
    assert result.exit_code == 1
    assert "RuntimeError: out of luck" in result.output
    kept = json.loads(out.read_text())
    assert kept["parts"]["host"][0]["network"] == "first"
    assert run.list_failures(kept) == ["host: RuntimeError: out of luck"]
    assert len(kept["parts"]["bases"]) == 5


def test_an_interrupt_loses_no_row(tmp_path, monkeypatch):
    def interrupted(*arguments):
        yield {"network": "first", "seconds": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setitem(run.PARTS, "host", interrupted)
    result = invoke("--smoke", "--device", "cpu", "--only", "host", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 130
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["parts"] == {"host": [{"network": "first", "seconds": 1.0}]}
    assert not kept["complete"]


def test_a_step_is_counted_call_by_call():
    model, optimizer = host.make_trial(host.FULL)
    before = [parameter.clone() for parameter in model.parameters()]
    calls = host.count_calls(optimizer, warm_up=2)
    assert calls.own > calls.files > 0
    assert not any(torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))
    assert host.count_calls(host.make_trial(host.ADAMW)[1], warm_up=2).own == 0


def test_a_table_shows_what_failed_below_what_was_measured():
    rows = [
        {"network": "A", "structure": "Shared", "seconds": 0.0123},
        {"network": "A", "structure": "Full", "failed": "RuntimeError: too large"},
    ]
    lines = run.format_rows("bases", rows).splitlines()
    assert "12.3 ms" in lines[4]
    assert lines[5:] == ["failed: A, Full, RuntimeError: too large"]
