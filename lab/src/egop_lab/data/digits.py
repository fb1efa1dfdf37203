"""The UCI digits, which ship with the lab."""

import hashlib
from importlib import resources

import numpy as np
import torch

from egop_lab.data.batches import DataSet, Split

_SHA256 = {
    "optdigits.tra": "e1b683cc211604fe8fd8c4417e6a69f31380e0c61d4af22e93cc21e9257ffedd",
    "optdigits.tes": "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
}
_LARGEST_COUNT = 16
_VALIDATION_SIZE = 598


def digits() -> DataSet:
    """Load the UCI handwritten digits, split as in the paper: 3823 to train, 598 to validate, 1199 to test.

    Images of 8 x 8 as 64 numbers in [0, 1] (float32), labels 0 to 9 (int64).

    The files ship with the package (see the README beside them for authors and licence) and are checked before use.

    Raises:
        RuntimeError: When a file is missing or is not the one that was shipped.
    """
    train = _read("optdigits.tra")
    held_out = _read("optdigits.tes")
    return DataSet(train, *held_out.cut(_VALIDATION_SIZE))


def _read(name: str) -> Split:
    file = resources.files(__package__) / "optdigits" / name
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RuntimeError(f"The data file {file} cannot be read ({error}). Reinstall egop-lab.") from error
    sha = hashlib.sha256(content).hexdigest()
    if sha != _SHA256[name]:
        raise RuntimeError(
            f"The data file {file} is damaged: its SHA-256 is {sha}, expected {_SHA256[name]}. Reinstall egop-lab."
        )
    table = torch.from_numpy(np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.int64))
    return Split(features=table[:, :-1].to(torch.float32) / _LARGEST_COUNT, labels=table[:, -1].contiguous())
