"""The code in docs/distributed.md runs, in a group of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import egop

TEXT = (Path(__file__).parent.parent.parent / "docs" / "distributed.md").read_text()


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_code_runs(tmp_path):
    given = {
        "torch": torch,
        "egop": egop,
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard,
        "mesh": init_device_mesh("cpu", (1,)),
        "folder": tmp_path / "checkpoints",
        "network": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        "loss_fn": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "batches": [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(3)],
    }
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, given)
    assert given["step"] == 100
    assert torch.cat([each.flatten() for each in given["model"].parameters()]).isfinite().all()
