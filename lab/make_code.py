"""Build the corpus "code" of the race from packages that pip has downloaded; needs nothing but Python.

pip download --no-deps -d dl -r lab/src/egop_lab/race/code_packages.txt && python lab/make_code.py dl OUT

Takes Python files of 400 to 200,000 characters (tests up to 60,000), UTF-8, without lines over 1,000 characters,
without generated protobuf code, vendored copies and duplicates; at most 1.7 million characters a package; only of
packages under permissive licences. Files are in the order of the hash of their path; those with a first byte below 5
are for validation. A zero byte ends each file.
"""

from __future__ import annotations

import email
import hashlib
import lzma
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

_PERMITTED = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|MPL)", re.IGNORECASE)
_REFUSED = re.compile(r"\bA?L?GPL|GNU", re.IGNORECASE)
_PACKAGE_CHARACTERS = 1_700_000


def read_archive(path: Path) -> tuple[Message, list[tuple[str, bytes]]]:
    """Return the metadata of a wheel or a source archive, and its Python files by path."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist() if name.endswith((".py", "/METADATA"))}
        about = next((name for name in contents if name.endswith(".dist-info/METADATA")), None)
    else:
        with tarfile.open(path) as archive:
            members = [each for each in archive if each.isfile() and each.name.endswith((".py", "PKG-INFO"))]
            contents = {each.name: file.read() for each in members if (file := archive.extractfile(each))}
        about = next((name for name in sorted(contents) if re.fullmatch("[^/]*/PKG-INFO", name)), None)
    metadata = email.message_from_bytes(contents[about] if about else b"")
    return metadata, [(name, contents[name]) for name in sorted(contents) if name.endswith(".py")]


def is_permitted(metadata: Message) -> bool:
    """Return True if the metadata name a permissive licence and no other."""
    words = [metadata.get("License-Expression") or "", str(metadata.get("License") or "")[:80]]
    words += [each for each in metadata.get_all("Classifier", []) if "License" in each]
    text = " ".join(filter(None, words))
    return bool(_PERMITTED.search(text)) and not _REFUSED.search(text)


def hash_path(path: str) -> bytes:
    """Return the hash that orders and splits the files."""
    return hashlib.sha1(path.encode()).digest()


def select(files: list[tuple[str, bytes]], seen: set[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the files that are fit for the corpus and not seen before."""
    for path, content in files:
        long_test = "/tests/" in path and len(content) > 60_000
        if not 400 < len(content) < 200_000 or "/_vendor/" in path or "pb2" in path or long_test:
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if max((len(line) for line in text.splitlines()), default=0) > 1000:
            continue
        key = hashlib.sha1(re.sub(r"\s+", "", text).encode()).digest()
        if key not in seen:
            seen.add(key)
            yield path, text


def build(downloads: Path, out: Path) -> None:
    """Write train.txt.xz and val.txt.xz."""
    documents, seen = [], set[bytes]()
    for archive in sorted(downloads.iterdir()):
        metadata, files = read_archive(archive)
        if not is_permitted(metadata):
            print(f"{archive.name}: skipped for its licence")
            continue
        total = 0
        for path, text in sorted(select(files, seen), key=lambda file: hash_path(file[0])):
            total += len(text)
            if total > _PACKAGE_CHARACTERS:
                break
            documents.append((f"{metadata['Name']}/{path}", text))
    documents.sort(key=lambda document: hash_path(document[0]))
    for name, wanted in (("train", False), ("val", True)):
        texts = [text for path, text in documents if (hash_path(path)[0] < 5) is wanted]
        content = "".join(text.rstrip("\n") + "\n\0" for text in texts).encode()
        (out / f"{name}.txt.xz").write_bytes(lzma.compress(content))
        print(f"{name}: {len(texts)} files, {len(content)} bytes")


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
