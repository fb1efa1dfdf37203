"""The paper's experiments, what they are kept and shown with, and benchmarks, on top of ``egop``'s public names."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("egop-lab")
except PackageNotFoundError:  # run from its sources, without having been installed
    __version__ = "unknown"
