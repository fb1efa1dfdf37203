"""Control of the precision of products, independent of the settings that the program uses for its network."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

# A precision setting of torch: a backend ("generic" for the global one) and an operation ("all" for all of them).
Setting = tuple[str, str]

_MATRICES: list[Setting] = [("cuda", "matmul"), ("mkldnn", "matmul")]
_LAYERS: list[Setting] = [("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv"), ("mkldnn", "rnn")]

# The functions behind `fp32_precision` in torch.backends. The attributes themselves will not do: once the flags are
# frozen (``torch.backends.disable_global_flags``) some cannot be written, mkldnn writes another setting than it reads,
# and ``torch.backends.cudnn.flags`` turns inherited settings into explicit ones.
# tests/numerics/test_precision.py fails if these two functions change.
_read, _write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter

# A decorator for methods: some frameworks save checkpoints in inference mode, and tensors created there cannot be
# trained.
outside_inference_mode = torch.inference_mode(False)

_lock = threading.Lock()
_users = 0  # number of active scopes that need precise matrix products, in all threads
_undo = contextlib.ExitStack()  # restores the settings when the last scope ends


def without_autocast() -> contextlib.ExitStack:
    """Compute in the precision of the tensors, even inside ``torch.autocast``."""
    stack = contextlib.ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in full precision: without TF32, which keeps 11 of 24 bits, and without autocast.

    Bases must stay orthonormal and points must not lose digits.
    """
    with without_tf32(), without_autocast():
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply float32 matrices in full precision wherever autocast leaves them in float32.

    The settings are global. If they need to change, the first active scope changes them and the last one restores
    them, even if scopes of several threads overlap.
    """
    global _users
    with _lock:
        if _users == 0:
            _undo.enter_context(_raise_precision(_MATRICES))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _undo.close()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Switch off TF32 for convolutions and recurrent layers too, which cuDNN uses by default."""
    with without_tf32(), _raise_precision(_LAYERS):
        yield


@contextlib.contextmanager
def _raise_precision(settings: list[Setting]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for setting in settings:
            if not _is_precise(setting):
                stack.enter_context(_raise_setting(setting))
        yield


@contextlib.contextmanager
def _raise_setting(setting: Setting) -> Iterator[None]:
    """Set full precision at the level that the setting takes its value from: global, backend, or its own.

    A setting that was never written reports its inherited value, as if it had been set explicitly. Once written back,
    it would no longer inherit. So only settings that do not inherit are written.
    """
    backend = setting[0], "all"
    for origin in (("generic", "all"), backend, setting):
        kept = _read(*origin)
        if origin == backend and _is_inherited(backend):
            continue
        _write(*origin, "ieee")
        if _is_precise(setting):
            try:
                yield
            finally:
                _write(*origin, kept)
            return
        _write(*origin, kept)
    raise RuntimeError(f"torch did not switch {setting[1]} of the {setting[0]} backend to full precision.")


def _is_inherited(backend: Setting) -> bool:
    """Return True if the backend inherits the global setting."""
    kept = _read("generic", "all")
    _write("generic", "all", "ieee")
    value = _read(*backend)
    _write("generic", "all", "tf32")
    inherits = value != _read(*backend)
    _write("generic", "all", kept)
    return inherits


def _is_precise(setting: Setting) -> bool:
    return _read(*setting) in ("ieee", "none")
