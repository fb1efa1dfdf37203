"""The role of each parameter: read from the module that holds it, or guessed from its name and shape."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# DistributedDataParallel puts this before every parameter name.
DDP_PREFIX = "module."

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = nn.modules.conv._ConvNd  # the common base class has no public name
_TRANSPOSED = nn.modules.conv._ConvTransposeNd
# The weight of these layers counts as a matrix even with a single input or output.
_LAYERS = (nn.Linear, nn.Bilinear, _CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# Common names of output layers, for models that do not declare theirs.
_HEADS = {"lm_head", "head", "classifier", "score", "embed_out"}
_NORM = re.compile(r"norm(?!al(?!i)|ous)", re.IGNORECASE)  # but neither "Normal", a distribution, nor "enormous"


def strip_compile_prefix(name: str) -> str:
    """Return a parameter's name without the prefixes that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


class Role(NamedTuple):
    """The role of a parameter in its layer."""

    kind: Literal["weight", "bias", "norm", "embedding", "head", "other"]
    # Number of groups of a transposed convolution; 1 for a matrix stored as (inputs, outputs).
    transposed: int = 0
    stacked: int = 0  # number of leading dimensions that count matrices: 1 for experts, (experts, outputs, inputs)
    why: str = ""  # for kind "other": why it is not rotated
    is_guess: bool = False  # guessed from name and shape
    has_padding_row: bool = False  # an embedding with a padding row, which gets no gradient and must not move
    overlaps: bool = False  # kernels of a convolution whose windows overlap, unlike patches

    @property
    def skip_reason(self) -> str:
        """Why ``"auto"`` leaves the parameter in original coordinates; empty if it does not."""
        return {"embedding": "an embedding", "head": "the output head"}.get(self.kind, self.why)


