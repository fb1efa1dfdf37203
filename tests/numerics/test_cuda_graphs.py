"""CUDA graphs: each recorder has a stream of its own for as long as it lives."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from egop.numerics import cuda_graphs
from egop.numerics.cuda_graphs import InPlaceGraph, Recorder, run_in_branches

DEVICE = torch.device("cuda", 0)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def streams(monkeypatch):
    """Provide four streams of each priority, handed out in turn as torch does."""
    numbers = {-1: itertools.cycle(range(4)), -2: itertools.cycle(range(4, 8))}
    monkeypatch.setattr(cuda_graphs, "_STREAMS", 4)
    monkeypatch.setattr(cuda_graphs, "_used_branches", set())
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=next(numbers[priority]))
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def test_no_two_recorders_share_a_stream(streams):
    captures = [cuda_graphs._new_capture_stream(DEVICE) for _ in range(4)]
    assert len({capture.stream.cuda_stream for capture in captures}) == 4
    assert cuda_graphs._new_capture_stream(DEVICE) is None, "no stream is left"
    assert cuda_graphs._new_capture_stream(torch.device("cuda", 1)) is not None
    freed = captures.pop(2).stream.cuda_stream
    assert cuda_graphs._new_capture_stream(DEVICE).stream.cuda_stream == freed


def test_stream_is_reused_after_its_recorder_is_gone(streams):
    for _ in range(20):
        assert cuda_graphs._new_capture_stream(DEVICE) is not None


def test_branch_is_never_reused(streams):
    first = cuda_graphs._new_capture_stream(DEVICE, branched=True)
    taken = {branch.cuda_stream for branch in first.branches}
    assert len(taken) == 2
    del first
    later = [cuda_graphs._new_capture_stream(DEVICE, branched=True) for _ in range(2)]
    assert [len(capture.branches) for capture in later] == [2, 0], "no branches are left"
    assert taken.isdisjoint(branch.cuda_stream for branch in later[0].branches)


def test_tasks_run_in_turn_outside_a_recording():
    assert run_in_branches([lambda: 1, lambda: 2, lambda: 3, lambda: 4]) == [1, 2, 3, 4]


@needs_gpu
def test_parallel_branches_give_the_same_results():
    tensors = torch.randn(6, 256, 256, device="cuda")

    def products():
        return torch.stack(run_in_branches([lambda each=each: each @ each @ each for each in tensors]))

    again = InPlaceGraph(products, Recorder(branched=True))
    for _ in range(3):
        found = again.run([tensors])
    assert len(again._recordings) == 1
    assert torch.equal(found, torch.stack([each @ each @ each for each in tensors]))
    tensors.normal_()
    assert torch.equal(again.run([tensors]), torch.stack([each @ each @ each for each in tensors]))


@needs_gpu
def test_graph_outlives_the_graphs_of_others():
    """torch has 32 streams, so other graphs are recorded on the same one and freed (pytorch/pytorch#193402)."""

    def recorded():
        tensors = torch.randn(3, 512, 512, device="cuda")
        again = InPlaceGraph(lambda one, other: one @ other @ one, Recorder())
        for _ in range(3):
            again.run([*tensors[:2]], *tensors[:2])
        return again, tensors

    first, tensors = recorded()
    expected = tensors[0] @ tensors[1] @ tensors[0]
    for _ in range(2 * cuda_graphs._STREAMS):
        other, inputs = recorded()
        del other, inputs
        gc.collect()
        torch.cuda.empty_cache()
        filled = torch.full((64, 2**20), torch.nan, device="cuda")  # overwrites what was freed too early
        assert torch.equal(first.run([*tensors[:2]], *tensors[:2]), expected)
        del filled
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:  # graphs of the training script
        with torch.cuda.graph(graph):
            tensors[0] @ tensors[1]
    del graph, graphs
    torch.cuda.empty_cache()
    assert torch.equal(first.run([*tensors[:2]], *tensors[:2]), expected)


@needs_gpu
def test_what_is_replayed_on_one_place_is_what_is_computed():
    """Also when tensors, shapes or the precision change."""
    calls = []

    def function(one, other, factor=1):
        calls.append(factor)
        one.add_(1)
        return factor * one @ other

    again = InPlaceGraph(function, Recorder())
    one, other = torch.randn(2, 64, 64, device="cuda")
    kept = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for tensors in [(one, other)] * 5 + [(one[:32], other)] * 3 + [(other, one)] * 3:
                expected = (tensors[0] + 1) @ tensors[1]
                assert torch.equal(again.run(tensors, *tensors), expected)
    finally:
        torch.set_float32_matmul_precision(kept)
    # Three sets of tensors in two precisions: each computed once and recorded once, up to the limit.
    assert len(again._recordings) == cuda_graphs._MAX_RECORDINGS
    assert len(calls) == cuda_graphs._MAX_RECORDINGS * 2 + 2 * 3


@needs_gpu
def test_what_cannot_be_recorded_is_computed():
    recorder = Recorder()
    again = InPlaceGraph(lambda tensor: tensor * float(tensor.sum()), recorder)
    other = InPlaceGraph(lambda tensor: tensor * 2, recorder)
    tensor = torch.ones(4, device="cuda")
    for _ in range(4):
        assert torch.equal(again.run([tensor], tensor), 4 * torch.ones(4, device="cuda"))
        assert torch.ones(1, device="cuda").item() == 1  # the device is none the worse for it,
        assert torch.equal(other.run([tensor], tensor), 2 * torch.ones(4, device="cuda"))  # nor are other recordings
    assert None not in other._recordings.values()
