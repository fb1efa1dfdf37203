"""Where recordings are made: each original on a stream of its own, as long as it lives."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from egop.numerics import recordings
from egop.numerics.recordings import InPlace, Recorder, in_branches

DEVICE = torch.device("cuda", 0)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def streams(monkeypatch):
    """Four streams of each priority that are handed out in turn, as torch does with its own."""
    numbers = {-1: itertools.cycle(range(4)), -2: itertools.cycle(range(4, 8))}
    monkeypatch.setattr(recordings, "_STREAMS", 4)
    monkeypatch.setattr(recordings, "_branches", set())
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=next(numbers[priority]))
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def test_no_two_places_have_the_same_stream(streams):
    places = [recordings._new_place(DEVICE) for _ in range(4)]
    assert len({place.stream.cuda_stream for place in places}) == 4
    assert recordings._new_place(DEVICE) is None, "nothing is recorded where no stream is left"
    assert recordings._new_place(torch.device("cuda", 1)) is not None
    freed = places.pop(2).stream.cuda_stream
    assert recordings._new_place(DEVICE).stream.cuda_stream == freed


def test_a_place_whose_recorder_is_gone_is_free_again(streams):
    for _ in range(20):
        assert recordings._new_place(DEVICE) is not None


def test_a_branch_is_for_one_place_ever(streams):
    first = recordings._new_place(DEVICE, branched=True)
    taken = {branch.cuda_stream for branch in first.branches}
    assert len(taken) == 2
    del first
    later = [recordings._new_place(DEVICE, branched=True) for _ in range(2)]
    assert [len(place.branches) for place in later] == [2, 0], "without branches where none is left"
    assert taken.isdisjoint(branch.cuda_stream for branch in later[0].branches)


def test_outside_a_recording_works_are_done_in_turn():
    assert in_branches([lambda: 1, lambda: 2, lambda: 3, lambda: 4]) == [1, 2, 3, 4]


@needs_gpu
def test_branches_of_a_recording_give_what_works_in_turn_give():
    tensors = torch.randn(6, 256, 256, device="cuda")

    def products():
        return torch.stack(in_branches([lambda each=each: each @ each @ each for each in tensors]))

    again = InPlace(products, Recorder(branched=True))
    for _ in range(3):
        found = again.of([tensors])
    assert len(again._recordings) == 1
    assert torch.equal(found, torch.stack([each @ each @ each for each in tensors]))
    tensors.normal_()
    assert torch.equal(again.of([tensors]), torch.stack([each @ each @ each for each in tensors]))


@needs_gpu
def test_a_recording_outlives_those_of_others():
    """torch has 32 streams: sooner or later others come on the same one, and go (pytorch/pytorch#193402)."""

    def recorded():
        tensors = torch.randn(3, 512, 512, device="cuda")
        again = InPlace(lambda one, other: one @ other @ one, Recorder())
        for _ in range(3):
            again.of([*tensors[:2]], *tensors[:2])
        return again, tensors

    first, tensors = recorded()
    expected = tensors[0] @ tensors[1] @ tensors[0]
    for _ in range(2 * recordings._STREAMS):
        other, inputs = recorded()
        del other, inputs
        gc.collect()
        torch.cuda.empty_cache()
        filled = torch.full((64, 2**20), torch.nan, device="cuda")  # where something was freed too early
        assert torch.equal(first.of([*tensors[:2]], *tensors[:2]), expected)
        del filled
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:  # those of the training script
        with torch.cuda.graph(graph):
            tensors[0] @ tensors[1]
    del graph, graphs
    torch.cuda.empty_cache()
    assert torch.equal(first.of([*tensors[:2]], *tensors[:2]), expected)
