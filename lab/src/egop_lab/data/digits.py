"""The UCI digits, which ship with the lab."""

from importlib import resources

import numpy as np
import torch

from egop_lab.data.batches import DataSet, Split

_LARGEST_COUNT = 16
_VALIDATION_SIZE = 598


def digits() -> DataSet:
    """Load the UCI handwritten digits, split as in the paper: 3823 to train, 598 to validate, 1199 to test.

    Images of 8 x 8 as 64 numbers in [0, 1] (float32), labels 0 to 9 (int64). The README beside the files names their
    authors and licence.
    """
    train, held_out = (_read(f"optdigits.{part}") for part in ("tra", "tes"))
    return DataSet(train, *held_out.cut(_VALIDATION_SIZE))


def _read(name: str) -> Split:
    content = (resources.files(__package__) / "optdigits" / name).read_text("ascii")
    table = torch.from_numpy(np.loadtxt(content.splitlines(), delimiter=",", dtype=np.int64))
    return Split(features=table[:, :-1].to(torch.float32) / _LARGEST_COUNT, labels=table[:, -1].contiguous())
