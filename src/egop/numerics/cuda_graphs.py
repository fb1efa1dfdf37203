"""CUDA graphs and side streams, so that small work on a GPU does not hold up training."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

# Up to this many bytes of weights, a GPU finishes the work of a step before the host has launched it.
SMALL_NETWORK_BYTES = 128 * 2**20

# How many sets of tensors a function is recorded for, and how many it remembers: more than this does not pay off.
_MAX_RECORDINGS, _MAX_REMEMBERED = 4, 16

Function = Callable[..., tuple[Tensor, ...]]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _CaptureStream:
    """A stream to record on, together with its graphs and their memory pool."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.pool = stream, torch.cuda.graph_pool_handle()
        self.branches: list[torch.cuda.Stream] = []  # for work that is recorded in parallel
        self.graphs: list[torch.cuda.CUDAGraph] = []


# All capture streams in use, by device and stream. Freeing a graph also frees the workspace of the matrix products on
# its stream, which other graphs recorded there still use (pytorch/pytorch#193402): their results would be wrong. So
# each stream has one owner, which is freed as a whole. torch has few streams and hands them out in turn. Nobody else
# records on streams of these priorities, as torch.cuda.graph uses the default priority.
_in_use: weakref.WeakValueDictionary[tuple[torch.device, int], _CaptureStream] = weakref.WeakValueDictionary()
_STREAMS, _PRIORITY, _BRANCH_PRIORITY = 32, -1, -2
_BRANCHES = 2  # besides the stream itself: small products leave most of a GPU idle; a third branch helped little
# The workspace on a branch stays in the memory of the first graph recorded there, so a branch is never reused.
_used_branches: set[tuple[torch.device, int]] = set()


def _new_capture_stream(device: torch.device, *, branched: bool = False) -> _CaptureStream | None:
    """Return an unused capture stream, with as many branches as are left if wanted; None if all are in use."""
    stream = _free_stream(device, _PRIORITY)
    if stream is None:
        return None
    capture = _in_use[device, stream.cuda_stream] = _CaptureStream(stream)
    while branched and len(capture.branches) < _BRANCHES:
        branch = _free_stream(device, _BRANCH_PRIORITY)
        if branch is None:
            break
        _used_branches.add((device, branch.cuda_stream))
        capture.branches.append(branch)
    return capture


def _free_stream(device: torch.device, priority: int) -> torch.cuda.Stream | None:
    """Return a stream that is not in use and was never a branch; None if there is none."""
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(device, priority=priority)
        key = device, stream.cuda_stream
        if key not in _in_use and key not in _used_branches:
            return stream
    return None


_recording = threading.local()  # its `capture` is the stream that this thread is recording on


