"""From numbers to advice: simple rules with named thresholds, all stated in ``docs/diagnostics.md``.

The thresholds are rules of thumb. They decide on wording only; every number they look at is shown beside it.
"""

from __future__ import annotations

import math

import torch

from egop.basis import Layer
from egop.diagnostics.values import BlockDiagnosis, Verdict
from egop.runs import format_bytes

# A stable rank of at least this share of what directionless noise would show is a flat spectrum.
FLAT = 0.8
# Leading eigenvectors that are spread over fewer axes than this are axes already.
ALIGNED = 2.0
# From here on sr/(dβ₁) promises nothing.
NO_GAIN = 0.9
# Two halves that agree less than this, on a scale from chance (0) to perfectly (1), say that M was too small.
UNSTABLE = 0.5
# Where more than this share of all directions is leading, their subspace is nearly everything, and is not judged.
BROAD = 0.5
# With this many samples to a dimension more of them are no cure: directions that matter alike have no order.
PLENTY = 20
# A block whose basis products take longer than this many forward and backward passes is too costly.
COSTLY = 1.0

ATTENTION = (
    "refresh=egop.Online(). The model has attention or embeddings: for transformers a basis estimated up front is not "
    "expected to help by itself, one that is kept current from the training gradients is."
)
CONVOLUTION = (
    "estimate once before training; on convolution nets it pays more to do so again every epoch, with "
    "refresh=egop.Every(steps_per_epoch, objective)."
)
PLAIN = "estimate once before training."


def noise_stable_rank(dimension: int, samples: int) -> float:
    """The stable rank that this many gradients with no preferred direction show: what a flat spectrum looks like.

    With few samples even white noise has a spectrum that decays. Its singular values follow the law of Marchenko and
    Pastur: with c = m/n of the smaller and the larger number, they lie between √n (1 ± √c).
    """
    small, large = sorted((dimension, samples))
    ratio = small / large
    low, high = 1 - math.sqrt(ratio), 1 + math.sqrt(ratio)
    # s = middle + half·cos(t) takes the square roots at both ends out of the integrals
    t = torch.linspace(0, math.pi, 1001, dtype=torch.float64)
    s = (high + low) / 2 + (high - low) / 2 * torch.cos(t)
    root = ((high**2 - s.square()) * (s.square() - low**2)).clamp_min(0).sqrt()
    mean = float(torch.trapezoid(root * torch.sin(t) * (high - low) / 2, t)) / (math.pi * ratio)
    return max(1.0, small * mean / high)


def decide(block: BlockDiagnosis, draws: int, online: bool) -> tuple[Verdict, str]:
    """The verdict on a block and the advice, from its measured numbers and the number of points drawn for them."""
    if block.structure is None:
        return "leave", f"Leave it in original coordinates: {block.why}."
    if block.stable_rank is None or block.ratio is None:
        return "unknown", "Not measured."
    if block.stable_rank == 0:
        return "leave", "Leave it: every sampled gradient was zero."
    if block.dimension == 1:
        return "leave", "Leave it: with one entry there are no other coordinates."
    verdict, words = _unpromising(block, draws) or _costly(block, draws) or _promising(block, block.structure, draws)
    if online:  # whatever the spectrum of the start is
        up_front = f"For a basis estimated up front: {words[0].lower()}{words[1:]}"
        return "online", f"Learn its basis in training, with refresh=egop.Online(). {up_front}"
    return verdict, words


def _unpromising(block: BlockDiagnosis, draws: int) -> tuple[Verdict, str] | None:
    assert block.stable_rank is not None
    assert block.ratio is not None
    assert block.dimension is not None
    more = f"Sample more (samples={max(4 * draws, math.ceil(4 * draws * block.dimension / block.samples))} or so)"
    if block.noise_rank is not None and block.stable_rank >= FLAT * block.noise_rank:
        flat = f"stable rank {block.stable_rank:.1f} of {block.dimension}, noise would show {block.noise_rank:.1f}"
        if block.samples < block.dimension:
            return "sample more", f"{more}: the spectrum looks flat ({flat}), but {block.samples} gradients are few."
        return "leave", f"Leave it: the spectrum is flat ({flat}), no direction matters more than others."
    if block.axes is not None and block.axes < ALIGNED:
        axes = f"the leading directions are spread over {block.axes:.1f} of {block.dimension} axes"
        return "leave", f"Leave it: the axes are already aligned with the spectrum ({axes})."
    if _unstable(block):
        return "sample more", (
            f"{more}: two bases from half of the draws each agree to {block.stability:.2f} only "
            f"(unrelated ones: {block.chance:.2f})."
        )
    if block.ratio >= NO_GAIN:
        return "leave", f"Leave it: sr/(dβ₁) = {block.ratio:.2g} promises nothing."
    return None


def _unstable(block: BlockDiagnosis) -> bool:
    """Whether two halves agree badly, and more samples could change that."""
    if block.stability is None or block.chance is None or block.dimension is None:
        return False
    if block.chance > BROAD or block.samples >= PLENTY * block.dimension:
        return False
    return (block.stability - block.chance) / (1 - block.chance) < UNSTABLE


def _costly(block: BlockDiagnosis, draws: int) -> tuple[Verdict, str] | None:
    if block.cost is None or block.cost <= COSTLY:
        return None
    much = f"egop.{block.structure} costs {block.cost:.2g} times a forward and backward pass in every step"
    if block.leaner is not None and block.leaner[1] <= COSTLY:
        name, cost = block.leaner
        verdict, words = _promising(block, name, draws)
        how = f"with structure=egop.{name}(), or --structure {name.lower()}"
        return verdict, f"{words} ({much}, egop.{name} {cost:.2g} times; diagnose that one too, {how}.)"
    return "leave", (
        f"Leave it: the spectrum is promising (sr/(dβ₁) = {block.ratio:.2g}), but {much}. "
        f"It pays only where less than 1 step in {1 + block.cost:.2g} is needed."
    )


def _promising(block: BlockDiagnosis, structure: str, draws: int) -> tuple[Verdict, str]:
    agreed = "" if block.stability is None else f", and two halves of the samples agree to {block.stability:.2f}"
    remark = f" (samples={draws} were enough, {format_bytes(block.bytes)})" if structure == block.structure else ""
    return "use", (
        f"Use egop.{structure}(){remark}: about {block.stable_rank:.1f} of {block.dimension} directions matter, "
        f"sr/(dβ₁) = {block.ratio:.2g}{agreed}."
    )


def refresh_advice(layers: dict[str, Layer], kinds: list[str]) -> tuple[str, bool]:
    """When to renew the basis, and whether the model needs it kept current; from what its parts are called."""
    if any("attention" in kind.lower() for kind in kinds) or any(
        layer.role == "embedding" for layer in layers.values()
    ):
        return ATTENTION, True
    return (CONVOLUTION if any(kind.startswith("Conv") for kind in kinds) else PLAIN), False
