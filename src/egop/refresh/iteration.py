"""How a basis follows a Gram matrix: one step of orthogonal iteration, for many at once and without a word to the host.

All functions take matrices with any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from egop import linalg, precision

_PROBES = 4  # vectors that a new basis is tried on


def power_iteration(gram: Tensor, basis: Tensor) -> Tensor:
    """One step of orthogonal iteration towards the eigenvectors of a Gram matrix, strongest first.

    The shift keeps directions without gradient where they are; the signs keep every vector near the old one.
    """
    with precision.exact_products():  # with fewer digits the weak directions would be drawn anew every time
        image = gram @ basis
        order = (basis * image).sum(-2).argsort(descending=True, stable=True).unsqueeze(-2).expand_as(basis)
        shift = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        shift = torch.where(shift > 0, shift, 1)  # no gradients at all: every direction stays where it is
        return linalg.orthonormalized((image + shift * basis).gather(-1, order))


def decomposed(gram: Tensor, basis: Tensor) -> Tensor:
    """The eigenvectors from scratch, strongest first; not finite where that fails."""
    if gram.dim() > 2:
        return torch.stack([decomposed(*pair) for pair in zip(gram, basis, strict=True)])
    try:
        return linalg.eigenbasis(gram)[1].to(basis)
    except torch.linalg.LinAlgError:
        return torch.full_like(basis, torch.nan)


def renewed(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration and whether it went well; where it did not, the old basis."""
    return checked(power_iteration(gram, basis), basis)


def from_scratch(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvectors and whether they could be found; where not, the old basis."""
    return checked(decomposed(gram, basis), basis)


def checked(fresh: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """A new basis where it is sound, else the old one; and whether it is."""
    sound = is_sound(fresh, old)
    return torch.where(sound[..., None, None], fresh, old), sound


def is_sound(fresh: Tensor, old: Tensor) -> Tensor:
    """Whether a new basis takes a few vectors, the first of the old one, there and back; not if it is not finite."""
    probes = old[..., :_PROBES]
    with precision.exact_products():
        error = fresh @ (fresh.mT @ probes) - probes
    return torch.linalg.vector_norm(error, dim=(-2, -1)) < torch.finfo(fresh.dtype).eps ** 0.5


def off_diagonal(gram: Tensor, basis: Tensor) -> Tensor:
    """How much of a Gram matrix is off the diagonal in this basis, relative to all of it."""
    inside = basis.mT @ gram @ basis
    total = torch.linalg.matrix_norm(inside)
    rest = torch.linalg.matrix_norm(inside - inside.diagonal(dim1=-2, dim2=-1).diag_embed())
    return torch.where(total == 0, 0, rest / total)
