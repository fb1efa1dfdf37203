"""The benchmark runs, and counts what it says it counts. What it measures is no test."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from egop_lab import bench, cli


def test_a_smoke_run_measures_every_method():
    result = CliRunner().invoke(cli.app, ["bench", "--smoke"])
    assert result.exit_code == 0, result.output
    assert "numbers mean nothing" in result.output
    for name in (bench.ADAMW, bench.FIXED, bench.FULL):
        assert name in result.output
    assert "rotate=False" in result.output


def test_a_step_is_counted_call_by_call():
    model, optimizer = bench.make_trial(bench.FULL)
    before = [parameter.clone() for parameter in model.parameters()]
    calls = bench.count_calls(optimizer, warm_up=2)
    assert calls.own > calls.files > 0
    assert not any(torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))
    assert bench.count_calls(bench.make_trial(bench.ADAMW)[1], warm_up=2).own == 0
