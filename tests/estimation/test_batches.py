"""Batches: nested containers of tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from egop.estimation.batches import map_leaves, move_batches

Pair = namedtuple("Pair", "x y")
META = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    label: str = "a"


def defaults(x):
    found = defaultdict(list)
    found["x"] = x
    return found


STRUCTURES = {
    "tensor": lambda x: x,
    "list": lambda x: [x, "text", None, 3],
    "tuple": lambda x: (x, (x, [x])),
    "namedtuple": lambda x: Pair(x, 1),
    "dict": lambda x: {"x": x, "y": {"z": (x,)}},
    "ordered": lambda x: OrderedDict(b=x, a=1),
    "default": defaults,
    "dataclass": lambda x: Sample(x, "b"),
}


def tensors(structure):
    found = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else leaf, structure)
    return found


@pytest.mark.parametrize("kind", STRUCTURES)
def test_mapping_keeps_the_container_types(kind):
    x, y = torch.ones(2), torch.zeros(2)
    before, wanted = STRUCTURES[kind](x), STRUCTURES[kind](y)
    after = map_leaves(lambda leaf: y if leaf is x else leaf, before)
    assert type(after) is type(before)
    assert repr(after) == repr(wanted)
    assert repr(before) == repr(STRUCTURES[kind](x)), "the input is not modified"


@pytest.mark.parametrize("kind", STRUCTURES)
def test_batch_in_place_is_returned_as_the_same_object(kind):
    batch = STRUCTURES[kind](torch.ones(2))
    assert move_batches([batch], torch.device("cpu"), torch.float32)[0] is batch


@pytest.mark.parametrize("kind", STRUCTURES)
def test_all_tensors_are_moved_without_changing_the_batch(kind):
    batch = STRUCTURES[kind](torch.ones(2))
    (found,) = move_batches([batch], META, None)
    assert {each.device.type for each in tensors(found)} == {"meta"}
    assert {each.device.type for each in tensors(batch)} == {"cpu"}


def test_only_floating_point_tensors_are_cast():
    (found,) = move_batches(
        [[torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)]], None, torch.half
    )
    assert [each.dtype for each in found] == [torch.half, torch.int64, torch.bool]


def test_repeated_batch_is_moved_once():
    batch, other = [torch.ones(2)], [torch.ones(2)]
    first, second, third = move_batches([batch, other, batch], META, None)
    assert first is third
    assert first is not second


def test_objects_with_a_to_method_are_copied_and_moved():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    (found,) = move_batches([{"words": packed}], META, None)
    assert found["words"].data.device == META
    assert found["words"].batch_sizes.device.type == "cpu", "which torch wants there"

    class InPlace:
        x = torch.ones(2)

        def to(self, device):
            self.x = self.x.to(device)
            return self

    batch = InPlace()
    assert move_batches([batch], META, None)[0].x.device == META
    assert batch.x.device.type == "cpu"


def test_tokenizer_encodings_are_moved_and_cast():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, dtype=torch.int64), "weights": torch.ones(2)})
    (found,) = move_batches([batch], META, torch.bfloat16)
    assert type(found) is transformers.BatchEncoding
    assert (found.input_ids.device, found["weights"].dtype) == (META, torch.bfloat16)
    assert (batch.input_ids.device.type, batch["weights"].dtype) == ("cpu", torch.float32)
