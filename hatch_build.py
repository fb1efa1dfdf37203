"""Build hook: the README with absolute links, for PyPI, where relative ones lead nowhere."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Fill in the readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Point relative links to the repository, at the tag of this version."""
        base = f"{metadata['urls']['Repository']}/{{}}/v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"!\[([^\]]*)\]\((?!\w+:)", rf"![\1]({base.format('raw')}/", text)
        text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)", rf"[\1]({base.format('blob')}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
