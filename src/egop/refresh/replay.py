"""How a GPU does small work without holding up the training: recorded as one call, and on a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


class Replayed:
    """A function of tensors that is recorded when a shape comes for the second time, and replayed from then on.

    A decomposition is hundreds of launches, which take the host longer than the device. The recordings share one pool
    of memory: none of them runs beside another, and what they return is copied out at once. On other devices, and
    inside someone else's recording, the function is called as it is.

    Args:
        function: has no host side: no random numbers, no reading of values.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self._seen: dict[Any, _Recording | Function | None] = {}
        self._pool: Any = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the function returns."""
        if tensors[0].device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self.function(*tensors)
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if key not in self._seen:  # the first call also sets up what the libraries need, which cannot be recorded
            self._seen[key] = None
            return self.function(*tensors)
        recording = self._seen[key]
        if recording is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            try:
                recording = _Recording(self.function, tensors, self._pool)
            except RuntimeError:  # not every library function can be recorded
                recording = self.function
            self._seen[key] = recording
        return recording(*tensors)

    def __reduce__(self) -> tuple[type[Replayed], tuple[Function]]:
        """A copy makes recordings of its own."""
        return Replayed, (self.function,)


class _Recording:
    def __init__(self, function: Function, tensors: tuple[Tensor, ...], pool: Any) -> None:
        with torch.cuda.device(tensors[0].device):
            self.inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
            self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            # Not by torch.cuda.graph, which collects all garbage first; other threads may go on with what they do.
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.outputs = function(*self.inputs)
                finally:
                    self.graph.capture_end()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        for own, tensor in zip(self.inputs, tensors, strict=True):
            own.copy_(tensor)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class Aside:
    """A stream of its own on a GPU, for work whose result is wanted later."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._busy: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def of(self, tensors: Sequence[Tensor]) -> Iterator[bool]:
        """Work on these tensors, all that are read or written, beside what comes; not (False) if not on one GPU."""
        devices = {tensor.device for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield False
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._busy = self._streams[device]
        # After all that is under way: what it reads has been written, and memory it gets is no longer in use.
        self._busy.wait_stream(torch.cuda.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(self._busy)  # its memory is not given to others before the work is done
        with torch.cuda.stream(self._busy):
            yield True

    def join(self) -> None:
        """Let what comes from here on wait for the work, without waiting here."""
        if self._busy is not None:
            torch.cuda.current_stream(self._busy.device).wait_stream(self._busy)
            self._busy = None
