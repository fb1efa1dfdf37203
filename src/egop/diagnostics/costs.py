"""A cost model: what a step of each form takes beyond AdamW's, from shapes and from products timed on this machine.

Blocks of one shape are stacked, as the optimizer stacks them, and what is done with each stack is added up: products
with bases and Gram matrices in every step, a renewal divided by the steps between two, Newton-Schulz steps. What else a
step takes is that of toys: by stack, and by entry.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from egop.basis import Basis, Block, ChangeOfBasis, Structure
from egop.diagnostics import forms
from egop.diagnostics.short_runs import clock
from egop.estimation import Objective, partition_objective
from egop.numerics import identity_matrices, orthonormalize
from egop.refresh import Online

__all__ = ["of_block", "of_form"]

_SELDOM = 4  # times that a step goes over weights while it goes once over Gram matrices, about
_TOY = 192  # the width of a network that says what else steps take
_ONLINE_EVERY, _EGOP_EVERY = Online().every, 20
_NEWTON_SCHULZ = 5  # iterations in a step of PolarAdam
_TURNS, _TURN = 3, 0.02  # how often a time is taken, and for how many seconds about

Stack = tuple[int, int, int]  # matrices of a stack, rows, width of the side that is rotated


def of_block(change: ChangeOfBasis) -> float:
    """The seconds of one encode and one decode of a block."""
    structure = change.structure()
    stacks = _stacks({change.block: structure})
    return sum(2 * _product(stack, change.block.dtype, str(change.device)) for stack in stacks)


def of_form(form: str, chosen: Mapping[Block, Structure], device: torch.device) -> float:
    """The seconds that a step of the optimizer takes beyond one of AdamW."""
    if not chosen:
        return 0.0
    by_entry = _by_entry(form, next(iter(chosen)).dtype, str(device))
    return _counted(form, chosen, str(device)) + _entries(form, chosen) * by_entry


def _counted(form: str, chosen: Mapping[Block, Structure], device: str) -> float:
    """What the products take, and what a step takes whatever is in it."""
    dtype, every = next(iter(chosen)).dtype, _EGOP_EVERY if form == "EGOP" else _ONLINE_EVERY
    kinds = len({(tuple(block.shapes), structure) for block, structure in chosen.items()})
    seconds = _overhead(form, kinds, device)
    for stack in _stacks(chosen):
        product = _product(stack, dtype, device)
        seconds += 2 * product
        if form != forms.FIXED:
            seconds += _gram(stack, dtype, device) + (_renewal(stack, dtype, device) + 2 * product) / every
        if form == "EGOP":
            seconds += _polar(stack, dtype, device)
    return seconds


def _entries(form: str, chosen: Mapping[Block, Structure]) -> float:
    """Of the weights; and of Gram matrices where there are any, which a step goes over less often."""
    grams = sum(count * width**2 for count, _, width in _stacks(chosen)) if form != forms.FIXED else 0
    return grams / _SELDOM + sum(block.size for block in chosen)


def _stacks(chosen: Mapping[Block, Structure]) -> list[Stack]:
    """What is multiplied together: for each side of each kind of block how many, rows and width."""
    counted: Counter[tuple[int, int, int]] = Counter()
    for block, structure in chosen.items():
        for place, shape in enumerate(structure.basis_shapes(block).values()):
            matrices, width = math.prod(shape[:-2]), shape[-1]
            counted[(block.size // (matrices * shape[-2]), width, place)] += matrices
    return [(count, rows, width) for (rows, width, _), count in counted.items()]


@functools.cache
def _product(stack: Stack, dtype: torch.dtype, device: str) -> float:
    count, rows, width = stack
    a, b = _made(dtype, device, (count, rows, width), (count, width, width))
    return _least(lambda: a @ b)


@functools.cache
def _gram(stack: Stack, dtype: torch.dtype, device: str) -> float:
    count, rows, width = stack
    (a,) = _made(dtype, device, (count, rows, width))
    return _least(lambda: a.mT @ a)


@functools.cache
def _renewal(stack: Stack, dtype: torch.dtype, device: str) -> float:
    """A step of orthogonal iteration: a product, a QR decomposition, and the rotation to the new basis."""
    count, _, width = stack
    (a,) = _made(dtype, device, (count, width, width))
    return _least(lambda: orthonormalize(a @ a)) + _product((count, width, width), dtype, device)


@functools.cache
def _polar(stack: Stack, dtype: torch.dtype, device: str) -> float:
    count, rows, width = stack
    short, long = sorted((rows, width))
    half = dtype is torch.float32 and torch.device(device).type == "cuda"
    (a,) = _made(torch.bfloat16 if half else dtype, device, (count, short, long))
    gram = a @ a.mT
    return _NEWTON_SCHULZ * (_least(lambda: a @ a.mT) + _least(lambda: gram @ gram) + _least(lambda: gram @ a))


@functools.cache
def _overhead(form: str, kinds: int, device: str) -> float:
    """What a step of a form takes beyond AdamW's with so many stacks of next to nothing."""
    taken = _toy(form, list(range(2, kinds + 3)), device)
    return max(0.0, taken.seconds - taken.plain)


@functools.cache
def _by_entry(form: str, dtype: torch.dtype, device: str) -> float:
    """What is not products: going over all entries, and finding nothing in a cache. As in a toy of some size."""
    taken = _toy(form, [_TOY, _TOY], device, dtype)
    seconds = taken.seconds - taken.plain - _counted(form, taken.blocks, device)
    return max(0.0, seconds) / _entries(form, taken.blocks)


def _toy(form: str, widths: Sequence[int], device: str, dtype: torch.dtype = torch.float32) -> forms.Taken:
    """What the steps of a form take for linear layers of these widths."""
    with torch.random.fork_rng(devices=[]):
        layers = [nn.Linear(*pair, bias=False, device="cpu") for pair in itertools.pairwise(widths)]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], 2, device="cpu")).to(device, dtype)
    batch = torch.ones(2, widths[0], device=device, dtype=dtype)
    objective = Objective(model, lambda model, batch: model(batch).square().mean(), [batch])
    structure, place = forms.STRUCTURES[form], torch.device(device)
    blocks, _ = partition_objective(objective, "parameter")
    changes = []
    for block in blocks[:-1]:  # the last one is the head
        shapes = structure.basis_shapes(block).items()
        changes.append(
            structure.change(block, {name: identity_matrices(shape, dtype, place) for name, shape in shapes})
        )
    basis = Basis(changes) if form == forms.FIXED else None
    # Twice, since all that is predicted rests on it.
    taken = [forms.measured(objective, form, basis, 0, lambda: None) for _ in range(2)]
    return min(taken, key=lambda each: each.seconds - each.plain)


def _made(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes]


def _least(function: Callable[[], object]) -> float:
    """The time of a call: the mean of a turn that is as long as steps are, and of some turns the least."""
    function()  # the first call may compile, allocate and load
    began = clock()
    function()
    count = max(1, min(100, round(_TURN / max(clock() - began, 1e-9))))
    times = []
    for _ in range(_TURNS):
        began = clock()
        for _ in range(count):
            function()
        times.append((clock() - began) / count)
    return min(times)
