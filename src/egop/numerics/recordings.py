"""How a GPU does small work without holding up the training: recorded as one call, or on a stream of its own."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

# Up to so many bytes of weights a GPU is done with the work of a step before the host has launched it.
SMALL = 128 * 2**20

# How many sets of tensors a function is recorded for, and how many are looked out for: beyond that it does not pay.
_RECORDINGS, _REMEMBERED = 4, 16

Function = Callable[..., tuple[Tensor, ...]]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Place:
    """A stream that recordings are made on, the pool of their memory, and the recordings, which last as long."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.pool = stream, torch.cuda.graph_pool_handle()
        self.branches: list[torch.cuda.Stream] = []  # for what is recorded beside the rest
        self.graphs: list[torch.cuda.CUDAGraph] = []


# The places that exist, by device and stream. A recording that goes takes with it what products work in on its stream,
# also for other recordings made there (pytorch/pytorch#193402): their results would be wrong. So a stream has one
# place, which goes as a whole. torch has few streams and hands them out in turn; those of these priorities nobody else
# records on, as torch.cuda.graph takes one of the usual priority.
_places: weakref.WeakValueDictionary[tuple[torch.device, int], _Place] = weakref.WeakValueDictionary()
_STREAMS, _PRIORITY, _OF_BRANCHES = 32, -1, -2
_BRANCHES = 2  # beside the stream itself: small products leave most of a GPU idle; a third one brought little
# On a branch what products work in stays, in the memory of the first recording there: a branch is for one place, ever.
_branches: set[tuple[torch.device, int]] = set()


def _new_place(device: torch.device, *, branched: bool = False) -> _Place | None:
    """A place on a stream that has none, perhaps with branches, as far as there are some left; None if all have one."""
    stream = _free_stream(device, _PRIORITY)
    if stream is None:
        return None
    place = _places[device, stream.cuda_stream] = _Place(stream)
    while branched and len(place.branches) < _BRANCHES and (branch := _free_stream(device, _OF_BRANCHES)) is not None:
        _branches.add((device, branch.cuda_stream))
        place.branches.append(branch)
    return place


def _free_stream(device: torch.device, priority: int) -> torch.cuda.Stream | None:
    """One that has no place and never was a branch; None if there is none."""
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(device, priority=priority)
        key = device, stream.cuda_stream
        if key not in _places and key not in _branches:
            return stream
    return None


_recording = threading.local()  # its place, while something is recorded


def in_branches(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """What some functions return; in a recording with branches they are recorded to run side by side.

    None is to write what another one reads or writes, nor to let go of a tensor that was made in the recording before.
    """
    place: _Place | None = getattr(_recording, "place", None)
    if place is None or not place.branches:
        return [work() for work in works]
    here = torch.cuda.current_stream(place.stream.device)
    streams = [here, *place.branches]
    for branch in place.branches:
        branch.wait_stream(here)
    results = []
    for work, stream in zip(works, itertools.cycle(streams), strict=False):
        with torch.cuda.stream(stream):
            results.append(work())
    for branch in place.branches:
        here.wait_stream(branch)
    return results


class Recorder:
    """Makes the recordings of one original: on one stream of a device, in one pool of its memory.

    So none of them runs beside another, and what one returns is used before the next one runs. All of them last as long
    as this object.

    Args:
        branched: whether work may be recorded to run side by side, see :func:`in_branches`.
    """

    def __init__(self, *, branched: bool = False) -> None:
        self._branched = branched
        self._current: dict[torch.device, _Place] = {}
        self._left: list[_Place] = []  # where something could not be recorded; recordings made before go on

    def device_for(self, tensors: Sequence[Tensor]) -> torch.device | None:
        """Where work on these tensors can be recorded; None if they are not on one GPU, or someone records already."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or next(iter(devices)).type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        return devices.pop()

    def record(
        self, function: Callable[[], Result], device: torch.device
    ) -> tuple[Callable[[], object], Result] | None:
        """What does a function's work again, and where its results will be; None if it cannot be recorded."""
        with torch.cuda.device(device):
            place = self._current.get(device) or _new_place(device, branched=self._branched)
            if place is None:
                return None
            self._current[device] = place
            graph = torch.cuda.CUDAGraph()
            place.graphs.append(graph)
            # Not by torch.cuda.graph, which collects all garbage first; other threads may go on with what they do.
            torch.cuda.synchronize()
            try:
                with torch.cuda.stream(place.stream):
                    graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
                    _recording.place = place
                    try:
                        result = function()
                    finally:
                        _recording.place = None
                        graph.capture_end()
            except RuntimeError:  # not every library function can be recorded
                self._left.append(self._current.pop(device))  # the stream may be left half-way
                return None
        return graph.replay, result


class Replayed:
    """A function of tensors that is recorded when a shape comes for the second time, and replayed from then on.

    A decomposition is hundreds of launches, which take the host longer than the device. What comes in is copied to
    where the recording expects it, and what it returns is copied out.

    Args:
        function: has no host side: no random numbers, no reading of values.
        recorder: makes the recordings.
    """

    def __init__(self, function: Function, recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self._seen: dict[Any, Function | None] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the function returns."""
        device = self.recorder.device_for(tensors)
        if device is None:
            return self.function(*tensors)
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if key not in self._seen:  # the first call also sets up what the libraries need, which cannot be recorded
            self._seen[key] = None
            return self.function(*tensors)
        known = self._seen[key]
        if known is None:
            known = self._seen[key] = self._recorded(tensors, device)
        return known(*tensors)

    def _recorded(self, tensors: Sequence[Tensor], device: torch.device) -> Function:
        inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        recording = self.recorder.record(lambda: self.function(*inputs), device)
        if recording is None:
            return self.function
        replay, outputs = recording

        def again(*tensors: Tensor) -> tuple[Tensor, ...]:
            copy_all(inputs, tensors)
            replay()
            return tuple(output.clone() for output in outputs)

        return again


class InPlace(Generic[Arguments, Result]):
    """A function of the same tensors again and again: recorded when they come for the second time, then replayed.

    It reads and writes them where they are, so nothing is copied; what it returns is overwritten by the next call.

    Args:
        function: has no host side, and does nothing beyond these tensors and what it returns.
        recorder: makes the recordings.
    """

    def __init__(self, function: Callable[Arguments, Result], recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self._seen: set[Any] = set()
        self._recordings: dict[Any, tuple[Callable[[], object], Result] | None] = {}

    def of(self, tensors: Sequence[Tensor], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """What the function returns for these arguments, all tensors of which are named first."""
        device = self.recorder.device_for(tensors)
        if device is None:
            return self.function(*args, **kwargs)
        precision = torch.backends.cuda.matmul.fp32_precision  # is recorded too, as are numbers
        numbers = [argument for argument in args if isinstance(argument, int | float | str)]
        places = [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        key = (precision, *numbers, *places)
        if key not in self._recordings:
            if key not in self._seen or len(self._recordings) == _RECORDINGS:
                self._seen = {key} if len(self._seen) == _REMEMBERED else {*self._seen, key}
                return self.function(*args, **kwargs)
            self._recordings[key] = self.recorder.record(lambda: self.function(*args, **kwargs), device)
        recording = self._recordings[key]
        if recording is None:
            return self.function(*args, **kwargs)
        replay, result = recording
        replay()
        return result


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


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one; a single one is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
