"""Training survives killed processes; what cannot continue ends with an error, not a hang."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import egop
from processes import run
from training import STEPS, WRAPPERS, basis, batch, loss_of, network, optimizer_of, sharded, steps, weights

HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "train_distributed.py"
SIZES = {"layers": 2, "width": 12, "heads": 2, "context": 8}
TIMEOUT = 180


def options(out, **changed):
    text = out.parent / "text.txt"
    text.write_bytes(random.Random(0).randbytes(12_000))
    chosen = SIZES | {"steps": 14, "batch": 4, "checkpoint-every": 5, "log-every": 1, "timeout": 60, "data": text}
    return ["--out", str(out), *(f"--{name}={value}" for name, value in (chosen | changed).items())]


def run_with_kills(out, kills):
    """Run the example on two processes that are killed as planned and restarted; return its output."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    done = subprocess.run(
        [sys.executable, *launch, HERE / "killed.py", EXAMPLE, *options(out, parallel="fsdp")],
        env=os.environ | {"KILLS": kills, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_undisturbed(rank, world, port, arguments):
    """Run the example as torchrun would, in processes that have already imported torch."""
    dist.destroy_process_group()  # the example makes its own
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    load_example().main(arguments)


def find_free_port():
    with socket.socket() as place:
        place.bind(("localhost", 0))
        return place.getsockname()[1]


def find_starts(output):
    """Return the steps from which the processes started."""
    return [int(step) for step in re.findall(r"^step (\d+) of", output, flags=re.MULTILINE)]


def read_last_checkpoint(out):
    """Return all tensors of the last checkpoint by name: weights, moments, bases, coordinates, Gram matrices."""
    dcp_to_torch_save(out / "step-000014", out / "whole.pt")
    saved = torch.load(out / "whole.pt", weights_only=True)
    state = {
        f"{name}/{key}": value for name, entry in saved["optimizer"]["state"].items() for key, value in entry.items()
    }
    return saved["model"] | state


@pytest.mark.slow
def test_killed_processes_restart_and_reach_the_same_result(tmp_path):
    """Kill one process in a step after the first checkpoint, then another while it writes the second."""
    kills = [
        f"step:{random.choice([0, 1])}:{random.randint(6, 9)}",
        random.choice(["write:0:1", "write:0:2", "write:1:1"]),  # the second file of the first process is the metadata
    ]
    output = run_with_kills(tmp_path / "killed", " ".join(kills))
    assert find_starts(output)[:3] == [0, 5, 5], f"{kills}: {output}"  # what was left of step 10 is not used
    run(run_undisturbed, 2, find_free_port(), options(tmp_path / "undisturbed", parallel="fsdp"))
    found, expected = (read_last_checkpoint(tmp_path / name) for name in ("killed", "undisturbed"))
    assert any("egop/refresh/gram" in name for name in expected)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), f"{kills}: {name}"
    kept = ["step-000005", "step-000010", "step-000014"]
    assert sorted(path.name for path in (tmp_path / "killed").glob("step*")) == kept


def load_example():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("optimizer", ["egop", "adamw"])
def test_one_process_resumes_too(optimizer, tmp_path, capsys):
    main = load_example().main
    main(options(tmp_path / "whole", optimizer=optimizer))
    main(options(tmp_path / "parts", optimizer=optimizer, steps=7))
    capsys.readouterr()
    main(options(tmp_path / "parts", optimizer=optimizer))
    output = capsys.readouterr().out
    assert find_starts(output) == [7]
    assert re.search(r"^step 14: loss \d\.\d{4}$", output, flags=re.MULTILINE)
    expected = read_last_checkpoint(tmp_path / "whole")
    for name, value in read_last_checkpoint(tmp_path / "parts").items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("context", "text", "message"), [(8, None, "There is no text at "), (400, 12_000, "too short")]
)
def test_missing_or_short_text_is_reported_in_one_line(context, text, message, tmp_path):
    place = tmp_path / "book.txt"
    if text:
        place.write_bytes(bytes(text))
    with pytest.raises(SystemExit, match=message) as stopped:
        load_example().main(options(tmp_path / "run", data=place, context=context))
    assert "\n" not in str(stopped.value)