class ModuleIndex:
    """Names and roles of a module's parameters, without the prefixes that wrappers add.

    The module is searched again when an unknown parameter is looked up.
    """

    def __init__(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise TypeError(
                    "A scripted model hides its layers. Create the optimizer before torch.jit.script(model)."
                )
            if type(part).__name__ == "FullyShardedDataParallel":
                raise TypeError(
                    "FullyShardedDataParallel (FSDP1) flattens weights, so no matrix is left to rotate. Use FSDP2: "
                    "torch.distributed.fsdp.fully_shard(model)."
                )
        self.module = module
        self._search()

    def _search(self) -> None:
        named = list(self.module.named_parameters(remove_duplicate=False))
        pairs = [(strip_compile_prefix(name), tensor) for name, tensor in named]
        is_wrapped = all(name.startswith(DDP_PREFIX) for name, _ in pairs)
        self.parameters = {name.removeprefix(DDP_PREFIX) if is_wrapped else name: tensor for name, tensor in pairs}
        self._full_names = dict(zip(self.parameters, (name for name, _ in named), strict=True))
        self._names: dict[int, list[str]] = {}  # ids stay valid because self.parameters holds the tensors
        for name, parameter in self.parameters.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._roles = _read_roles(self.module)

    def names(self, parameter: Tensor) -> list[str]:
        """Return all names of a parameter: several if it is tied, none if the module does not hold it."""
        if id(parameter) not in self._names:
            self._search()
        return self._names.get(id(parameter), [])

    def find_current(self, name: str) -> Tensor | None:
        """Return the parameter that the module has under a name now, if any."""
        try:
            return self.module.get_parameter(self._full_names[name])
        except (KeyError, AttributeError):
            return None

    def role(self, parameter: Tensor) -> Role | None:
        """Return the role of a parameter, or None if the module does not hold it."""
        return self._roles[id(parameter)] if self.names(parameter) else None


def find_roles(parameters: Mapping[str, Tensor], module: nn.Module | ModuleIndex | None) -> dict[str, Role]:
    """Read the role of each parameter from the module; without a module, guess it from name and shape.

    - Norm layers (recognized by class name), vectors, biases and embeddings are not rotated.
    - A matrix in a class of the user's own is an embedding or an output head if it is named like one.
    - Output heads are what ``get_output_embeddings()`` of any submodule returns, and linear layers with a usual name
      (``lm_head``, ``classifier``, ``score``, ...). Otherwise the last linear layer is the head, if it comes after all
      other weights but those of frozen networks, and no linear layer is tied to an embedding (that one would be the
      head).
    - The weight of a convolution is a matrix of kernels. In any other module, a tensor with more than two dimensions
      is a stack of matrices, (..., outputs, inputs), such as experts or a position table (1, positions, width).
    - ``Conv1D`` of transformers is stored as (inputs, outputs), and so are experts whose ``gate_up_proj`` and
      ``down_proj`` only fit together that way. For other stacks the order is unknown.
    - A tensor with one row or column that is not a layer's weight (a class token, a magnitude of ``weight_norm``) is a
      vector. A tensor called ``..._log`` (Mamba's ``A_log``) is exponentiated entry by entry. Both are "other".

    Parametrized weights (``spectral_norm``) are not evaluated, because that may change the module.
    """
    if module is None:
        return {name: _guess_role(name, tensor) for name, tensor in parameters.items()}
    index = module if isinstance(module, ModuleIndex) else ModuleIndex(module)
    return {name: index.role(tensor) or _guess_role(name, tensor) for name, tensor in parameters.items()}


def has_norm_layers(module: nn.Module) -> bool:
    """Return True if a module contains normalization layers, with or without parameters."""
    return any(map(_is_norm, module.modules()))


def _is_norm(module: nn.Module) -> bool:
    # LayerNorm, RMSNorm, BatchNorm2d, ... have no common base class; custom ones are named similarly. Layers with a
    # normalized weight, and torch's weight_norm and spectral_norm, do not normalize activations.
    kind = type(module)
    is_of_weights = isinstance(module, _LAYERS) or kind.__module__.startswith("torch.nn.utils.")
    return bool(_NORM.search(kind.__name__)) and not is_of_weights


class _Use(NamedTuple):
    """One occurrence of a parameter in a module."""

    parameter: Tensor
    holder: nn.Module  # for a parametrized tensor, the module that owns the tensor
    attribute: str
    path: str  # of the holder, from the root module


def _find_uses(module: nn.Module) -> Iterator[_Use]:
    """Yield every occurrence of every parameter, without evaluating parametrizations."""
    hosts: dict[int, tuple[str, nn.Module, str]] = {}
    for path, part in module.named_modules():
        if parametrize.is_parametrized(part):
            hosts |= {id(entry): (path, part, name) for name, entry in part.parametrizations.items()}
        for name, parameter in part.named_parameters(recurse=False):
            if id(part) in hosts:  # named_modules() yields a host before its parametrizations
                host_path, host, tensor = hosts[id(part)]
                yield _Use(parameter, host, tensor if name == "original" else f"{tensor}_{name}", host_path)
            else:
                yield _Use(parameter, part, name, path)


def _read_roles(module: nn.Module) -> dict[int, Role]:
    """Return the role of each parameter of a module, by ``id``."""
    uses: dict[int, _Use] = {}
    padded: set[int] = set()
    is_tied = False
    for use in _find_uses(module):
        key, previous = id(use.parameter), uses.get(id(use.parameter))
        pair = [] if previous is None else [previous.holder, use.holder]
        is_tied |= any(isinstance(holder, _EMBEDDINGS) for holder in pair) and any(map(_is_linear, pair))
        if previous is None or isinstance(use.holder, _EMBEDDINGS):
            uses[key] = use
        if isinstance(use.holder, _EMBEDDINGS) and use.holder.padding_idx is not None:
            padded.add(key)
    roles = {key: _read_role(use)._replace(has_padding_row=key in padded) for key, use in uses.items()}
    weights = [key for key, role in roles.items() if role.kind == "weight"]
    named = _find_named_heads(module, uses)
    heads = [key for key in weights if key in named]
    if not heads and not is_tied and len(weights) > 1:
        heads = [key for key in _find_last_layers([uses[key] for key in weights]) if _is_linear(uses[key].holder)]
    return roles | {key: roles[key]._replace(kind="head") for key in heads}


def _find_last_layers(weights: list[_Use]) -> list[int]:
    """Return the last weight of a module; after a frozen network, such as a teacher, also that of the rest."""
    paths = [use.path.split(".") for use in weights]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))  # as in a wrapper
    depth = len(list(shared))
    parts = [path[depth : depth + 1] for path in paths]
    own = [use for use, part in zip(weights, parts, strict=True) if part == parts[-1]]
    rest = [use for use, part in zip(weights, parts, strict=True) if part != parts[-1]]
    is_frozen_network = len(own) > 1 and rest and not any(use.parameter.requires_grad for use in own)
    return [id(weights[-1].parameter), *(_find_last_layers(rest) if is_frozen_network else [])]


