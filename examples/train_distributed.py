"""A language model on bytes, trained on 1 to N processes, that goes on by itself after a crash.

Two processes:   torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py --out run
Your own text:   ... --data book.txt           (a file, or a folder with train.txt and valid.txt)
Sharded weights: ... --parallel fsdp           (FSDP2; otherwise DDP)
Plain AdamW:     ... --optimizer adamw
One process:     python examples/train_distributed.py --out run

It runs on GPUs (nccl) where there are some, else on CPUs (gloo). A checkpoint in --out is resumed from, on as many
processes as there are then. Every batch is a function of the step, so a resumed run equals an undisturbed one. The
model and what reads a text come from egop-lab.
"""

import argparse
import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import egop
from egop import checkpoint
from egop_lab.data.missing import MissingDataError
from egop_lab.data.text import Text, load
from egop_lab.models.gpt import GPT

WARM_UP = 50  # steps


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints and the TensorBoard logs")
    parser.add_argument("--data", help="a text; by default egop's own source")
    parser.add_argument("--optimizer", choices=["egop", "adamw"], default="egop")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16")
    sizes = {"steps": 1000, "batch": 32, "layers": 4, "width": 128, "heads": 4, "context": 128, "seed": 0}
    for name, default in (sizes | {"checkpoint-every": 100, "log-every": 10, "timeout": 300}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(arguments)


def begin(timeout: int) -> tuple[torch.device, int, int]:
    """Meet the other processes, if torchrun has started some; the device, the rank and the number of them."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return device, 0, 1
    # A process that waits longer than this for another gives up, so that torchrun can start all of them again.
    patience = timedelta(seconds=timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=patience))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun's store still holds the addresses of processes that died
        store = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    return device, rank, world


def wrapped(model: GPT, parallel: str, bf16: bool, device: torch.device) -> nn.Module:
    """The model on all processes: copies of it whose gradients are averaged, or shards."""
    if not dist.is_initialized():
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def text_of(place: str | None, context: int, device: torch.device) -> Text:
    """What to train on; by default egop's own source, which is there wherever egop is. The last tenth validates."""
    if place is not None:
        try:
            return load(place, device, smallest=max(10_000, 100 * (context + 1)))
        except MissingDataError as error:
            raise SystemExit(str(error)) from None
    source = b"".join(path.read_bytes() for path in sorted(Path(egop.__file__).parent.rglob("*.py")))
    whole = torch.frombuffer(bytearray(source), dtype=torch.uint8).to(device)
    return Text(*whole.split([len(whole) - len(whole) // 10, len(whole) // 10]))


def newest_of(run: dict[str, Any], out: Path) -> Path | None:
    """The checkpoint to go on from, which must be of a run like this one."""
    newest = checkpoint.latest(out)
    saved = checkpoint.extra(newest).get("run", run) if newest else run
    if others := [f"--{name} {value}" for name, value in saved.items() if value != run.get(name)]:
        raise SystemExit(f"{newest} is of {' '.join(others)}: use another --out.")
    return newest


def windows(text: Tensor, step: int, options: argparse.Namespace, rank: int, world: int) -> Tensor:
    """This process's share of the batch of a step: the places are drawn from the step, alike on all processes."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    places = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
    share = places[rank * options.batch // world : (rank + 1) * options.batch // world]
    return text[share.to(text.device) + torch.arange(options.context + 1, device=text.device)].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The cross-entropy of every next byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def averaged(loss: Tensor) -> float:
    """The mean over all processes."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def board(folder: Path, step: int) -> Any:
    """Where TensorBoard reads, or None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("No TensorBoard logs: `pip install tensorboard` for them.", flush=True)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)  # what was logged beyond the checkpoint is logged again


def main(arguments: list[str] | None = None) -> None:
    """Train."""
    options = parsed(arguments)
    device, rank, world = begin(options.timeout)
    if options.batch % world:
        raise SystemExit(f"--batch {options.batch} must be a multiple of the number of processes, {world}.")
    text = text_of(options.data, options.context, device)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    run = {"optimizer": options.optimizer} | sizes
    newest = newest_of(run, options.out)
    torch.manual_seed(options.seed)
    model = wrapped(GPT(**sizes).to(device), options.parallel, options.bf16, device)
    # Without blocks it is plain AdamW. One side only: sharded rows can be turned without asking other processes.
    one_sided = egop.Online(structure={"blocks.*": egop.Shared()})
    form = {"refresh": one_sided} if options.optimizer == "egop" else {"basis": egop.Reparameterization([])}
    optimizer = egop.ReparameterizedOptimizer(
        model, torch.optim.AdamW, lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95), **form
    )
    first = checkpoint.load(newest, model, optimizer)["step"] if newest else 0
    if rank == 0:
        start = f"step {first} of {options.steps} on {world} process(es), {device.type}"
        print(start if first <= options.steps else f"{newest} is beyond --steps {options.steps}.", flush=True)
    log = board(options.out, first) if rank == 0 else None
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss = loss_of(model, windows(text.train, step, options, rank, world))
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % options.log_every == 0:
            mean = averaged(loss)
            if rank == 0:
                print(f"step {done}: loss {mean:.4f}", flush=True)
            if log is not None:
                log.add_scalar("loss", mean, done)
        if done % options.checkpoint_every == 0 or done == options.steps:
            checkpoint.save(options.out / f"step-{done:06d}", model, optimizer, keep=3, step=done, run=run)
    with torch.no_grad():
        loss = loss_of(model, text.windows(options.context + 1, 64).long())
    if rank == 0:
        print(f"validation loss {loss.item():.4f} after {max(first, options.steps)} steps", flush=True)
    if log is not None:
        log.add_scalar("validation loss", loss.item(), max(first, options.steps))
        log.close()
    if dist.is_initialized():
        dist.barrier()
        del model, optimizer, loss  # they hold on to the group, whose threads must have ended before Python does
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
