"""From the numbers of a block to words: what draws say of a basis that is estimated before training.

Simple rules with named thresholds, all stated in ``docs/diagnostics.md``. They decide on wording, and on which blocks
get such a basis; every number they look at is shown beside it.
"""

from __future__ import annotations

from egop.diagnostics.values import BlockDiagnosis, Verdict
from egop.formatting import format_bytes

# A spectrum that is less than so many standard deviations of white noise away from it, or of fewer draws, is not told
# from it.
SEEN = 7.0
FEW = 4
# Two halves that agree less than this, on a scale from chance (0) to perfectly (1), say that the draws were too few.
UNSTABLE = 0.5
# With this many draws to a dimension more of them are no cure: directions that matter alike have no order.
PLENTY = 10
# A basis in which the gradients' 1-norm is at least this share of that along the axes changes nothing.
UNCHANGED = 0.95
# A stable rank of at least this share of the dimension is a flat spectrum.
FLAT = 0.8
# Where there were too few draws, this many times as many are advised.
MORE = 4
# From here on sr/(dβ₁) promises nothing.
NO_GAIN = 0.9


def decide(block: BlockDiagnosis) -> tuple[Verdict, str]:
    """The verdict on a block and its reasons, from its measured numbers."""
    if block.structure is None:
        return "leave", f"Leave it in original coordinates: {block.why}."
    if block.stable_rank is None or block.ratio is None:
        return "unknown", "Not measured."
    if block.stable_rank == 0:
        return "leave", "Leave it: every sampled gradient was zero."
    if block.dimension == 1:
        return "leave", "Leave it: with one entry there are no other coordinates."
    return _unpromising(block) or _promising(block)


def is_open(block: BlockDiagnosis) -> bool:
    """Whether more draws may change the answer: they were too few, or show nothing and are fewer than directions."""
    verdict, _ = decide(block)
    few = block.dimension is not None and block.samples < block.dimension
    return verdict == "sample more" or (verdict == "leave" and few and not _is_seen(block))


def _is_seen(block: BlockDiagnosis) -> bool:
    """Whether the spectrum is told from that of white noise; where that is not known it is believed."""
    return block.surprise is None or (block.surprise >= SEEN and block.samples >= FEW)


def _unpromising(block: BlockDiagnosis) -> tuple[Verdict, str] | None:
    assert block.stable_rank is not None
    assert block.ratio is not None
    assert block.dimension is not None
    more = f"Sample more (samples={MORE * block.samples} or so)"
    if block.samples < 2:
        return "sample more", f"{more}: one draw cannot be compared with another."
    draws = f"{block.samples} draws"
    if not _is_seen(block):
        return "leave", f"Leave it: in {draws} no direction matters more than in white noise{_agreed(block)}."
    if _is_unstable(block):
        return "sample more", f"{more}: the spectrum is not that of white noise, but{_agreed(block)[1:]} only."
    if block.one_norm is not None and block.one_norm >= UNCHANGED:
        kept = f"the gradients' 1-norm is {block.one_norm:.2f} times that of the original coordinates"
        if block.stable_rank >= FLAT * block.dimension:
            flat = f"stable rank {block.stable_rank:.1f} of {block.dimension}, {kept}"
            return "leave", f"Leave it: the spectrum is flat ({flat}), no direction matters more than others."
        return "leave", f"Leave it: the axes are already as good as its eigenvectors ({kept})."
    if block.ratio >= NO_GAIN:
        return "leave", f"Leave it: sr/(dβ₁) = {block.ratio:.2g} promises nothing."
    return None


def _is_unstable(block: BlockDiagnosis) -> bool:
    """Whether two halves agree badly, and more draws could change that."""
    if block.stability is None or block.chance is None or block.dimension is None:
        return False
    if block.chance >= 1 or block.samples >= PLENTY * block.dimension:
        return False
    return (block.stability - block.chance) / (1 - block.chance) < UNSTABLE


def _agreed(block: BlockDiagnosis) -> str:
    """How far two halves agree, to go on with; nothing where they were not compared."""
    if block.stability is None:
        return ""
    return f", two halves of the draws agree to {block.stability:.2f} (chance: {block.chance:.2f})"


def _promising(block: BlockDiagnosis) -> tuple[Verdict, str]:
    enough = f"samples={block.samples} were enough, " if block.stability is not None else ""
    return "promising", (
        f"Promising: about {block.stable_rank:.1f} of {block.dimension} directions matter, sr/(dβ₁) = "
        f"{block.ratio:.2g}{_agreed(block)} (egop.{block.structure}(), {enough}{format_bytes(block.bytes)})."
    )
