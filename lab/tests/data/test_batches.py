"""Minibatches of tensors held in memory."""

import pytest
import torch

from egop_lab.data.batches import Batches


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_pass_holds_every_row_once():
    rows = torch.arange(3823)
    batches = list(Batches(rows, rows * 2, size=300, generator=seeded()))
    assert [len(first) for first, _ in batches] == [300] * 12 + [223]
    seen = torch.cat([first for first, _ in batches])
    assert torch.equal(seen.sort().values, rows)
    assert all(torch.equal(second, first * 2) for first, second in batches)


def test_batches_are_the_rows_in_a_random_order():
    rows = torch.randn(1000, 3)
    order = torch.randperm(1000, generator=seeded())
    batches = list(Batches(rows, torch.arange(1000), size=3, generator=seeded()))
    for (features, places), expected in zip(batches, order.split(3), strict=True):
        assert torch.equal(features, rows[expected])
        assert torch.equal(places, expected)


@pytest.mark.parametrize(("rows", "drop_last", "expected"), [(6, False, 3), (7, False, 4), (7, True, 3), (6, True, 3)])
def test_length_is_the_number_of_batches(rows, drop_last, expected):
    source = Batches(torch.arange(rows), size=2, generator=seeded(), drop_last=drop_last)
    assert len(source) == len(list(source)) == expected


def test_drop_last_leaves_out_other_rows_on_every_pass():
    source = Batches(torch.arange(5), size=4, generator=seeded(), drop_last=True)
    left_out = {(set(range(5)) - set(rows.tolist())).pop() for _ in range(40) for (rows,) in source}
    assert left_out == set(range(5))


def test_each_pass_has_a_new_order_and_the_seed_decides_it():
    def passes(seed):
        source = Batches(torch.arange(20), size=20, generator=seeded(seed))
        return [next(iter(source))[0].tolist() for _ in range(2)]

    assert passes(0) == passes(0)
    assert passes(0)[0] != passes(0)[1]
    assert passes(0) != passes(1)


def test_batches_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(Batches(torch.arange(20), size=3, generator=seeded()))
    assert torch.equal(torch.get_rng_state(), before)
