"""Models as shapes only: on the meta device tensors have no storage, so that any size can be counted anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from egop.diagnostics.factories import FactoryError, factory_in, guarded, module_of
from egop.estimation import Objective

__all__ = ["GPT", "Llama", "ResNet50", "gpt2", "llama_1b", "llama_8b", "load_model", "resnet50"]


def load_model(target: str) -> nn.Module:
    """Import a module, call its factory on the meta device and take the model.

    Args:
        target: ``MODULE:FACTORY``, as for :func:`egop.diagnostics.factories.load_objective`; the factory may also
            return the model alone.

    Raises:
        FactoryError: with one line that says what was found and what was expected.
    """
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise FactoryError(f"Invalid target {target!r}. Must be MODULE:FACTORY, such as egop.diagnostics.scaling:gpt2.")
    factory = factory_in(module_of(where), where, name)
    with torch.device("meta"):
        result = guarded(factory, f"{target}, called on the meta device (where tensors have no values), raised")
    if isinstance(result, tuple) and result:
        result = result[0]
    model = result.module if isinstance(result, Objective) else result
    if not isinstance(model, nn.Module):
        raise FactoryError(
            f"{target} must return a torch.nn.Module, an egop.Objective of one, or a tuple (model, loss_fn, loader); "
            f"it returned {type(result).__name__}."
        )
    return model


class Bottleneck(nn.Module):
    """The shapes of a 1 x 1, a 3 x 3 and a 1 x 1 convolution beside a skip connection."""

    def __init__(self, inputs: int, width: int, projected: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        if projected:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


class ResNet50(nn.Module):
    """The parameters of torchvision's ResNet-50, under its names; there is no forward pass."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, bias=False), nn.BatchNorm2d(64)
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            inputs = [channels] + [4 * width] * (depth - 1)
            blocks = [Bottleneck(channels, width, projected=index == 0) for index, channels in enumerate(inputs)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            channels = 4 * width
        self.fc = nn.Linear(channels, classes)


class GPTBlock(nn.Module):
    """The shapes of attention, whose queries, keys and values are one weight, and a multi-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv, self.mixed = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.wider, self.narrower = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)


class GPT(nn.Module):
    """The parameters of a GPT-2 without biases, its head tied to the embedding; there is no forward pass."""

    def __init__(self, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight


class LlamaBlock(nn.Module):
    """The shapes of grouped-query attention and a gated multi-layer perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        narrow = width // heads * kv_heads
        self.norm1 = nn.RMSNorm(width)
        self.query, self.key, self.value, self.mixed = (
            nn.Linear(width, outputs, bias=False) for outputs in (width, narrow, narrow, width)
        )
        self.norm2 = nn.RMSNorm(width)
        self.gate, self.wider = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.narrower = nn.Linear(hidden, width, bias=False)


class Llama(nn.Module):
    """The parameters of a Llama; there is no forward pass.

    Args:
        layers: how many blocks.
        width: of the stream of activations.
        heads: of each attention.
        kv_heads: for how many of them there are keys and values.
        hidden: width inside the multi-layer perceptrons.
        vocabulary: how many tokens there are.
        tied: whether the head is the embedding's own weight.
    """

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def resnet50() -> nn.Module:
    """ResNet-50: 25,557,032 parameters."""
    return ResNet50()


def gpt2() -> nn.Module:
    """GPT-2 124M, its head tied to the embedding, without biases: 124,337,664 parameters."""
    return GPT(layers=12, width=768, vocabulary=50257, context=1024)


def llama_1b() -> nn.Module:
    """The shapes of Llama 3.2 1B: 1,235,814,400 parameters."""
    return Llama(16, 2048, 32, 8, 8192, 128_256, tied=True)


def llama_8b() -> nn.Module:
    """The shapes of Llama 3 8B: 8,030,261,248 parameters."""
    return Llama(32, 4096, 32, 8, 14_336, 128_256, tied=False)
