"""How many digits products have, whatever the program has chosen for its network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Products in the precision of their tensors, also for who is called inside ``torch.autocast``."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 matrices in full precision, whatever the program has chosen for its network.

    Bases must stay orthonormal and points must not lose digits; TF32 keeps 11 bits of 24.
    """
    with without_tf32(), without_autocast():
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Products of float32 matrices in full precision where autocast leaves them in float32."""
    kinds: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    kept = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, kept, strict=True):
            kind.fp32_precision = precision