def _read_role(use: _Use) -> Role:
    tensor, holder = use.parameter, use.holder
    if _is_norm(holder):
        return Role("norm")
    if tensor.dim() < 2 or "bias" in use.attribute:
        return Role("bias")
    is_unknown = not isinstance(holder, _LAYERS) and not _is_conv1d(holder)
    if isinstance(holder, _EMBEDDINGS) or (is_unknown and _is_named_embedding(use.path.rpartition(".")[2], tensor)):
        return Role("embedding")
    if isinstance(holder, _CONVOLUTIONS):
        overlaps = any(size > stride for size, stride in zip(holder.kernel_size, holder.stride, strict=True))
        role = Role("weight", holder.groups if isinstance(holder, _TRANSPOSED) else 0, overlaps=overlaps)
    else:
        role = Role("weight", int(_has_inputs_first(holder)), tensor.dim() - 2)
    is_weight = isinstance(holder, nn.RNNBase | nn.RNNCellBase) or use.attribute in ("weight", "weight_orig")
    return role if is_weight and isinstance(holder, _LAYERS) else _check_matrix(role, tensor, use.attribute)


def _check_matrix(role: Role, tensor: Tensor, attribute: str) -> Role:
    """Return the role, changed to "other" if the tensor is not really a matrix."""
    rows, columns = rows_and_columns(tensor.shape[role.stacked :], role.transposed)
    if min(rows, columns) <= 1:
        return role._replace(kind="other", why="a vector: it has one row or column")
    if attribute.endswith("_log"):
        return role._replace(kind="other", why="logarithms, which are used entry by entry")
    return role


def rows_and_columns(shape: tuple[int, ...], transposed: int) -> tuple[int, int]:
    """Return the shape of a weight as a matrix with one row per output; ``transposed`` is as in :class:`Role`."""
    if transposed:
        return transposed * shape[1], shape[0] // transposed * math.prod(shape[2:])
    return shape[0], math.prod(shape[1:])


def _is_conv1d(holder: nn.Module) -> bool:
    # The Conv1D of transformers, a linear layer. Recognized by name: transformers need not be installed.
    return any(kind.__name__ == "Conv1D" for kind in type(holder).__mro__) and hasattr(holder, "nf")


def _is_linear(holder: nn.Module) -> bool:
    return isinstance(holder, nn.Linear) or _is_conv1d(holder)


def _has_inputs_first(holder: nn.Module) -> bool:
    """Return True if the matrices of a module are known to be stored as (inputs, outputs)."""
    if _is_conv1d(holder):
        return True
    # Not named_parameters(): this runs once per parameter, and a holder may have thousands.
    tensors = [holder._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    up, down = (() if tensor is None else tensor.shape for tensor in tensors)
    # (width, 2 x inner) and (inner, width): gates and values are stacked in the first.
    return len(up) == len(down) == 3 and (up[1], up[2]) == (down[2], 2 * down[1])


def _find_named_heads(module: nn.Module, uses: Mapping[int, _Use]) -> set[int]:
    """Return the parameters of the output layers that the model declares, or that are named like one."""
    heads = {key for key, use in uses.items() if use.path.rpartition(".")[2] in _HEADS and _may_be_head(use)}
    for part in module.modules():
        head = _declared_output(part)
        heads |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return heads


def _may_be_head(use: _Use) -> bool:
    """Return True for a linear layer, also of a class of the user's own."""
    is_matrix = use.attribute == "weight" and use.parameter.dim() == 2
    return _is_linear(use.holder) or (is_matrix and not isinstance(use.holder, (*_LAYERS, *_EMBEDDINGS)))


def _is_named_embedding(holder: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and ("embed" in holder.lower() or holder in ("wte", "wpe"))


def _declared_output(part: nn.Module) -> nn.Module | None:
    try:
        output = part.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # most modules have no such method, and in a model without an output it may raise anything
        return None
    return output if isinstance(output, nn.Module) else None


def _guess_role(name: str, tensor: Tensor) -> Role:
    holder, attribute = ["", *name.split(".")][-2:]
    if tensor.dim() < 2 or "bias" in attribute:
        return Role("bias")
    if holder in _HEADS:
        return Role("head", is_guess=True)
    if _is_named_embedding(holder, tensor):
        return Role("embedding", is_guess=True)
    # Kernels are short and there are many filters; experts are few and their matrices wide.
    is_stack = tensor.dim() == 3 and "conv" not in name and ("expert" in name or len(tensor) < tensor.shape[-1])
    # Patches usually have even sides, kernels of overlapping windows odd ones.
    overlaps = not is_stack and any(size > 1 and size % 2 for size in tensor.shape[2:])
    role = Role("weight", stacked=int(is_stack), is_guess=True, overlaps=overlaps)
    return role if attribute == "weight" else _check_matrix(role, tensor, attribute)
