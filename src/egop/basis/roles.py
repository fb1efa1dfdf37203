"""What each parameter of a model is: told by the module that it belongs to, or guessed by its name and shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

# What DistributedDataParallel puts before every name, and torch.compile into it.
WRAPPER, _COMPILED = "module.", "_orig_mod."

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = nn.modules.conv._ConvNd  # the base of all of them has no public name
_TRANSPOSED = nn.modules.conv._ConvTransposeNd
# Layers whose weight is one whatever its shape, also with a single output or input.
_LAYERS = (nn.Linear, nn.Bilinear, _CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# What output layers are called, where the model does not say which one it is.
_HEADS = {"lm_head", "head", "classifier", "score", "embed_out"}


def plain_name(name: str) -> str:
    """The name that a parameter has in the model as its author wrote it, without what ``torch.compile`` adds."""
    return name.replace(_COMPILED, "")


class Layer(NamedTuple):
    """What is known of a parameter from the layer it belongs to."""

    role: Literal["weight", "bias", "norm", "embedding", "head", "other"]
    # The number of groups of a transposed convolution's weight; 1 for a matrix that is stored (inputs, outputs).
    transposed: int = 0
    stacked: int = 0  # how many of its first dimensions count matrices: 1 for experts, (experts, outputs, inputs)
    why: str = ""  # of role "other": why it is no weight to rotate
    guessed: bool = False  # by name and shape, without its module
    padded: bool = False  # an embedding with a padding row, which gets no gradient and must stay as it is

    @property
    def unrotated(self) -> str:
        """Why ``"auto"`` leaves it in original coordinates; nothing where it does not."""
        return {"embedding": "an embedding", "head": "the output head"}.get(self.role, self.why)


class Known:
    """What a module says of its parameters: their names, without what wrappers put before them, and what they are.

    Looked up once, and again when a parameter is asked for that was not there.

    Args:
        module: wrapped or not.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._look()

    def _look(self) -> None:
        pairs = [(plain_name(name), tensor) for name, tensor in self.module.named_parameters(remove_duplicate=False)]
        wrapped = all(name.startswith(WRAPPER) for name, _ in pairs)
        self.parameters = {name.removeprefix(WRAPPER) if wrapped else name: tensor for name, tensor in pairs}
        self._names: dict[int, list[str]] = {}  # as long as the parameters are held, no other has one of these ids
        for name, parameter in self.parameters.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._layers = _told(self.module)

    def names(self, parameter: Tensor) -> list[str]:
        """The names of a parameter: several where it is tied, none where it is not the module's."""
        if id(parameter) not in self._names:
            self._look()
        return self._names.get(id(parameter), [])

    def layer(self, parameter: Tensor) -> Layer | None:
        """What a parameter is, if it is the module's."""
        return self._layers[id(parameter)] if self.names(parameter) else None


def layers_of(parameters: Mapping[str, Tensor], module: nn.Module | Known | None) -> dict[str, Layer]:
    """What each parameter is: told by the module, or guessed by name and shape where there is none.

    - Norm layers (by the name of their class), vectors, what is called a bias, and embeddings are none to rotate.
    - The heads are what ``get_output_embeddings()`` of a part of the module gives, and linear layers that are called so
      (``lm_head``, ``classifier``, ``score``, ...). Without any, the last linear layer is the head, if it is trained,
      comes after all other weights and no linear layer has the weight of an embedding (then that is the head).
    - A convolution has a matrix of kernels. Of any other module a tensor of more than two dimensions is a stack of
      matrices, (..., outputs, inputs): experts, and position tables (1, positions, width).
    - Stored (inputs, outputs) are the ``Conv1D`` of transformers, and experts whose ``gate_up_proj`` and ``down_proj``
      fit each other only that way. Of other stacks this cannot be told.
    - What has one row or column (class tokens, magnitudes of ``weight_norm``) and is no layer's weight is a vector, and
      what is called ``..._log`` (Mamba's ``A_log``) goes through an exponential entry by entry: role "other".

    The module is only looked at: a parametrised weight (``spectral_norm``) is not computed, since that may change it.
    """
    if module is None:
        return {name: _guessed(name, tensor) for name, tensor in parameters.items()}
    known = module if isinstance(module, Known) else Known(module)
    return {name: known.layer(tensor) or _guessed(name, tensor) for name, tensor in parameters.items()}


class _Use(NamedTuple):
    """A parameter where a module has it."""

    parameter: Tensor
    holder: nn.Module  # of a parametrised tensor the module whose tensor that is
    called: str  # by the holder
    path: str  # to the holder


def _uses(module: nn.Module) -> Iterator[_Use]:
    """Every parameter in every place that it has, without a look at a tensor that a parametrisation would compute."""
    hosts: dict[int, tuple[str, nn.Module, str]] = {}
    for path, part in module.named_modules():
        if parametrize.is_parametrized(part):
            hosts |= {id(entry): (path, part, name) for name, entry in part.parametrizations.items()}
        for name, parameter in part.named_parameters(recurse=False):
            if id(part) in hosts:  # which come before what is inside them
                where, holder, tensor = hosts[id(part)]
                yield _Use(parameter, holder, tensor if name == "original" else f"{tensor}_{name}", where)
            else:
                yield _Use(parameter, part, name, path)


