"""What examples/train_distributed.py leaves for TensorBoard."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
TINY = ["--layers", "1", "--width", "16", "--heads", "1", "--context", "16", "--batch", "4", "--log-every", "2"]


def train(folder, steps):
    spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--out", str(folder), "--steps", str(steps), "--checkpoint-every", "4", *TINY])


def test_losses_are_logged_once_each_also_after_a_restart(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, 6)
    shutil.rmtree(tmp_path / "step-000006")  # as if killed before it was written: steps 5 and 6 are done again
    before = capsys.readouterr().out
    train(tmp_path, 8)
    printed = {line.partition(":")[0]: line for line in (before + capsys.readouterr().out).splitlines()}
    found = EventAccumulator(str(tmp_path)).Reload()
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert len(found.Scalars("loss")) == len(losses)
    assert sorted(losses) == [2, 4, 6, 8]
    for step, loss in losses.items():
        assert printed[f"step {step}"] == f"step {step}: loss {loss:.4f}"
    assert [event.step for event in found.Scalars("validation loss")] == [8]


def test_without_tensorboard_a_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(tmp_path, 2)
    assert "pip install tensorboard" in capsys.readouterr().out
