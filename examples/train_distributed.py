"""Train a language model on bytes, on one or many processes, and resume after a crash.

Two processes:   torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py --out run
Your own text:   ... --data book.txt           (a file, or a folder with train.txt and valid.txt)
Sharded weights: ... --parallel fsdp           (FSDP2; otherwise DDP)
Plain AdamW:     ... --optimizer adamw
One process:     python examples/train_distributed.py --out run

It uses GPUs (nccl) if there are any, else CPUs (gloo). It resumes from the newest complete checkpoint in --out, on any
number of processes. Each batch depends only on the step, so a resumed run equals an uninterrupted one. The model and
the text reader come from egop-lab.
"""

import argparse
import gc
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import egop
from egop_lab.data.missing import MissingDataError
from egop_lab.data.text import Text, load
from egop_lab.models.gpt import GPT

WARM_UP = 50  # steps


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--data", help="the text to train on (default: egop's own source)")
    parser.add_argument("--optimizer", choices=["egop", "adamw"], default="egop")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--bf16", action="store_true", help="run forward and backward in bfloat16")
    sizes = {"steps": 1000, "batch": 32, "layers": 4, "width": 128, "heads": 4, "context": 128, "seed": 0}
    for name, default in (sizes | {"checkpoint-every": 100, "log-every": 10, "timeout": 300}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(arguments)


def join_group(device: torch.device, timeout: int) -> None:
    """Join the process group that torchrun has set up, or make a group of one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    # A process that waits longer than this for another one fails, so that torchrun can restart all of them.
    limit = timedelta(seconds=timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun's store still holds the addresses of dead processes
        store = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def parallelize(model: GPT, parallel: str, bf16: bool, device: torch.device) -> nn.Module:
    """Replicate the model with DDP, or shard it with FSDP2."""
    if parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def make_optimizer(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """Make AdamW, in a basis that follows the gradients or in the original coordinates."""
    settings = {"lr": lr, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), **settings)
    # Shared rotates each row on its own, so a process can rotate the rows it has without asking the others.
    refresh = egop.Online(structure={"blocks.*": egop.Shared()})
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, **settings)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 3) -> None:
    """Save to a folder of its own, and delete all but the newest ones."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step:06d}")
    if dist.get_rank() == 0:
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint, if there is one, and return its step."""
    # torch writes .metadata last: a folder without it is what a killed process has left.
    newest = max((path.parent for path in folder.glob("step-*/.metadata")), default=None)
    dist.barrier()  # nobody may delete or write a checkpoint before all have looked
    if newest is None:
        return 0
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return int(newest.name.removeprefix("step-"))


def load_text(place: str | None, context: int, device: torch.device) -> Text:
    """Load the text, by default the source of egop. The last tenth is for validation."""
    if place is not None:
        try:
            text = load(Path(place))
        except MissingDataError as error:
            raise SystemExit(str(error)) from None
        if len(text.train) < max(10_000, 100 * (context + 1)):
            raise SystemExit(f"The text at {place} is too short for a context of {context}.")
        return Text(text.train.to(device), text.validation.to(device))
    source = b"".join(path.read_bytes() for path in sorted(Path(egop.__file__).parent.rglob("*.py")))
    whole = torch.frombuffer(bytearray(source), dtype=torch.uint8).to(device)
    return Text(*whole.split([len(whole) - len(whole) // 10, len(whole) // 10]))


def draw_batch(text: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """Draw the batch of a step and return this process's share. All processes draw the same positions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
    share = starts[rank * options.batch // world : (rank + 1) * options.batch // world]
    return text[share.to(text.device) + torch.arange(options.context + 1, device=text.device)].long()


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the cross-entropy of every next byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def average(loss: Tensor) -> float:
    """Average a loss over all processes."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main(arguments: list[str] | None = None) -> None:
    """Train the model as the command line says."""
    options = parse_options(arguments)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    text = load_text(options.data, options.context, device)
    join_group(device, options.timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise SystemExit(f"--batch {options.batch} must be a multiple of the number of processes, {world}.")
    torch.manual_seed(options.seed)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    model = GPT(**sizes).to(device)
    model = parallelize(model, options.parallel, options.bf16, device)
    optimizer = make_optimizer(model, options.optimizer, options.lr)
    first = resume(options.out, model, optimizer)
    if rank == 0:
        print(f"step {first} of {options.steps} on {world} process(es), {device.type}", flush=True)
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss = compute_loss(model, draw_batch(text.train, step, options))
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % options.log_every == 0:
            mean = average(loss)
            if rank == 0:
                print(f"step {done}: loss {mean:.4f}", flush=True)
        if done % options.checkpoint_every == 0 or done == options.steps:
            save_checkpoint(options.out, done, model, optimizer)
    with torch.no_grad():
        loss = compute_loss(model, text.windows(options.context + 1, 64).long())
    if rank == 0:
        print(f"validation loss {loss.item():.4f} after {max(first, options.steps)} steps", flush=True)
    dist.barrier()
    del model, optimizer, loss  # they hold on to the group, whose threads must end before Python does
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
