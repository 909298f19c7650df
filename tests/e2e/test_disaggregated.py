"""The example of prefill here and decode there: the tokens are one server's, and nothing is left open at either."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.served import served

from deltaline_client import Client, HostTierOff
from deltaline_server.app import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.parametrize("device", ["cpu"])

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, CONCURRENCY = 5, 40, 6, 3


class Prefiller(Client):
    """Opens its second sequence only behind the first decode."""

    def __init__(self, address: str, first_decode: threading.Event) -> None:
        super().__init__(address)
        self._first_decode, self._num_opened = first_decode, 0

    def open(self, **options: Any) -> Any:
        self._num_opened += 1
        assert self._num_opened == 1 or self._first_decode.wait(60), "no prompt is decoded before all are computed"
        return super().open(**options)


class Decoder(Client):
    """Tells of its first decode; fails_at: one that fails, counted from 1."""

    def __init__(self, address: str, fails_at: int = 0) -> None:
        super().__init__(address)
        self._fails_at, self._num_decodes = fails_at, 0
        self.first_decode = threading.Event()

    def decode(self, *arguments: Any, **options: Any) -> Any:
        self._num_decodes += 1
        if self._num_decodes == self._fails_at:
            raise RuntimeError("planted")
        self.first_decode.set()
        return super().decode(*arguments, **options)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield import_module("disaggregated")
    del sys.modules["disaggregated"], sys.modules["generate"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    run_path(str(EXAMPLES / "make_checkpoint.py"))["make_checkpoint"](directory)
    return directory


@pytest.fixture
def serve(make_server: Callable[..., Server], checkpoint: Path) -> Iterator[Callable[..., str]]:
    """A function that serves the checkpoint; behind the test nothing may be open at any server."""
    options: dict[str, Any] = {"random_init": None, "model": str(checkpoint), "host_state_bytes": 1 << 24}
    servers: list[Server] = []
    with ExitStack() as stack:

        def serve(**changes: Any) -> str:
            servers.append(make_server(**(options | changes)))
            return stack.enter_context(served(servers[-1]))

        yield serve
        assert [server.runtime.table.num_open for server in servers] == [0] * len(servers)
        assert [server.runtime.states.snapshots.num_held for server in servers] == [0] * len(servers)


def test_tokens_are_those_of_one_server(
    example: Any,
    checkpoint: Path,
    serve: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"prompts": PROMPTS, "prompt-tokens": PROMPT_TOKENS, "max-new-tokens": NEW_TOKENS}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    addresses = [f"--{name}={serve()}" for name in ("prefill", "decode")]
    monkeypatch.setattr(sys, "argv", ["disaggregated.py", str(checkpoint), *addresses, *options, "--compare"])
    assert example.main() == 0
    _, *rows, verdict = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [[str(n), str(PROMPT_TOKENS), str(NEW_TOKENS)] for n in range(PROMPTS)]
    assert all(float(text) > 0 for row in rows for text in row.split()[3:])
    assert verdict == f"{PROMPTS * NEW_TOKENS} tokens compared with one server's: equal"

    wrong = SimpleNamespace(tokens=[[-1]] * PROMPTS)
    monkeypatch.setattr(example, "generate", lambda *arguments: wrong)
    assert example.main() == 1
    assert capsys.readouterr().out.endswith(f"prompts {list(range(PROMPTS))} differ\n")


def test_prompts_are_computed_while_others_are_decoded(
    example: Any, checkpoint: Path, serve: Callable[..., str]
) -> None:
    ends = example.Ends(checkpoint)
    prompts = example.random_prompts(256, PROMPTS, NEW_TOKENS, 1, PROMPT_TOKENS)
    with Decoder(serve()) as decoder, Prefiller(serve(), decoder.first_decode) as prefiller:
        handed = example.Pair(prefiller, decoder, ends).generate(prompts, CONCURRENCY)
    assert [len(one.stream.new_tokens) for one in handed] == [NEW_TOKENS] * PROMPTS


def test_a_stream_may_end_with_the_token_of_the_prefill(
    example: Any, checkpoint: Path, serve: Callable[..., str]
) -> None:
    prompts = example.random_prompts(256, PROMPTS, 1, 1, PROMPT_TOKENS)
    with Client(serve()) as prefiller, Decoder(serve(), fails_at=1) as decoder:
        handed = example.Pair(prefiller, decoder, example.Ends(checkpoint)).generate(prompts, CONCURRENCY)
    assert [(len(one.stream.new_tokens), one.first_decode_s) for one in handed] == [(1, 0.0)] * PROMPTS


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_decode_that_fails_leaves_nothing_open(
    example: Any, checkpoint: Path, serve: Callable[..., str], fails_at: int
) -> None:
    prompts = example.random_prompts(256, PROMPTS, NEW_TOKENS, 1, PROMPT_TOKENS)
    with Client(serve()) as prefiller, Decoder(serve(), fails_at) as decoder:
        pair = example.Pair(prefiller, decoder, example.Ends(checkpoint))
        with pytest.raises(RuntimeError, match="planted"):
            pair.generate(prompts, CONCURRENCY)


def test_a_state_that_can_not_be_taken_leaves_nothing_open(
    example: Any, checkpoint: Path, serve: Callable[..., str]
) -> None:
    prompts = example.random_prompts(256, PROMPTS, NEW_TOKENS, 1, PROMPT_TOKENS)
    with Client(serve()) as prefiller, Client(serve(host_state_bytes=0)) as decoder:
        pair = example.Pair(prefiller, decoder, example.Ends(checkpoint))
        with pytest.raises(HostTierOff):
            pair.generate(prompts, CONCURRENCY)
