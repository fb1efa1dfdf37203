"""The updates of egop.optim, written from their formulas for one matrix."""

from __future__ import annotations

import torch

import egop

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def literal_sign(matrix, group):
    return matrix.sign()


def literal_sinkhorn(matrix, group):
    for _ in range(group["iterations"]):
        lengths = matrix.norm(dim=1, keepdim=True)
        matrix = torch.where(lengths > 0, matrix / lengths, 0) * matrix.shape[1] ** 0.5
        lengths = matrix.norm(dim=0, keepdim=True)
        matrix = torch.where(lengths > 0, matrix / lengths, 0) * matrix.shape[0] ** 0.5
    return matrix


def literal_polar(matrix, group):
    a, b, c = COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(group["iterations"]):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


CASES = {
    "Sign": (egop.optim.Sign, literal_sign, {}),
    "Sign without Nesterov": (egop.optim.Sign, literal_sign, {"nesterov": False, "momentum": 0.8}),
    "Sinkhorn": (egop.optim.Sinkhorn, literal_sinkhorn, {}),
    "Sinkhorn once": (egop.optim.Sinkhorn, literal_sinkhorn, {"iterations": 1, "update_rms": 0.7}),
    "PolarAdam": (egop.optim.PolarAdam, literal_polar, {}),
    "PolarAdam of Adam's size": (egop.optim.PolarAdam, literal_polar, {"adam_sized": True, "betas": (0.9, 0.99)}),
    "PolarAdam without Nesterov": (egop.optim.PolarAdam, literal_polar, {"nesterov": False, "betas": (0.8, 0.99)}),
}
