"""A GPT in plain torch: a decoder-only transformer as in GPT-2, small enough to train in minutes."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DEVIATION = 0.02  # standard deviation of GPT-2's initial weights


def attend(projected: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Apply attention to queries, keys and values side by side, (n, length, 3 widths); return (n, length, width)."""
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Causal self-attention and a multi-layer perceptron, each behind a norm and beside a skip connection.

    Queries, keys and values come from one weight: they have the same input, so that one basis of it serves all three.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.wider = nn.Linear(width, 4 * width, bias=False)
        self.narrower = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream plus the output of this block, (n, length, width)."""
        stream = stream + self.mixed(attend(self.qkv(self.norm1(stream)), self.heads, causal=True))
        return stream + self.narrower(F.gelu(self.wider(self.norm2(stream))))


class GPT(nn.Module):
    """Token and learned position embeddings, blocks, a last norm, and a head of its own (not the embedding's weight).

    As GPT-2, but without biases (in linear layers and norms) and without dropout. Its context is the largest number of
    tokens that it sees.

    Example:
        >>> model = GPT(layers=2, width=32, heads=2, context=16)
        >>> model(torch.zeros(1, 16, dtype=torch.long)).shape
        torch.Size([1, 16, 256])
    """

    def __init__(
        self, vocabulary: int = 256, layers: int = 6, width: int = 384, heads: int = 6, context: int = 256
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialize_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows each token, (n, length, vocabulary)."""
        length = tokens.shape[-1]
        if length > self.context:
            raise ValueError(f"{length} tokens are more than the context of {self.context}.")
        stream = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


@torch.no_grad()
def initialize_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw new parameters of a transformer as GPT-2 does, in place: normal, smaller where a block adds to the stream.

    Norms are ones. A layer of patches has outputs of size one for pixels of size one, since nothing normalises what it
    is given.
    """
    layers = sum(name.endswith("norm1") for name, _ in model.named_modules())
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            deviation = _DEVIATION
            if name.endswith(("mixed", "narrower")):
                deviation /= math.sqrt(2 * layers)
            elif name.endswith("patches"):
                deviation = part.weight.shape[1] ** -0.5
            part.weight.normal_(0, deviation, generator=generator)
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()
    return model
