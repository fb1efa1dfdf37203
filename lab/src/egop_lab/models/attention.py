"""Attention of several heads, as the transformers here have it."""

from torch import Tensor
from torch.nn import functional as F


def attend(projected: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Apply attention to queries, keys and values side by side, (n, length, 3 widths); return (n, length, width)."""
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)