def run_in_branches(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call functions and return their results. A recording with branches records them to run in parallel.

    No function may write what another one reads or writes, or release a tensor created earlier in the recording.
    """
    capture: _CaptureStream | None = getattr(_recording, "capture", None)
    if capture is None or not capture.branches:
        return [task() for task in tasks]
    current = torch.cuda.current_stream(capture.stream.device)
    streams = [current, *capture.branches]
    for branch in capture.branches:
        branch.wait_stream(current)
    results = []
    for task, stream in zip(tasks, itertools.cycle(streams), strict=False):
        with torch.cuda.stream(stream):
            results.append(task())
    for branch in capture.branches:
        current.wait_stream(branch)
    return results


class Recorder:
    """A recorder of CUDA graphs that share one stream and one memory pool per device.

    Therefore these graphs never run at the same time, and the results of one must be used before the next one runs. All
    of them live as long as this object.

    Args:
        branched: whether :func:`run_in_branches` may record work to run in parallel.
    """

    def __init__(self, *, branched: bool = False) -> None:
        self._branched = branched
        self._current: dict[torch.device, _CaptureStream] = {}
        self._abandoned: list[_CaptureStream] = []  # a recording failed there; earlier graphs are still in use

    def device_for(self, tensors: Sequence[Tensor]) -> torch.device | None:
        """Return the GPU that holds all tensors; None if there is no such GPU or a graph is being recorded already."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or next(iter(devices)).type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        return devices.pop()

    def record(
        self, function: Callable[[], Result], device: torch.device
    ) -> tuple[Callable[[], object], Result] | None:
        """Record a function. Return its replay function and its result tensors; None if it cannot be recorded."""
        with torch.cuda.device(device):
            capture = self._current.get(device) or _new_capture_stream(device, branched=self._branched)
            if capture is None:
                return None
            self._current[device] = capture
            graph = torch.cuda.CUDAGraph()
            capture.graphs.append(graph)
            # Do not use torch.cuda.graph, which collects garbage first. Other threads may continue to launch work.
            torch.cuda.synchronize()
            try:
                with torch.cuda.stream(capture.stream):
                    graph.capture_begin(pool=capture.pool, capture_error_mode="thread_local")
                    _recording.capture = capture
                    try:
                        result = function()
                    finally:
                        _recording.capture = None
                        graph.capture_end()
            except RuntimeError:  # not every library function can be recorded
                self._abandoned.append(self._current.pop(device))  # the stream may be in an undefined state
                return None
        return graph.replay, result


class GraphedFunction:
    """A function of tensors that is recorded the second time it sees a combination of shapes, and replayed after that.

    A decomposition consists of hundreds of kernels, which take the host longer to launch than the device to run.
    Arguments are copied to where the graph expects them, and results are copied out.

    Args:
        function: a function of tensors only: no random numbers, no values read by the host.
        recorder: records the graphs.
    """

    def __init__(self, function: Function, recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self._known: dict[Any, Function | None] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the function's results."""
        device = self.recorder.device_for(tensors)
        if device is None:
            return self.function(*tensors)
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if key not in self._known:  # the first call also initializes libraries, which cannot be recorded
            self._known[key] = None
            return self.function(*tensors)
        known = self._known[key]
        if known is None:
            known = self._known[key] = self._record(tensors, device)
        return known(*tensors)

    def _record(self, tensors: Sequence[Tensor], device: torch.device) -> Function:
        inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        recording = self.recorder.record(lambda: self.function(*inputs), device)
        if recording is None:
            return self.function
        replay, outputs = recording

        def replay_with(*tensors: Tensor) -> tuple[Tensor, ...]:
            copy_all(inputs, tensors)
            replay()
            return tuple(output.clone() for output in outputs)

        return replay_with


class InPlaceGraph(Generic[Arguments, Result]):
    """A function that is recorded the second time it sees the same tensors, and replayed after that.

    It reads and writes the tensors where they are, without copies. The next call overwrites its results.

    Args:
        function: uses only these tensors and what it returns: no random numbers, no values read by the host.
        recorder: records the graphs.
    """

    def __init__(self, function: Callable[Arguments, Result], recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self._seen: set[Any] = set()
        self._recordings: dict[Any, tuple[Callable[[], object], Result] | None] = {}

    def run(self, tensors: Sequence[Tensor], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Return the function's result for these arguments; ``tensors`` lists every tensor among them."""
        device = self.recorder.device_for(tensors)
        if device is None:
            return self.function(*args, **kwargs)
        precision = torch.backends.cuda.matmul.fp32_precision  # part of the graph, as are numbers
        numbers = [argument for argument in args if isinstance(argument, int | float | str)]
        places = [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        key = (precision, *numbers, *places)
        if key not in self._recordings:
            if key not in self._seen or len(self._recordings) == _MAX_RECORDINGS:
                self._seen = {key} if len(self._seen) == _MAX_REMEMBERED else {*self._seen, key}
                return self.function(*args, **kwargs)
            self._recordings[key] = self.recorder.record(lambda: self.function(*args, **kwargs), device)
        recording = self._recordings[key]
        if recording is None:
            return self.function(*args, **kwargs)
        replay, result = recording
        replay()
        return result


class SideStream:
    """A separate stream per GPU for work whose result is needed later."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._busy: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def use(self, tensors: Sequence[Tensor]) -> Iterator[bool]:
        """Switch to the side stream if all tensors that are read or written are on one GPU; yield True if they are."""
        devices = {tensor.device for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield False
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._busy = self._streams[device]
        # Wait for the work launched so far: it writes what is read here, and may still use memory that is handed out.
        self._busy.wait_stream(torch.cuda.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(self._busy)  # keeps the memory from being reused before the work is done
        with torch.cuda.stream(self._busy):
            yield True

    def join(self) -> None:
        """Make later work on the current stream wait for the side stream. The host does not wait."""
        if self._busy is not None:
            torch.cuda.current_stream(self._busy.device).wait_stream(self._busy)
            self._busy = None


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source to its target, many tensors per kernel.

    ``torch._foreach_copy_`` is private, but torch's own optimizers rely on it; a test fails if it is removed.
    """
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape; return a view if there is only one."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
