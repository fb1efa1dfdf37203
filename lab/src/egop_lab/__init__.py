"""The paper's experiments, what they are kept and shown with, and benchmarks, on top of ``egop``'s public names."""

from importlib import metadata

try:
    __version__ = metadata.version("egop-lab")
except metadata.PackageNotFoundError:  # run from its sources, without having been installed
    __version__ = "unknown"
