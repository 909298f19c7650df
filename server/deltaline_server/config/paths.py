"""Paths that options name, and the Hugging Face cache of this host: what is there, asked so that nothing is raised that
an operator can't read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

# What names a model on the Hugging Face hub: org/name.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What names a snapshot of it: a commit's hash, with room to spare.
_REVISION = re.compile(rb"[A-Za-z0-9][\w.-]{0,99}")
_REVISION_BYTES = 256
_INDEX = "model.safetensors.index.json"


def why_refused(path: str) -> str:
    """Why the system takes no such path, for example "File name too long"; "" where it does, whether or not something
    is there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return reason_of(error)
    return ""


def reason_of(error: OSError | ValueError) -> str:
    """What an error about a path says, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where the Hugging Face cache of this host is; may begin with a user's home."""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def cached_model(name: str, environ: Mapping[str, str]) -> Path:
    """The directory of a model on the Hugging Face hub in the cache of this host, all of whose files are there.

    Raises ValueError: what was expected, what is there, and how to get it.
    """
    remedy = f"get it with `hf download {name}` (pip install huggingface_hub), or give its directory"
    cache = hub_cache(environ)
    try:
        cache = cache.expanduser()
        folder = cache / f"models--{name.replace('/', '--')}"
        with open(folder / "refs" / "main", "rb") as file:
            revision = file.read(_REVISION_BYTES).strip()
    except RuntimeError as error:
        why = "and no user has such a home"
        raise ValueError(f"expected a directory, or a model in {cache}, got {name!r}, {why}: {remedy}") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a directory, or a model in {cache}, got {name!r}, which is neither: {remedy}"
        ) from error
    if not _REVISION.fullmatch(revision):
        raise ValueError(
            f"expected the name of a snapshot of {name!r} in {folder / 'refs' / 'main'}, got none: {remedy}"
        )
    directory = folder / "snapshots" / revision.decode()
    try:
        names = [path.name for path in directory.glob("*") if path.is_file()]  # no link to what is not there yet
    except OSError as error:
        raise ValueError(f"expected to read {name!r} in {directory}, which fails: {reason_of(error)}") from error
    lacks = [] if "config.json" in names else ["config.json"]
    lacks += _lacking_weights(directory, names)
    if lacks:
        raise ValueError(f"expected all of {name!r} in {directory}, found no {' and no '.join(lacks)}: {remedy}")
    return directory


def _lacking_weights(directory: Path, names: Collection[str]) -> list[str]:
    """What is lacking of a model's weights: a file that its index names, or all of them. An index that can't be read is
    for who reads it to tell."""
    if _INDEX in names:
        try:
            index = json.loads((directory / _INDEX).read_bytes())
            files = set(index["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return []
        return sorted(files.difference(names), key=str)[:1]
    return [] if any(each.endswith((".safetensors", ".bin")) for each in names) else ["weights"]
