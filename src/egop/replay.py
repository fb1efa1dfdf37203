"""How a GPU does small work without holding up the training: recorded as one call, or on a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
        self.graph, self.outputs = _recorded(lambda: function(*self.inputs), tensors[0].device, pool)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        for own, tensor in zip(self.inputs, tensors, strict=True):
            own.copy_(tensor)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class InPlace(Generic[Arguments, Result]):
    """A function of the same tensors again and again: recorded when they come twice in a row, replayed from then on.

    It reads and writes them where they are, so nothing is copied; what it returns is overwritten by the next call. With
    other tensors, on other devices and inside someone else's recording the function is called as it is.

    Args:
        function: has no host side, and does nothing beyond these tensors and what it returns.
    """

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self.function = function
        self._tensors: list[Tensor] = []  # of the last call; held, so that nobody else gets their memory
        self._key: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._refused = False

    def of(self, tensors: Sequence[Tensor], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """What the function returns for these arguments, all tensors of which are named first."""
        device = tensors[0].device if tensors else torch.device("cpu")
        if self._refused or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self.function(*args, **kwargs)
        precision = torch.backends.cuda.matmul.fp32_precision  # is recorded too
        key = precision, *[(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device) for tensor in tensors]
        if key != self._key:
            self._key, self._tensors, self._graph, self._result = key, list(tensors), None, None
            return self.function(*args, **kwargs)
        if self._graph is None:
            try:
                self._graph, self._result = _recorded(lambda: self.function(*args, **kwargs), device)
            except RuntimeError:  # not every library function can be recorded, nor work on several devices
                self._refused = True
                return self.function(*args, **kwargs)
        self._graph.replay()
        return self._result


def _recorded(
    function: Callable[[], Result], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call as a graph, and where its results will be."""
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        # Not by torch.cuda.graph, which collects all garbage first; other threads may go on with what they do.
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    return graph, result


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


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source to its target.

    ``torch._foreach_copy_`` has a private name, but it is what torch's own optimizers write many tensors with in few
    kernels; a test notices when it goes away.
    """
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
