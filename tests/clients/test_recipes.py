"""The recipes of docs/recipes: whole scripts, run as they stand."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import runs
from processes import TIMEOUT, prepared, run

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
RECIPES = sorted(FOLDER.glob("with_*.py"))
NEEDS = {
    "with_accelerate": ["accelerate"],
    "with_checkpoints": [],
    "with_fsdp2": [],
    "with_lightning": ["lightning"],
    "with_peft": ["peft", "transformers"],
    "with_plain_loop": ["torch"],
    "with_trainer": ["accelerate", "transformers"],
}


def test_every_recipe_is_on_a_page_of_its_own():
    assert [path.stem for path in RECIPES] == sorted(NEEDS)
    for path in RECIPES:
        page = path.with_name(f"{path.stem.removeprefix('with_').replace('_', '-')}.md").read_text(encoding="utf-8")
        assert f"\n[{path.name}]({path.name})\n" in page  # the site shows the script here


# Recipes to copy: each trains with AdamW at its best rate too.
COMPARED = ["with_accelerate", "with_fsdp2", "with_lightning", "with_plain_loop", "with_trainer"]


@pytest.mark.parametrize("name", COMPARED)
def test_a_recipe_is_short_and_has_a_tuned_baseline(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert "AdamW" in text
    assert re.search(r"LR = .*# .*best .*for AdamW", text)


@pytest.fixture
def _no_traces():
    """Reset the class attributes and environment variables in which frameworks keep their state."""
    kept = dict(os.environ)
    with torch.random.fork_rng():
        yield
    os.environ.clear()
    os.environ.update(kept)
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def check_losses(said, count):
    losses = re.findall(r"\bloss (\d\S*)$", said, flags=re.MULTILINE)
    assert len(losses) == count
    assert all(math.isfinite(float(loss)) for loss in losses)
    assert count == 1 or float(losses[1]) < float(losses[0])  # EGOP's, and AdamW's at its best rate


@pytest.mark.usefixtures("_no_traces")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("path", [path for path in RECIPES if NEEDS[path.stem]], ids=lambda path: path.stem)
def test_a_recipe_runs(path, capsys):
    if missing := [name for name in NEEDS[path.stem] if importlib.util.find_spec(name) is None]:
        pytest.skip(f"no {missing[0]} here: {runs.MISSING}")
    runpy.run_path(str(path), run_name="__main__")
    check_losses(capsys.readouterr().out, 2 if path.stem in COMPARED else 1)


def run_sharded(rank, world, folder, name="EGOP"):
    """Run the sharded recipe as torchrun would; return what it prints."""
    dist.destroy_process_group()  # the recipe makes its own
    runs.launched(rank, world)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(FOLDER / "with_fsdp2.py"))["train"](Path(folder), name)
    return said.getvalue()


def read_weights(folder):
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=True)["model"]


@pytest.mark.slow
def test_the_sharded_recipe_is_saved_by_four_processes_and_resumed_by_two(tmp_path):
    run(run_sharded, 4, str(tmp_path))
    expected = read_weights(tmp_path / "step-000060")
    (tmp_path / "step-000060" / ".metadata").unlink()  # as if killed before the save was complete
    run(run_sharded, 2, str(tmp_path))
    assert runs.distance(read_weights(tmp_path / "step-000040"), expected) > 1e-2
    assert runs.distance(read_weights(tmp_path / "step-000060"), expected) < 1e-3  # rounding


def test_the_sharded_recipe_is_compared_with_adamw(tmp_path):
    said = [run(run_sharded, 2, str(tmp_path / name), name)[0] for name in ("AdamW", "EGOP")]
    check_losses("\n".join(each.strip().rpartition("\n")[2] for each in said), 2)


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def save_half(state, file):
    buffer = io.BytesIO()
    torch_save(state, buffer)
    file.write(buffer.getvalue()[: buffer.tell() // 2])
    file.flush()
    kill()


torch_save = torch.save
MOMENTS = {"in torch.save": (torch, "save", save_half), "before the rename": (Path, "replace", kill)}


def train_until_killed(moment, folder, threads):
    """Run the recipe; its third save kills the process."""
    torch.set_num_threads(threads)
    saves = itertools.count(1)
    owner, name, killing = MOMENTS[moment]
    own = getattr(owner, name)
    setattr(owner, name, lambda *given: killing(*given) if next(saves) == 3 else own(*given))
    runpy.run_path(str(FOLDER / "with_checkpoints.py"))["main"](folder)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_save_leaves_the_last_checkpoint(moment, tmp_path):
    recipe = runpy.run_path(str(FOLDER / "with_checkpoints.py"))
    recipe["main"](tmp_path / "whole")
    # Not a fork of this process: with several OpenMP threads, that would hang.
    arguments = (moment, tmp_path / "killed", torch.get_num_threads())
    child = prepared().Process(target=train_until_killed, args=arguments)
    child.start()
    child.join(TIMEOUT)
    assert child.exitcode == -signal.SIGKILL
    assert torch.load(tmp_path / "killed" / "last.pt", weights_only=True)["step"] == 20
    recipe["main"](tmp_path / "killed")
    assert os.listdir(tmp_path / "killed") == ["last.pt"]
    found, expected = (torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("killed", "whole"))
    assert found["step"] == expected["step"] == 50
    assert runs.same(found["model"], expected["model"])
    for index, entry in expected["optimizer"]["state"].items():
        assert runs.same(found["optimizer"]["state"][index], entry)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    main = runpy.run_path(str(FOLDER / "with_checkpoints.py"))["main"]
    main(tmp_path)
    whole = (tmp_path / "last.pt").read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        (tmp_path / "last.pt").write_bytes(whole[:length])
        with pytest.raises((EOFError, OSError, RuntimeError, ValueError)):
            main(tmp_path)
