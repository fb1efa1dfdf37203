"""The paper's experiments with their records and report, a race between optimizers, and benchmarks of ``egop``."""

from importlib import metadata

try:
    __version__ = metadata.version("egop-lab")
except metadata.PackageNotFoundError:  # run from source, not installed
    __version__ = "unknown"
