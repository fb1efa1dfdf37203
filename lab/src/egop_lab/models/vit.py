"""A vision transformer in plain torch: patches of an image, blocks of attention and SwiGLU, the mean of all patches."""

from torch import Tensor, nn
from torch.nn import functional as F

from egop_lab.models.gpt import attend, initialize_


class Block(nn.Module):
    """Self-attention and a gated perceptron (SwiGLU), each behind a norm and beside a skip connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.wider = nn.Linear(width, hidden, bias=False)
        self.narrower = nn.Linear(hidden, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream plus the output of this block, (n, patches, width)."""
        stream = stream + self.mixed(attend(self.qkv(self.norm1(stream)), self.heads, causal=False))
        normed = self.norm2(stream)
        return stream + self.narrower(F.silu(self.gate(normed)) * self.wider(normed))


class VisionTransformer(nn.Module):
    """Patches through a linear layer, a learned table of positions, blocks, a last norm, the mean, and a linear head.

    Without biases and dropout.

    Example:
        >>> model = VisionTransformer(classes=3, side=16, patch=8, layers=1, width=8, heads=2, hidden=16)
        >>> model(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        classes: int,
        side: int = 96,
        patch: int = 8,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        hidden: int = 1024,
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Linear(3 * patch**2, width, bias=False)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes, bias=False)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images, (n, 3, side, side)."""
        rows = images.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # (n, 3, rows, patch, ...)
        stream = self.patches(rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + self.positions.weight
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream).mean(1))
