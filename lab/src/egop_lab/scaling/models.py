"""Models as shapes only: on the meta device tensors have no storage, so a model of any size can be counted anywhere."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from egop_lab.models.gpt import GPT


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
    """The parameters of torchvision's ResNet-50, with its names and without a forward pass."""

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
    """The parameters of a Llama 3, without a forward pass."""

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


def _build_gpt2() -> nn.Module:
    model = GPT(vocabulary=50257, layers=12, width=768, heads=12, context=1024)
    model.head.weight = model.tokens.weight
    return model


# GPT-2 124M is without biases and tied, Llama 3.2 1B is tied, Llama 3 8B is not.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": ResNet50,
    "gpt2": _build_gpt2,
    "llama_1b": lambda: Llama(16, 2048, 32, 8, 8192, 128_256, tied=True),
    "llama_8b": lambda: Llama(32, 4096, 32, 8, 14_336, 128_256, tied=False),
}


def build_model(target: str) -> nn.Module:
    """Build a model on the meta device: one of :data:`MODELS`, or what a function ``MODULE:FACTORY`` returns.

    Modules in the current directory are found.
    """
    module, _, name = target.rpartition(":")
    if module:
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        factory = getattr(importlib.import_module(module), name)
    elif target in MODELS:
        factory = MODELS[target]
    else:
        raise ValueError(f"Invalid model: {target!r}. Must be MODULE:FACTORY or one of {', '.join(MODELS)}.")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{target} must return a torch.nn.Module, it returned {type(model).__name__}.")
    return model