def _told(module: nn.Module) -> dict[int, Layer]:
    """What each parameter of a module is, by its ``id``."""
    uses: dict[int, _Use] = {}
    padded: set[int] = set()
    tied = False
    for use in _uses(module):
        before = uses.get(id(use.parameter))
        pair = [] if before is None else [before.holder, use.holder]
        tied |= any(isinstance(holder, _EMBEDDINGS) for holder in pair) and any(_is_linear(holder) for holder in pair)
        if before is None or isinstance(use.holder, _EMBEDDINGS):
            uses[id(use.parameter)] = use
        if isinstance(use.holder, _EMBEDDINGS) and use.holder.padding_idx is not None:
            padded.add(id(use.parameter))
    layers = {key: _layer(use)._replace(padded=key in padded) for key, use in uses.items()}
    weights = [key for key, layer in layers.items() if layer.role == "weight"]
    named = _named_heads(module, uses)
    heads = [key for key in weights if key in named]
    trained = [key for key in weights if uses[key].parameter.requires_grad]
    if not heads and not tied and len(weights) > 1 and trained and _is_linear(uses[trained[-1]].holder):
        heads = trained[-1:]
    return layers | {key: layers[key]._replace(role="head") for key in heads}


def _layer(use: _Use) -> Layer:
    tensor, holder = use.parameter, use.holder
    # LayerNorm, RMSNorm, BatchNorm2d, ... have no common base; custom ones are named alike.
    if "norm" in type(holder).__name__.lower():
        return Layer("norm")
    if tensor.dim() < 2 or "bias" in use.called:
        return Layer("bias")
    if isinstance(holder, _EMBEDDINGS):
        return Layer("embedding")
    if isinstance(holder, _CONVOLUTIONS):
        layer = Layer("weight", holder.groups if isinstance(holder, _TRANSPOSED) else 0)
    else:
        layer = Layer("weight", int(_is_inputs_first(holder)), tensor.dim() - 2)
    proper = isinstance(holder, nn.RNNBase | nn.RNNCellBase) or use.called in ("weight", "weight_orig")
    return layer if proper and isinstance(holder, _LAYERS) else _if_matrix(layer, tensor, use.called)


def _if_matrix(layer: Layer, tensor: Tensor, called: str) -> Layer:
    """The layer, unless what is in the tensor is no matrix."""
    rows, columns = rows_and_columns(tensor.shape[layer.stacked :], layer.transposed)
    if min(rows, columns) <= 1:
        return layer._replace(role="other", why="a vector: it has one row or column")
    if called.endswith("_log"):
        return layer._replace(role="other", why="logarithms, which are used entry by entry")
    return layer


def rows_and_columns(shape: tuple[int, ...], transposed: int) -> tuple[int, int]:
    """The shape of a weight as a matrix with a row for each output, over all its inputs.

    Args:
        shape: of the weight.
        transposed: as in :class:`Layer`.
    """
    if transposed:
        return transposed * shape[1], shape[0] // transposed * math.prod(shape[2:])
    return shape[0], math.prod(shape[1:])


def _is_conv1d(holder: nn.Module) -> bool:
    """Whether it is the ``Conv1D`` of transformers, a linear layer; known by name, since that need not be installed."""
    return any(kind.__name__ == "Conv1D" for kind in type(holder).__mro__) and hasattr(holder, "nf")


def _is_linear(holder: nn.Module) -> bool:
    return isinstance(holder, nn.Linear) or _is_conv1d(holder)


def _is_inputs_first(holder: nn.Module) -> bool:
    """Whether the matrices of a module are stored (inputs, outputs), as far as can be told."""
    if _is_conv1d(holder):
        return True
    # Not by named_parameters(): a holder of many parameters is asked once for each.
    tensors = [holder._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    up, down = (() if tensor is None else tensor.shape for tensor in tensors)
    # The one has the gates and values of what the other takes: (width, 2 x inner) and (inner, width).
    return len(up) == len(down) == 3 and (up[1], up[2]) == (down[2], 2 * down[1])


def _named_heads(module: nn.Module, uses: Mapping[int, _Use]) -> set[int]:
    """The weights of what the model, or a name, says is the output."""
    heads = {
        key
        for key, use in uses.items()
        if use.path.rpartition(".")[2] in _HEADS and _is_linear(use.holder) and use.path
    }
    for part in module.modules():
        head = _output_of(part)
        heads |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return heads


def _output_of(part: nn.Module) -> nn.Module | None:
    """What a model of transformers says is its output layer."""
    try:
        output = part.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # most modules have no such method, and what one without an output raises is its own affair
        return None
    return output if isinstance(output, nn.Module) else None


def _guessed(name: str, tensor: Tensor) -> Layer:
    """What a parameter may be, from its name and shape alone."""
    holder, called = ["", *name.split(".")][-2:]
    if tensor.dim() < 2 or "bias" in called:
        return Layer("bias")
    if holder in _HEADS:
        return Layer("head", guessed=True)
    if tensor.dim() == 2 and ("embed" in holder.lower() or holder in ("wte", "wpe")):
        return Layer("embedding", guessed=True)
    # Kernels are short and filters many; experts are few and their matrices wide.
    is_stack = tensor.dim() == 3 and "conv" not in name and ("expert" in name or len(tensor) < tensor.shape[-1])
    layer = Layer("weight", stacked=int(is_stack), guessed=True)
    return layer if called == "weight" else _if_matrix(layer, tensor, called)
