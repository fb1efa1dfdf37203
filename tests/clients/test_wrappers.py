"""Wrappers that frameworks put around an optimizer, in the two ways in which they have been written."""

from __future__ import annotations

import pytest
import runs
import training

EIGHT = 8


class Copying:
    """As Lightning's up to 2.5: of a subclass of the optimizer's class, with a copy of its ``__dict__``."""

    def __init__(self, optimizer):
        self.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name not in ("step", "__del__")}
        self.__class__ = type("Copying", (type(self), type(optimizer)), {})
        self.original = optimizer

    def step(self, closure=None):
        return self.original.step(closure)


class Passing:
    """As Lightning's from 2.6 on: likewise, with nothing of its own, so that what is missing is read there."""

    def __init__(self, optimizer):
        self.original = optimizer
        self.__class__ = type("Passing", (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self.original.step(closure)

    def __getattr__(self, name):
        return getattr(self.original, name)


@pytest.mark.parametrize("wrapper", [Copying, Passing])
@pytest.mark.parametrize("action", runs.ACTIONS)
def test_wrapper_and_optimizer_are_one(action, wrapper):
    kind, act = runs.ACTIONS[action]
    network = training.network()
    optimizer = runs.optimizer_of(network, kind)
    runs.loop(kind, EIGHT, model=network, optimizer=wrapper(optimizer), act=act)
    assert runs.same(network, runs.loop(kind, EIGHT, act=act)[0])


@pytest.mark.parametrize("wrapper", [Copying, Passing])
@pytest.mark.parametrize("action", runs.ACTIONS)
def test_what_is_done_to_the_optimizer_is_seen_through_the_wrapper(action, wrapper):
    kind, act = runs.ACTIONS[action]
    network = training.network()
    optimizer = runs.optimizer_of(network, kind)
    wrapped = wrapper(optimizer)
    runs.loop(kind, EIGHT, model=network, optimizer=optimizer, act=act)
    plain, expected = runs.loop(kind, EIGHT, act=act)
    assert wrapped.param_groups == optimizer.param_groups
    assert repr(wrapped.state_dict()) == repr(expected.state_dict())
    optimizer.load_state_dict(wrapped.state_dict())
    runs.loop(kind, 2, model=network, optimizer=optimizer)
    assert runs.same(network, runs.loop(kind, 2, model=plain, optimizer=expected)[0])
