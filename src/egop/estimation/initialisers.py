"""How a model initialises itself: by its layers' ``reset_parameters``, and by what its author wrote for the whole."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egop.distributed import processes
from egop.estimation.objective import Objective
from egop.numerics import has_drawn_outside_torch, seed_everything

logger = logging.getLogger("egop")

_said: weakref.WeakKeyDictionary[Objective, set[str]] = weakref.WeakKeyDictionary()

# Draws ``count`` points: for each parameter its values, stacked along a new first dimension.
Drawer = Callable[[torch.Generator, int], dict[str, Tensor]]

Step = Callable[[], object]

# From so many initialisations on, it pays to find out whether they can be drawn all at once.
_WORTH_A_TRIAL = 32
# Root mean squares that differ by this factor are of another scale; of fewer entries than these they differ by chance.
_MUCH, _WORTH_COMPARING = 3, 32
# So many parameters are named in a message.
_FEW = 5

# What authors call the function that initialises a model (timm, MAE, torchvision), or each of its modules
# (transformers, nanoGPT). Of those for the whole the first counts: the later ones are called by it.
_NAMES = ("init_weights", "initialize_weights", "_init_weights", "_initialize_weights")
# What the argument of the second kind is called.
_MODULE = ("m", "mod", "module", "submodule", "layer", "child")
# transformers marks with this what it has loaded or initialised, and then leaves it alone.
_MARK = "_is_hf_initialized"


class Initialiser:
    """Draws initialisations of a module: all at once with ``torch.func`` if that is found to do the same.

    A generator that is given must decide everything, so each call seeds the global random numbers, which
    initialisers draw from, by the generator's.
    """

    def __init__(self, objective: Objective, function: Callable[[nn.Module], object]) -> None:
        self.objective, self.function = objective, function
        self.vmaps: bool | None = None  # not known yet
        self.drawn = 0
        self.first: dict[str, Tensor] | None = None  # of all points, until one has been seen to differ from it

    @torch.no_grad()
    def draw(self, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        """Points from the generator."""
        seeds = torch.randint(2**62, (count,), generator=generator, device=generator.device).tolist()
        with self.objective.preserved():
            if self.vmaps is None and count >= _WORTH_A_TRIAL:
                self.vmaps = self._vmap_does_the_same(seeds[0])
            if self.vmaps and count > 1:
                points = self._vmapped(seeds[0], count, "different")
            else:
                points = stacked([self._one(seed, self.objective.current) for seed in seeds])
        self._check_that_they_differ(points)
        return points

    @torch.no_grad()
    def try_out(self) -> None:
        """Say what the initialiser leaves where it is, and where it draws another scale than the model has."""
        with self.objective.preserved():
            current = self.objective.current
            # From two starts: what stays at both is not written, what was drawn as it is (zeros, ones) is.
            start = {name: 2 * value + 1 for name, value in current.items()}
            drawn, again = self._one(0, current), self._one(0, start)
            untouched = [
                name
                for name in current
                if torch.equal(drawn[name], current[name]) and torch.equal(again[name], start[name])
            ]
            odd = _of_another_scale(drawn, current)
        if untouched:
            names = _listed([repr(name) for name in untouched])
            self._say(
                f"egop.Initialization() leaves {names} where they are: nothing in the model initialises them. "
                "Pass init_fn=... to draw them too."
            )
        if odd:
            self._say(
                f"egop.Initialization() draws weights of another scale than the model has: {_listed(odd)} (root mean "
                "squares). If they are pretrained or trained, sample around them: rho=egop.Recentered(scale). If the "
                "model was initialised in another way, give it: rho=egop.Initialization(init_fn=...)."
            )

    def _say(self, words: str) -> None:
        """Once of an objective: a diagnosis samples it again and again."""
        said = _said.setdefault(self.objective, set())
        if words not in said and processes.rank() == 0:
            logger.warning("%s", words)
        said.add(words)

    def _check_that_they_differ(self, points: dict[str, Tensor]) -> None:
        """Raise an error when the second point, and all others drawn with it, are the first one again."""
        if self.drawn == 0:
            self.first = {name: value[0].clone() for name, value in points.items()}
        self.drawn += len(next(iter(points.values())))
        if self.first is None or self.drawn == 1:
            return
        if all(torch.equal(value, self.first[name].expand_as(value)) for name, value in points.items()):
            raise ValueError(
                "egop.Initialization() draws the same point every time: nothing that it initialises with is random. "
                "Give an initialiser that draws from torch's random numbers, egop.Initialization(init_fn=...), or "
                "sample around the weights as they are: rho=egop.Recentered(scale)."
            )
        self.first = None

    def _one(self, seed: int, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        module = self.objective.module
        assert module is not None, "check() was not called"
        self.objective.write(start)  # what has no initialiser stays where training stands
        seed_everything(seed)
        self.function(module)
        return {name: parameter.detach().clone() for name, parameter in self.objective.parameters.items()}

    def _vmapped(self, seed: int, count: int, randomness: str) -> dict[str, Tensor]:
        def initialise(values: dict[str, Tensor]) -> dict[str, Tensor]:
            self.objective.at(values, self.function)
            return values  # written in place

        seed_everything(seed)
        start = repeated(self.objective.current, count)
        return dict(torch.func.vmap(initialise, randomness=randomness)(start))

    def _vmap_does_the_same(self, seed: int) -> bool:
        """With random numbers that all points share, vmap must give exactly what a single draw gives."""
        plain = self._one(seed, self.objective.current)
        if has_drawn_outside_torch(seed):
            return False
        try:
            shared = self._vmapped(seed, 2, "same")
            self._vmapped(seed, 2, "different")  # which refuses more
        except Exception:  # vmap refuses in many ways; the plain draw has shown that the initialiser is not at fault
            return False
        return all(torch.equal(shared[name], value.expand_as(shared[name])) for name, value in plain.items())


def own_initialiser(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """What initialises a module in the way in which it is built, in place; None where nothing in it does.

    First every layer's ``reset_parameters()``, inner ones first. Then what the author of a model, or of a part of it,
    wrote: a function for the whole, called once; or one for each module, as ``_init_weights(module)`` of transformers,
    which the modules inside are given to, up to those of a model inside that has its own. The layers of a LoRA
    adapter (peft) are initialised as its configuration says. Parts of which nothing trains are not touched.
    """
    steps = [*_resets(module, {}), *_written(module, None, {})]
    if not steps:
        return None
    marked = [tensor for tensor in module.parameters() if tensor.requires_grad and getattr(tensor, _MARK, False)]

    def initialise(_: nn.Module) -> None:
        with _unmarked(marked):
            for step in steps:
                step()

    return initialise


def _resets(module: nn.Module, adapters: Mapping[str, Any]) -> Iterator[Step]:
    if not _trains(module):
        return
    adapters = _adapters_of(module, adapters)
    # The layers of a LoRA adapter have a start of their own, unless it is left to them.
    lora = _has_lora(module) and not all(_start(config) is False for config in adapters.values())
    for name, child in module.named_children():
        if not lora or name == "base_layer":
            yield from _resets(child, adapters)
    # MultiheadAttention and Transformer spell it with an underscore; a test notices should torch rename it.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        yield reset


def _written(
    module: nn.Module, outer: Callable[[nn.Module], object] | None, adapters: Mapping[str, Any]
) -> Iterator[Step]:
    """The author's initialisers, in the order in which a model is built; ``outer`` is of a model around this module."""
    if not _trains(module):
        return
    adapters = _adapters_of(module, adapters)
    whole, per_module = _functions_of(module)
    per_module = per_module or outer
    for name, child in module.named_children():
        if not _has_lora(module) or name == "base_layer":
            yield from _written(child, per_module, adapters)
    if _has_lora(module):
        yield from _lora(module, adapters)
        return
    if per_module is not None:
        yield partial(per_module, module)
    if whole is not None:
        yield whole


