"""The paper's experiments, what they are kept and shown with, and benchmarks, on top of ``egop``'s public names."""

from importlib import metadata

try:
    __version__ = metadata.version("egop-lab")
except metadata.PackageNotFoundError:  # run from source, not installed
    __version__ = "unknown"
