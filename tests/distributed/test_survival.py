"""Training survives killed processes; what cannot go on ends with an error rather than a hang."""

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import egop
from egop import checkpoint
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


def torchrun(out, kills):
    """What the example says on two processes, which are killed as planned and started again."""
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


def undisturbed(rank, world, port, arguments):
    """The example as torchrun starts it, in processes that have imported torch already."""
    dist.destroy_process_group()  # it makes its own
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    example().main(arguments)


def free_port():
    with socket.socket() as place:
        place.bind(("localhost", 0))
        return place.getsockname()[1]


def starts(said):
    """The steps at which the processes have started."""
    return [int(step) for step in re.findall(r"^step (\d+) of", said, flags=re.MULTILINE)]


def last(out, optimizer="egop"):
    """The weights and coordinates of the last checkpoint, on one process."""
    model = example().GPT(**SIZES)
    refresh = egop.Online() if optimizer == "egop" else None
    its_optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh)
    run = {"optimizer": optimizer} | SIZES
    assert checkpoint.load(checkpoint.latest(out), model, its_optimizer) == {"step": 14, "run": run}
    coordinates = {block.name: block.coordinates[0] for block in its_optimizer.blocks}
    assert (len(coordinates) == 8) == (optimizer == "egop")
    return dict(model.named_parameters()) | {f"coordinates of {name}": each for name, each in coordinates.items()}


@pytest.mark.slow
def test_killed_processes_start_again_and_end_where_undisturbed_ones_do(tmp_path):
    """Killed in a step after the first checkpoint, then in the middle of writing the second."""
    kills = [
        f"step:{random.choice([0, 1])}:{random.randint(6, 9)}",
        random.choice([f"write:0:{random.randint(1, 3)}", "write:1:1"]),
    ]
    said = torchrun(tmp_path / "killed", " ".join(kills))
    assert starts(said)[:3] == [0, 5, 5], f"{kills}: {said}"  # the checkpoint of step 5 is whole, and what was used
    run(undisturbed, 2, free_port(), options(tmp_path / "undisturbed", parallel="fsdp"))
    expected = last(tmp_path / "undisturbed")
    for name, value in last(tmp_path / "killed").items():
        assert torch.equal(value, expected[name]), f"{kills}: {name}"
    assert sorted(path.name for path in (tmp_path / "killed").glob("step*")) == [
        "step-000005",
        "step-000010",
        "step-000014",
    ]


def example():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("optimizer", ["egop", "adamw"])
def test_one_process_resumes_too(optimizer, tmp_path, capsys):
    main = example().main
    main(options(tmp_path / "whole", optimizer=optimizer))
    main(options(tmp_path / "parts", optimizer=optimizer, steps=7))
    capsys.readouterr()
    main(options(tmp_path / "parts", optimizer=optimizer))
    said = capsys.readouterr().out
    assert starts(said) == [7]
    assert re.search(r"^step 14: loss \d\.\d{4}$", said, flags=re.MULTILINE)
    expected = last(tmp_path / "whole", optimizer)
    for name, value in last(tmp_path / "parts", optimizer).items():
        assert torch.equal(value, expected[name]), name


def test_a_run_of_another_kind_is_not_gone_on_with(tmp_path, capsys):
    main, out = example().main, tmp_path / "run"
    main(options(out, steps=1))
    capsys.readouterr()
    for others, said in (
        ({"optimizer": "adamw"}, "--optimizer egop"),
        ({"heads": 3, "width": 6}, "--width 12 --heads 2"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(options(out, **others))
        assert str(stopped.value) == f"{out / 'step-000001'} is of {said}: use another --out."
    assert capsys.readouterr().out == ""


def test_a_run_that_has_come_further_says_so(tmp_path, capsys):
    main, out = example().main, tmp_path / "run"
    main(options(out, steps=3))
    trained = capsys.readouterr().out.splitlines()
    main(options(out, steps=2))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{out / 'step-000003'} is beyond --steps 2."
    assert last == trained[-1]
    assert last.endswith("after 3 steps")


@pytest.mark.parametrize(("context", "text", "said"), [(8, None, "There is no text at "), (400, 12_000, "too short")])
def test_a_text_that_is_not_there_or_too_short_is_one_line(context, text, said, tmp_path):
    place = tmp_path / "book.txt"
    if text:
        place.write_bytes(bytes(text))
    with pytest.raises(SystemExit, match=said) as stopped:
        example().main(options(tmp_path / "run", data=place, context=context))
    assert "\n" not in str(stopped.value)


def test_the_last_tenth_validates(tmp_path):
    text_of, whole = example().text_of, bytes(range(100)) * 200
    (tmp_path / "book.txt").write_bytes(whole)
    source = b"".join(path.read_bytes() for path in sorted(Path(egop.__file__).parent.rglob("*.py")))
    for place, expected in ((tmp_path / "book.txt", whole), (None, source)):
        text = text_of(place and str(place), 8, torch.device("cpu"))
        assert b"".join(part.numpy().tobytes() for part in (text.train, text.validation)) == expected
        assert len(text.validation) == len(expected) // 10


def test_the_example_is_short_and_says_how_it_is_run():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 195
    assert "torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py" in text


def not_finite(rank, world):
    """A batch with infinity in it, on the second process only; then what the bases are, and how often it failed."""
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
    """One process has fewer batches than the other, which waits for it as long as the group's timeout says."""
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
    """A basis from a file, which one process has estimated."""
    found = egop.Reparameterization.load(place)
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
def test_a_gradient_that_is_not_finite_keeps_the_basis_on_all_processes_alike(found, wrapper):
    first, second = (each["not finite"][wrapper] for each in found)
    assert first["kept"]
    assert second["kept"]
    assert first["failures"] == second["failures"] == 4  # one for each block
    for one, other in zip(first["bases"], second["bases"], strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_process_that_stops_early_is_an_error_in_the_others_after_the_timeout(found, wrapper):
    assert found[1]["early"][wrapper] == "finished"
    assert "imed out" in found[0]["early"][wrapper]


def test_a_basis_estimated_by_one_process_serves_any_number(found):
    model = network()
    steps(model, optimizer_of(model, torch.optim.AdamW, egop.Shared(), None), 0, STEPS)
    for each in found:
        for name, value in weights(model).items():
            torch.testing.assert_close(each["elsewhere"][name], value, rtol=0, atol=1e-10)
