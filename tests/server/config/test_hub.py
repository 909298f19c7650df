"""Models by their name on the Hugging Face hub; nothing here asks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltaline_server.config import Config, ConfigError

FILES = ("config.json", "model.safetensors")


def write_snapshot(cache: Path, name: str, files: dict[str, str]) -> Path:
    """Write what a cache has of a model."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc123"
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text("abc123")
    for file, text in files.items():
        (snapshot / file).write_text(text)
    return snapshot


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], list[dict[str, Any]]]:
    """A function that puts another in place of snapshot_download; returns what that was asked for."""

    def put(download: Callable[..., object]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def snapshot_download(name: str, **options: Any) -> None:
            calls.append({"name": name} | options)
            download(Path(options["cache_dir"]), name)

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
        return calls

    return put


def parse(cache: Path, **environ: str) -> Config:
    return Config.parse(["--model", "org/m"], {"HF_HUB_CACHE": str(cache)} | environ)


def test_what_the_cache_lacks_is_brought_without_pickles(tmp_path: Path, asked: Any) -> None:
    calls = asked(lambda cache, name: write_snapshot(cache, name, dict.fromkeys(FILES, "")))
    config = parse(tmp_path)
    assert config.model == str(tmp_path / "models--org--m" / "snapshots" / "abc123")
    assert calls == [{"name": "org/m", "cache_dir": tmp_path, "allow_patterns": ["*.json", "*.safetensors"]}]
    assert parse(tmp_path).model == config.model and len(calls) == 1, "what is there is not asked for"


def test_what_is_there_in_part_is_brought_whole(tmp_path: Path, asked: Any) -> None:
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": shards})}
    write_snapshot(tmp_path, "org/m", {"config.json": "", "model-1.safetensors": ""} | index)
    with pytest.raises(
        ConfigError, match=r"found no model-2\.safetensors: .*; the hub is not asked, as HF_HUB_OFFLINE"
    ):
        parse(tmp_path, HF_HUB_OFFLINE="true")
    calls = asked(lambda cache, name: write_snapshot(cache, name, {"model-2.safetensors": ""}))
    parse(tmp_path)
    assert len(calls) == 1


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_for_the_model_to_tell(tmp_path: Path, index: str) -> None:
    snapshot = write_snapshot(tmp_path, "org/m", dict.fromkeys(FILES, "") | {"model.safetensors.index.json": index})
    assert parse(tmp_path).model == str(snapshot)


def fail(error: Exception) -> Callable[..., object]:
    def download(cache: Path, name: str) -> None:
        raise error

    return download


@pytest.mark.parametrize(
    ("download", "why"),
    [
        (
            fail(OSError("401 Client Error.\n\nRepository Not Found")),
            "gives? it: 401 Client Error. Repository Not Found$",
        ),
        (fail(ConnectionError("")), "the hub does not give it: ConnectionError$"),
        (fail(ValueError("x" * 1000)), r"the hub does not give it: x{197}\.\.\.$"),
        (
            lambda cache, name: write_snapshot(cache, name, {"config.json": ""}),
            "found no weights: .*; the hub has no more",
        ),
    ],
    ids=["refused", "no words", "many words", "pickles"],
)
def test_what_does_not_come_is_told_in_a_line(
    tmp_path: Path, asked: Any, download: Callable[..., object], why: str
) -> None:
    asked(download)
    with pytest.raises(ConfigError, match=why.replace("gives? it", "the hub does not give it")) as refused:
        parse(tmp_path)
    message = str(refused.value)
    assert "\n" not in message and message.startswith("--model: expected ") and "`hf download org/m`" in message


def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"is not installed \(pip install 'deltaline\[hub\]'\)$"):
        parse(tmp_path)