def test_last_tenth_is_for_validation(tmp_path):
    load_text, whole = load_example().load_text, bytes(range(100)) * 200
    (tmp_path / "book.txt").write_bytes(whole)
    source = b"".join(path.read_bytes() for path in sorted(Path(egop.__file__).parent.rglob("*.py")))
    for place, expected in ((tmp_path / "book.txt", whole), (None, source)):
        text = load_text(place and str(place), 8, torch.device("cpu"))
        assert b"".join(part.numpy().tobytes() for part in (text.train, text.validation)) == expected
        assert len(text.validation) == len(expected) // 10


def test_example_is_short_and_says_how_to_run_it():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 195
    assert "torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py" in text


def not_finite(rank, world):
    """Train with an infinite batch on the second process only; return the bases and the number of failed refreshes."""
    found = {}
    for wrapper in ("DDP", "FSDP2"):
        model = WRAPPERS[wrapper](network())
        optimizer = optimizer_of(model, torch.optim.AdamW, egop.Shared(), egop.Online(every=2, spread=False))
        steps(model, optimizer, 0, 3, rank=rank, world=world)
        before = [block.change.tensors["basis"].clone() for block in optimizer.blocks]
        inputs, targets = batch(3)
        loss_of(model, inputs * (torch.inf if rank == 1 else 1), targets).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first failure is warned about
            optimizer.step()
        after = [block.change.tensors["basis"].clone() for block in optimizer.blocks]
        kept = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        found[wrapper] = {"kept": kept, "failures": optimizer.refresher.failures, "bases": after}
    return found


def stops_early(rank, world):
    """Give one process fewer batches than the other, which waits until the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    found = {}
    for wrapper in ("DDP", "FSDP2"):
        if wrapper == "DDP":
            model = DistributedDataParallel(network(), process_group=group)
        else:
            model = fully_shard(network(), mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = optimizer_of(model, torch.optim.AdamW, egop.Shared(), egop.Online(every=2))
        began = time.monotonic()
        try:
            steps(model, optimizer, 0, 2 if rank == 1 else 3, rank=rank, world=world)
            found[wrapper] = "finished"
        except RuntimeError as error:
            found[wrapper] = str(error).splitlines()[0]
        assert time.monotonic() - began < 30
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=2))  # the one in which someone has given up is of no use
    return found


def on_another_number(rank, world, place):
    """Load a basis that one process has estimated."""
    found = egop.Basis.load(place)
    model = sharded(network())
    optimizer = optimizer_of(model, torch.optim.AdamW, None, None, found)
    steps(model, optimizer, rank=rank, world=world)
    return weights(model)


def in_two_processes(rank, world, place):
    return {
        "not finite": not_finite(rank, world),
        "elsewhere": on_another_number(rank, world, place),
        "early": stops_early(rank, world),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    basis(egop.Shared()).save(place)
    return run(in_two_processes, 2, str(place))


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_nonfinite_gradient_keeps_the_basis_on_all_processes(found, wrapper):
    first, second = (each["not finite"][wrapper] for each in found)
    assert first["kept"]
    assert second["kept"]
    assert first["failures"] == second["failures"] == 4  # one for each block
    for one, other in zip(first["bases"], second["bases"], strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_process_that_stops_early_raises_an_error_in_the_others_after_the_timeout(found, wrapper):
    assert found[1]["early"][wrapper] == "finished"
    assert "imed out" in found[0]["early"][wrapper]


def test_basis_estimated_by_one_process_works_on_any_number(found):
    model = network()
    steps(model, optimizer_of(model, torch.optim.AdamW, egop.Shared(), None), 0, STEPS)
    for each in found:
        for name, value in weights(model).items():
            torch.testing.assert_close(each["elsewhere"][name], value, rtol=0, atol=1e-10)
