"""Build hook: the version, the addresses and the required egop, from the library's ``pyproject.toml``.

An sdist has no library beside it; there hatchling reads these fields from ``PKG-INFO``, and does not call this hook.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LibraryHook(MetadataHookInterface):
    """Fill in what the library's project says."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Take the version and the addresses; require the library of the same version; make links absolute."""
        library = tomllib.loads((Path(self.root).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        version, urls = library["version"], library["urls"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\(\.\./", f"]({urls['Repository']}/blob/v{version}/", text)
        text = re.sub(r"\]\((?!\w+:|#)", f"]({urls['Repository']}/blob/v{version}/lab/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["version"], metadata["urls"] = version, urls
        metadata["dependencies"] = [f"egop[cli]=={version}", *self.config["dependencies"]]
