"""Orthogonal iteration: a cheap step from an orthonormal basis towards the eigenvectors of a Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from egop.numerics.eigen import ROUNDING
from egop.numerics.orthonormal import orthonormalize
from egop.numerics.precision import exact_products

_PROBES = 4  # vectors on which a new basis is tested
_SHIFT = 1e-6  # weight of the old basis, relative to the mean eigenvalue: it keeps directions without gradient in place


def power_iteration(gram: Tensor, basis: Tensor | None = None) -> Tensor:
    """Take one step of orthogonal iteration towards the eigenvectors of a Gram matrix, strongest first.

    The iteration starts from the basis, by default from the identity.

    The shift keeps weak directions close to the old ones. Directions whose gradient is only rounding error stay exactly
    where they are: they are orthonormalized first, so that no error of the others reaches them, and then moved last.
    """
    with exact_products():  # with fewer digits, the weak directions would change randomly every time
        image = gram if basis is None else gram @ basis
        if basis is None:
            basis = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        held = (basis * image).sum(-2, keepdim=True)
        noise = ROUNDING * torch.finfo(held.dtype).eps * held.amax(-1, keepdim=True)
        null = (held <= noise) & noise.isfinite()
        shift = _SHIFT * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        columns = torch.where(null, basis, image + shift * basis)
        order = torch.where(null, torch.inf, held).argsort(dim=-1, descending=True, stable=True)
        fresh = orthonormalize(columns.gather(-1, order.expand_as(columns)))
        null_last = null.gather(-1, order).int().argsort(dim=-1, stable=True)
        return fresh.gather(-1, null_last.expand_as(fresh))


def is_sound(fresh: Tensor, old: Tensor) -> Tensor:
    """Return True for each new basis that is finite and maps a few test vectors from the old one there and back."""
    probes = old[..., :_PROBES]
    with exact_products():
        error = fresh @ (fresh.mT @ probes) - probes
    sound: Tensor = torch.linalg.vector_norm(error, dim=(-2, -1)) < torch.finfo(fresh.dtype).eps ** 0.5
    return sound
