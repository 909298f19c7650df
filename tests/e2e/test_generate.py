"""The example orchestrator and transformers' own generate, over servers of a checkpoint that transformers wrote, give
transformers' own tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltaline_client import Client
from deltaline_server.app import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(600)

NUM_PROMPTS, MAX_NEW_TOKENS, NUM_DRAFTS = 8, 64, 4
# Checkpoints with one residual, which transformers has too.
PLAIN = ("hybrid", "mamba2", "experts")


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    yield load_example("generate")
    del sys.modules["example_generate"]


@pytest.fixture(
    scope="module",
    params=[
        *PLAIN,
        "hybrid-4",
        *(pytest.param(one, marks=pytest.mark.sweep) for one in ("gated_delta_net", "mamba2-2", "next_experts")),
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a kind, with so many residual streams where a number follows."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp(request.param)
    kind, _, streams = request.param.partition("-")
    load_example("make_checkpoint").make_checkpoint(directory, kind, streams=int(streams or 0))
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1, "all files as the umask says"
    return directory


@pytest.fixture(scope="module")
def prompts(example: Any) -> Any:
    return example.random_prompts(256, NUM_PROMPTS, MAX_NEW_TOKENS, seed=1)


@pytest.fixture(scope="module")
def expected(example: Any, checkpoint: Path, prompts: Any) -> Any:
    """What transformers generates, each prompt up to its first near tie."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its operations are small: more threads only wait for each other
    try:
        return example.expected_tokens(checkpoint, prompts, set())
    finally:
        torch.set_num_threads(threads)


async def run(
    make_server: Callable[..., Server],
    checkpoint: Path,
    generate: Callable[[list[Client]], Any],
    layers: Sequence[str] = ("0:4",),
    ends: Sequence[str] = ("none",),
    **more: Any,
) -> Any:
    """Run the example's loop in a thread against servers of the checkpoint, each with a range of its layers.

    ends: of the streams, which of them each server has. more: options of each.
    """

    def with_clients(addresses: list[str]) -> Any:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(address)) for address in addresses]
            return generate(clients), [client.load() for client in clients]

    async with AsyncExitStack() as stack:
        options = {"random_init": None, "model": str(checkpoint), "max_draft_tokens": 1 + NUM_DRAFTS} | more
        servers = [
            await stack.enter_async_context(make_server(**options, layers=own, stream_ends=end))
            for own, end in zip(layers, ends, strict=True)
        ]
        return await asyncio.to_thread(with_clients, [server.address for server in servers])


async def test_generation_is_that_of_transformers(
    make_server: Callable[..., Server], example: Any, checkpoint: Path, prompts: Any, expected: Any
) -> None:
    await check(make_server, example, checkpoint, prompts, expected, ["0:4"], ["none"])


@pytest.mark.parametrize("checkpoint", ["hybrid-4", "experts"], indirect=True)
async def test_two_servers_with_half_of_the_layers_each_generate_the_same(
    make_server: Callable[..., Server], example: Any, checkpoint: Path, prompts: Any, expected: Any
) -> None:
    ends = ["expand", "head"] if example.Ends(checkpoint).streams else ["none", "none"]
    await check(make_server, example, checkpoint, prompts, expected, ["0:2", "2:4"], ends)


@pytest.mark.parametrize("checkpoint", PLAIN, indirect=True)
@pytest.mark.parametrize(
    "layers", [pytest.param(["0:4"], id="one", marks=pytest.mark.sweep), pytest.param(["0:2", "2:4"], id="two")]
)
async def test_transformers_own_generate_does_the_same_over_servers(
    make_server: Callable[..., Server], checkpoint: Path, prompts: Any, expected: Any, layers: list[str]
) -> None:
    torch = pytest.importorskip("torch")
    tokens = torch.tensor([prompt.tokens for prompt in prompts])

    def generate(clients: list[Client]) -> Any:
        from deltaline_transformers import DeltalineForCausalLM  # only where transformers is installed

        with DeltalineForCausalLM.from_pretrained(checkpoint, servers=clients) as model:
            plain = model.generate(tokens, max_new_tokens=MAX_NEW_TOKENS)
            drafts: Any = {"max_new_tokens": MAX_NEW_TOKENS, "prompt_lookup_num_tokens": NUM_DRAFTS}
            return plain, torch.cat([model.generate(row[None], **drafts) for row in tokens])

    made, loads = await run(make_server, checkpoint, generate, layers, ["none"] * len(layers))
    for answer in made:
        new = answer[:, tokens.shape[1] :].tolist()
        assert [len(row) for row in new] == [MAX_NEW_TOKENS] * NUM_PROMPTS
        assert [row[: len(ours)] for row, ours in zip(new, expected, strict=True)] == expected
    assert sum(map(len, expected)) >= 0.9 * NUM_PROMPTS * MAX_NEW_TOKENS
    assert [(load.sequences_open, load.kv_pages_used) for load in loads] == [(0, 0)] * len(layers)