def _functions_of(module: nn.Module) -> tuple[Step | None, Callable[[nn.Module], object] | None]:
    """What a module's class has for the whole of it, and for each module in it."""
    whole, per_module = None, None
    # Of the class: wrappers, as of peft and torch.compile, pass on what the model inside has.
    for name in _NAMES:
        function = getattr(module, name) if callable(getattr(type(module), name, None)) else None
        needed = None if function is None else _needed(function)
        if needed == [] and whole is None:
            whole = function
        elif needed is not None and len(needed) == 1 and per_module is None and _is_module(needed[0]):
            per_module = function
    # transformers' init_weights() does nothing but tie weights once a model is built.
    return (
        None if any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__) else whole
    ), per_module


def _needed(function: Callable[..., object]) -> list[inspect.Parameter] | None:
    """The arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    passed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [argument for argument in parameters if argument.default is argument.empty and argument.kind not in passed]


def _is_module(parameter: inspect.Parameter) -> bool:
    return parameter.name in _MODULE or "Module" in str(parameter.annotation)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _has_lora(module: nn.Module) -> bool:
    return callable(getattr(type(module), "reset_lora_parameters", None))


def _adapters_of(module: nn.Module, outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configurations of peft's adapters by name, which the model around a layer has."""
    configs = vars(module).get("peft_config")
    return configs if isinstance(configs, Mapping) else outer


def _lora(module: Any, adapters: Mapping[str, Any]) -> Iterator[Step]:
    for name in module.active_adapters:
        start = _start(adapters.get(name))
        if "init_lora_weights" not in inspect.signature(module.reset_lora_parameters).parameters:  # AdaLoRA
            if start is not False:
                yield partial(module.reset_lora_parameters, name)
        elif start in (True, "gaussian"):  # others depend on the layer's weight or on data, and are no distribution
            yield partial(module.reset_lora_parameters, name, start)


def _start(config: Any) -> Any:
    """How an adapter is initialised; False leaves that to torch's own layers."""
    return getattr(config, "init_lora_weights", True)


@contextlib.contextmanager
def _unmarked(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        setattr(parameter, _MARK, False)
    try:
        yield
    finally:
        for parameter in parameters:
            setattr(parameter, _MARK, True)


def _of_another_scale(drawn: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> list[str]:
    """The weights whose root mean squares differ much, in words; the few entries of small ones may differ by chance."""
    remarks = []
    for name, value in current.items():
        if value.dim() < 2 or value.numel() < _WORTH_COMPARING:
            continue
        here, there = (tensor.double().square().mean().sqrt().item() for tensor in (value, drawn[name]))
        if max(here, there) > _MUCH * min(here, there):
            remarks.append(f"'{name}' {there:.2g} instead of {here:.2g}")
    return remarks


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:_FEW]) + (f" and {len(items) - _FEW} more" if len(items) > _FEW else "")


def stacked(points: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """For each parameter its values at the points, along a new first dimension."""
    return {name: torch.stack([point[name] for point in points]) for name in points[0]}


def repeated(point: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """One point many times."""
    return {name: value.expand(count, *value.shape).clone() for name, value in point.items()}
