"""CUDA graphs on the CPU: what is recorded is computed again by every replay, into the same memory."""

import collections

import torch
from torch.utils._pytree import tree_leaves

from egop.numerics import Recorder
from egop.optim import matrix_optimizer


def record_on_the_cpu(monkeypatch):
    """Let everything be recorded as on a GPU; returns how often something was recorded and replayed.

    As with a graph, a replay does not see the arguments of its call, only the memory that was recorded.
    """
    counts = collections.Counter()

    def is_column(rates):
        return isinstance(rates[0], torch.Tensor) and rates[0].numel() > 1

    def record(self, function, device):
        counts["recorded"] += 1
        result = function()

        def replay():
            counts["replayed"] += 1
            for place, value in zip(tree_leaves(result), tree_leaves(function()), strict=True):
                if isinstance(place, torch.Tensor):
                    place.copy_(value)

        return _only_once(replay), result

    monkeypatch.setattr(Recorder, "device_for", lambda self, tensors: torch.device("cpu") if tensors else None)
    monkeypatch.setattr(Recorder, "record", record)
    monkeypatch.setattr(
        matrix_optimizer.MatrixOptimizer,
        "_is_recorded",
        lambda self, stacks, rates: self._is_recordable and bool(stacks) and not any(map(is_column, rates)),
    )
    return counts


def _only_once(replay):
    """Skip the first replay: unlike on a GPU, recording has already computed it here."""
    calls = []

    def again():
        calls.append(None)
        if len(calls) > 1:
            replay()

    return again
