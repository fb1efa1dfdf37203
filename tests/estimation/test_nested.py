"""Tensors in nested lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from egop.estimation.nested import mapped, moved

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
    "read-only": lambda x: MappingProxyType({"x": x}),
    "dataclass": lambda x: Sample(x, "b"),
}


def tensors(structure):
    found = []
    mapped(structure, lambda each: isinstance(each, Tensor), found.append)
    return found


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_mapped_structure_is_of_the_same_kind_with_other_tensors(kind):
    x, y = torch.ones(2), torch.zeros(2)
    before, wanted = STRUCTURES[kind](x), STRUCTURES[kind](y)
    after = mapped(before, lambda each: each is x, lambda _: y)
    assert type(after) is type(before)
    assert repr(after) == repr(wanted)
    assert repr(before) == repr(STRUCTURES[kind](x)), "what is given is not written"


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_batch_that_is_in_its_place_is_the_same_object(kind):
    batch = STRUCTURES[kind](torch.ones(2))
    assert moved([batch], torch.device("cpu"), torch.float32)[0] is batch


@pytest.mark.parametrize("kind", STRUCTURES)
def test_all_tensors_of_a_batch_are_moved_and_the_batch_itself_stays(kind):
    batch = STRUCTURES[kind](torch.ones(2))
    (found,) = moved([batch], META, None)
    assert {each.device.type for each in tensors(found)} == {"meta"}
    assert {each.device.type for each in tensors(batch)} == {"cpu"}


def test_only_floating_tensors_are_rounded():
    (found,) = moved(
        [[torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)]], None, torch.half
    )
    assert [each.dtype for each in found] == [torch.half, torch.int64, torch.bool]


def test_a_batch_that_comes_twice_is_moved_once():
    batch, other = [torch.ones(2)], [torch.ones(2)]
    first, second, third = moved([batch, other, batch], META, None)
    assert first is third
    assert first is not second


def test_what_knows_how_to_move_itself_does_so_as_a_copy():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    (found,) = moved([{"words": packed}], META, None)
    assert found["words"].data.device == META
    assert found["words"].batch_sizes.device.type == "cpu", "which torch wants there"

    class InPlace:
        x = torch.ones(2)

        def to(self, device):
            self.x = self.x.to(device)
            return self

    batch = InPlace()
    assert moved([batch], META, None)[0].x.device == META
    assert batch.x.device.type == "cpu"


def test_the_encodings_of_a_tokenizer_are_moved_and_rounded_too():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, dtype=torch.int64), "weights": torch.ones(2)})
    (found,) = moved([batch], META, torch.bfloat16)
    assert type(found) is transformers.BatchEncoding
    assert (found.input_ids.device, found["weights"].dtype) == (META, torch.bfloat16)
    assert (batch.input_ids.device.type, batch["weights"].dtype) == ("cpu", torch.float32)