async def test_streams_of_a_family_s_own_generate_as_transformers_does(
    make_server: Callable[..., Server], example: Any, tmp_path: Path, write_checkpoint: Callable[..., Any]
) -> None:
    """glm5_next, of which transformers has no class for text alone; on one server with both ends, on two with none."""
    torch = pytest.importorskip("torch")
    sizes = {"vocab_size": 64, "hidden": 64, "intermediate": 96, "head_dim": 16, "layers": 4, "index_topk": 48}
    kinds = ["linear_attention", "deepseek_sparse_attention"] * 2
    directory = tmp_path / "model"
    whole = write_checkpoint(directory, "glm5_next", layer_types=kinds, attn_implementation="eager", **sizes)
    prompts, ends = example.random_prompts(64, 3, 30, seed=1), example.Ends(directory)
    expected = []
    for prompt in prompts:
        tokens: list[int] = []
        with torch.no_grad():
            while len(tokens) < prompt.max_new_tokens:
                logits = whole(torch.tensor([prompt.tokens + tokens]), use_cache=False).logits[0, -1]
                best = logits.topk(2)
                if float(best.values[0] - best.values[1]) < example.NEAR_TIE:
                    break
                tokens.append(int(best.indices[0]))
        expected.append(tokens)
    assert sum(map(len, expected)) > 60

    def generate(clients: list[Client]) -> Any:
        return [example.generate(clients, ends, prompts, drafts, 3) for drafts in (0, NUM_DRAFTS)]

    told = {"max_context": 48}
    for layers, stream_ends in ((["0:4"], ["both"]), (["0:2", "2:4"], ["none", "none"])):
        (plain, drafted), _ = await run(make_server, directory, generate, layers, stream_ends, **told)
        for report in (plain, drafted):
            assert [tokens[: len(ours)] for tokens, ours in zip(report.tokens, expected, strict=True)] == expected
        assert drafted.accepted > 0


async def check(
    make_server: Callable[..., Server],
    example: Any,
    checkpoint: Path,
    prompts: Any,
    expected: Any,
    layers: Sequence[str],
    stream_ends: Sequence[str],
) -> None:
    """Generate plain and speculatively on servers with these layers; compare the tokens with what is expected."""
    ends = example.Ends(checkpoint)
    (plain, speculative), loads = await run(
        make_server,
        checkpoint,
        lambda clients: [example.generate(clients, ends, prompts, drafts, 6) for drafts in (0, NUM_DRAFTS)],
        layers,
        stream_ends,
    )
    for report in (plain, speculative):
        assert [len(tokens) for tokens in report.tokens] == [MAX_NEW_TOKENS] * NUM_PROMPTS
        assert len(set(report.ended_at)) >= NUM_PROMPTS - 2, report.ended_at  # measured: 8 different steps in both
        assert [tokens[: len(ours)] for tokens, ours in zip(report.tokens, expected, strict=True)] == expected
    assert sum(map(len, expected)) > 0.7 * NUM_PROMPTS * MAX_NEW_TOKENS  # measured: 73% to 97%; near ties cut the rest
    assert plain.drafted == 0
    assert 0.15 < speculative.acceptance < 0.9  # measured: 0.18 to 0.43
    assert speculative.steps < plain.steps
    assert [(load.sequences_open, load.kv_pages_used) for load in loads] == [(0, 0)] * len(layers)


@pytest.mark.parametrize("checkpoint", ["hybrid"], indirect=True)
async def test_a_stream_ends_at_an_end_token(
    make_server: Callable[..., Server], example: Any, checkpoint: Path, prompts: Any
) -> None:
    ends = example.Ends(checkpoint)

    def both(clients: list[Client]) -> Any:
        whole = example.generate(clients, ends, prompts, 0, 8).tokens
        ends.end_tokens = {whole[0][20]}
        return whole, [example.generate(clients, ends, prompts, drafts, 8).tokens for drafts in (0, NUM_DRAFTS)]

    (whole, ended), _ = await run(make_server, checkpoint, both)
    (end,) = ends.end_tokens
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole]
    assert len(cut[0]) <= 21
    assert ended == [cut, cut]
