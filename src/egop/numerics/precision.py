"""How many digits products have, whatever the program has chosen for its network."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

# A setting of torch: whose (a backend's, or "generic", of all), and for what ("all" of its operations, or one of them).
Setting = tuple[str, str]
Method = TypeVar("Method", bound=Callable[..., Any])

_MATRICES: list[Setting] = [("cuda", "matmul"), ("mkldnn", "matmul")]
_LAYERS: list[Setting] = [("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv"), ("mkldnn", "rnn")]

# What is read and written behind torch.backends' `fp32_precision`. Those attributes will not do: once the flags are
# frozen (``torch.backends.disable_global_flags``) some cannot be written, mkldnn's writes another setting than it
# reads, and ``torch.backends.cudnn.flags`` leaves inherited settings behind as chosen ones.
# tests/numerics/test_precision.py notices should these two change.
_read, _write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter

_lock = threading.Lock()
_users = 0  # how many scopes need precise products of matrices now, in all threads
_undo = contextlib.ExitStack()  # what the last of them puts back


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Products in the precision of their tensors, also for who is called inside ``torch.autocast``."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def in_normal_mode(method: Method) -> Method:
    """Frameworks save from inside ``torch.inference_mode``, where tensors are made that cannot be trained with."""

    @functools.wraps(method)
    def normally(*arguments: Any, **options: Any) -> Any:
        with torch.inference_mode(False):
            return method(*arguments, **options)

    return cast(Method, normally)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 matrices in full precision, whatever the program has chosen for its network.

    Bases must stay orthonormal and points must not lose digits; TF32 keeps 11 bits of 24.
    """
    with without_tf32(), without_autocast():
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Products of float32 matrices in full precision where autocast leaves them in float32.

    The settings are the whole program's: the first scope that needs it changes them, where they have to be changed at
    all, and the last one that leaves puts them back, also where scopes of several threads overlap.
    """
    global _users
    with _lock:
        if _users == 0:
            _undo.enter_context(_precise(_MATRICES))
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
    """The same for convolutions and recurrent layers too, which cuDNN computes in TF32 by default."""
    with without_tf32(), _precise(_LAYERS):
        yield


@contextlib.contextmanager
def _precise(settings: list[Setting]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for setting in settings:
            if not _is_precise(setting):
                stack.enter_context(_raised(setting))
        yield


@contextlib.contextmanager
def _raised(setting: Setting) -> Iterator[None]:
    """Full precision where a setting comes from: from itself, from its backend's, or from that of all.

    A setting that was not chosen shows what it inherits and cannot be told from a chosen one by looking. Written back,
    it would be a chosen one, and no longer follow what it has inherited from. So none is written that inherits.
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
    raise RuntimeError(f"torch does not compute {setting[0]}'s {setting[1]} in full precision when told to.")


def _is_inherited(backend: Setting) -> bool:
    """Whether a backend's setting follows that of all."""
    kept = _read("generic", "all")
    _write("generic", "all", "ieee")
    shown = _read(*backend)
    _write("generic", "all", "tf32")
    follows = shown != _read(*backend)
    _write("generic", "all", kept)
    return follows


def _is_precise(setting: Setting) -> bool:
    return _read(*setting) in ("ieee", "none")
