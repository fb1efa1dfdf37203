"""Helpers for training on a GPU: synchronization, bfloat16, CUDA graphs, TF32."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or the number of threads on the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def compute_outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Compute a model's outputs in float32; on a GPU the model computes in bfloat16, images have channels last."""
    gpu = inputs.device.type == "cuda"
    if inputs.dim() == 4 and gpu:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=gpu, cache_enabled=False):
        outputs: Tensor = model(inputs)
    return outputs.float()


def describe_precision(device: torch.device) -> str:
    """Return the precision of timed trainings, for configurations."""
    return "bfloat16, TF32" if device.type == "cuda" else "float32"


def capture_graphs(module: M, *sample: Tensor) -> M:
    """Record the module's forward and backward pass, for inputs like the sample, as CUDA graphs."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
    kept = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # the fastest kernels are chosen once, for the graph
    torch.cuda.make_graphed_callables(module, tuple(each.contiguous() for each in sample))
    torch.backends.cudnn.benchmark = kept
    return module


@contextlib.contextmanager
def fast_math(device: torch.device) -> Iterator[None]:
    """Use TF32 for float32 products on a GPU, and silence the sampling's log lines, one per refresh."""
    logger = logging.getLogger("egop")
    kept = torch.get_float32_matmul_precision(), logger.level
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    logger.setLevel(logging.ERROR)  # the messages say that batch norm cannot be vmapped
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        logger.setLevel(kept[1])
