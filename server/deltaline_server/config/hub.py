"""Models of the Hugging Face hub, brought into this host's cache by huggingface_hub, which knows where the hub is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# All that a server reads of a model; a pickle is not even asked for.
PATTERNS = ("*.json", "*.safetensors")
_YES = {"1", "ON", "YES", "TRUE"}
_MAX_REASON_CHARS = 200


def fetch_model(name: str, cache: Path, environ: Mapping[str, str]) -> str:
    """Bring a model's branch `main` into the cache, of files that are there nothing. Return why not, "" once it is
    there.

    May take as long as its weights take to come; shows its progress on stderr.
    """
    if environ.get("HF_HUB_OFFLINE", "").upper() in _YES:
        return "the hub is not asked, as HF_HUB_OFFLINE is set"
    try:
        from huggingface_hub import snapshot_download  # an extra, and slow to import
    except ImportError:
        return "the hub is not asked, as huggingface_hub is not installed (pip install 'deltaline[hub]')"
    try:
        snapshot_download(name, cache_dir=cache.expanduser(), allow_patterns=list(PATTERNS))
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        why = why if len(why) <= _MAX_REASON_CHARS else why[: _MAX_REASON_CHARS - 3] + "..."
        return f"the hub does not give it: {why}"
    return ""
