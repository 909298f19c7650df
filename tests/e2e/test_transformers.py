"""transformers' own generate over servers: what it does with a model of its own it does with their layers.

That whole runs are those of transformers, greedy and speculative, tells test_generate.py.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rigs.quantised import quantise_written
from rigs.served import served
from rigs.small_models import GATED_DELTA_NET, HIDDEN
from rigs.until import until

from deltaline_client import Client, NoFreeLines, Retry, Row, Sequence, SequenceClosed, StepResult, Unavailable
from deltaline_server.app import Server

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
DeltalineForCausalLM: Any = pytest.importorskip("deltaline_transformers").DeltalineForCausalLM

pytestmark = pytest.mark.parametrize("device", ["cpu"])
MakeServer = Callable[..., Server]
VOCABULARY, PAD = 64, 0
TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden": HIDDEN, "intermediate": 96, "head_dim": 16, "layers": 2}
HYBRID = TINY | {"layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 4096}
OLMO = {"rope_parameters": {"rope_theta": None}}
BAMBA = {"attn_layer_indices": [1]}
NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "layers": 3, "tie_word_embeddings": False}
FALCON = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.9, 0.3], "key_multiplier": 0.4}
JAMBA = {"max_position_embeddings": 4096}
LFM2 = {"layer_types": ["conv", "full_attention"]}
LATENTS = {"layer_types": ["linear_attention", "full_attention"]}
GRANITE = {"layer_types": ["mamba", "attention"], "embedding_multiplier": 3.0, "logits_scaling": 4.0}


class Checkpoint(NamedTuple):
    """A small checkpoint, and the model of transformers that wrote it."""

    directory: Path
    model: Any


class CountingClient(Client):
    """A client that knows how many tokens each row of its steps had, and the sequences that it opened."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.steps: list[list[int]] = []
        self.opened: list[Sequence] = []

    def step(self, rows: list[Row], **options: Any) -> StepResult:  # type: ignore[override]
        self.steps.append([len(row.hidden) for row in rows])  # type: ignore[arg-type]
        return super().step(rows, **options)

    def open_many(self, count: int, **options: Any) -> list[Sequence]:
        self.opened = super().open_many(count, **options)
        return self.opened


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]) -> Checkpoint:
    directory = tmp_path_factory.mktemp("checkpoint")
    return Checkpoint(directory, write_checkpoint(directory, "qwen3_5_text", **HYBRID))


@contextmanager
def addresses(make_server: MakeServer, directory: Path, *options: dict[str, Any]) -> Iterator[list[str]]:
    """The addresses of servers of a checkpoint, with these options each."""
    with ExitStack() as stack:
        servers = [make_server(**({"random_init": None, "model": str(directory)} | one)) for one in options]
        yield [stack.enter_context(served(server)) for server in servers]


@pytest.fixture
def client(make_server: MakeServer, checkpoint: Checkpoint) -> Iterator[CountingClient]:
    """A client of a server with all layers of the checkpoint."""
    with addresses(make_server, checkpoint.directory, {}) as [address], CountingClient(address) as client:
        yield client


@pytest.fixture
def model(client: CountingClient, checkpoint: Checkpoint) -> Iterator[Any]:
    with DeltalineForCausalLM.from_pretrained(checkpoint.directory, servers=[client]) as model:
        yield model


def prompts(rows: int, columns: int = 9) -> Any:
    return torch.randint(1, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(rows))


def wait_until_none_is_open(client: Client) -> None:
    asyncio.run(until(lambda: client.load().sequences_open == 0))


def greedy(model: Any, tokens: Any, count: int, **options: Any) -> Any:
    return model.generate(tokens, max_new_tokens=count, do_sample=False, pad_token_id=PAD, **options)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3_5_text", HYBRID),
        ("qwen3_5", HYBRID | {"tie_word_embeddings": True}),
        ("qwen3_next", TINY),
        ("qwen3_5_moe_text", HYBRID),
        ("qwen3_5_moe", TINY),
        ("mamba2", TINY | {"tie_word_embeddings": True}),
        ("bamba", TINY | BAMBA),
        ("olmo_hybrid", HYBRID | OLMO),
        ("granitemoehybrid", TINY | GRANITE),
        ("granitemoehybrid", TINY | GRANITE | {"num_local_experts": 4}),
    ],
)
@pytest.mark.parametrize(
    "split", [[{"spans": "0:1,1:2"}], [{"layers": "1:2"}, {"layers": "0:1"}]], ids=["spans", "servers"]
)
def test_logits_are_those_of_the_whole_model(
    make_server: MakeServer,
    tmp_path: Path,
    write_checkpoint: Callable[..., Any],
    model_type: str,
    options: dict[str, Any],
    split: list[dict[str, Any]],
) -> None:
    directory = tmp_path / "model"
    whole = write_checkpoint(directory, model_type, **options)
    tokens = prompts(2)
    with (
        addresses(make_server, directory, *split) as servers,
        DeltalineForCausalLM.from_pretrained(directory, servers=servers) as model,
        torch.no_grad(),
    ):
        first = model(tokens[:, :-1])
        second = model(tokens[:, -1:], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits, second.logits], dim=1)
        assert logits.dtype == torch.float32 and (logits - whole(tokens, use_cache=False).logits).abs().max() < 1e-4
        assert all(layer not in name for name, _ in model.named_parameters() for layer in (".layers.", "visual"))
        assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("mamba", {"tie_word_embeddings": True}),
        ("falcon_mamba", {}),
        ("jamba", JAMBA),
        ("bamba", BAMBA),
        ("olmo_hybrid", HYBRID | OLMO),
        ("granitemoehybrid", GRANITE | {"num_local_experts": 4}),
        ("nemotron_h", NEMOTRON),
        ("falcon_h1", FALCON),
        ("lfm2", LFM2),
        ("lfm2_moe", LFM2),
        ("kimi_linear", LATENTS),
        ("zamba2", ZAMBA),
        ("zamba2", ZAMBA | {"tie_word_embeddings": True}),
    ],
)
def test_families_generate_as_transformers_does_plain_and_with_drafts(
    make_server: MakeServer,
    tmp_path: Path,
    write_checkpoint: Callable[..., Any],
    model_type: str,
    options: dict[str, Any],
) -> None:
    directory = tmp_path / "model"
    whole, tokens = write_checkpoint(directory, model_type, **TINY | options), prompts(1)
    with (
        addresses(make_server, directory, {}) as servers,
        DeltalineForCausalLM.from_pretrained(directory, servers=servers) as model,
    ):
        expected = greedy(whole, tokens, 24)
        assert torch.equal(greedy(model, tokens, 24), expected)
        assert torch.equal(greedy(model, tokens, 24, prompt_lookup_num_tokens=4), expected)


def test_a_model_in_fp8_generates_what_its_weights_stand_for(
    make_server: MakeServer, tmp_path: Path, write_checkpoint: Callable[..., Any]
) -> None:
    """Transformers has them in fp32."""
    directory, plain = tmp_path / "model", tmp_path / "plain"
    sizes = {"hidden": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4}
    write_checkpoint(directory, "qwen3_5_moe_text", **HYBRID | sizes)
    quantise_written(directory, plain)
    whole, tokens = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), prompts(1)
    with (
        addresses(make_server, directory, {"dtype": "float32"}) as servers,
        DeltalineForCausalLM.from_pretrained(directory, servers=servers) as model,
    ):
        expected = greedy(whole, tokens, 24)
        assert torch.equal(greedy(model, tokens, 24), expected)
        assert torch.equal(greedy(model, tokens, 24, prompt_lookup_num_tokens=4), expected)


def test_a_head_that_is_tied_beside_the_text_config_is_the_embedding(
    make_server: MakeServer, tmp_path: Path, write_checkpoint: Callable[..., Any]
) -> None:
    directory = tmp_path / "model"
    whole = write_checkpoint(directory, "qwen3_5", **TINY)
    whole.config.tie_word_embeddings = True
    whole.tie_weights()
    whole.save_pretrained(directory)
    with (
        addresses(make_server, directory, {}) as servers,
        DeltalineForCausalLM.from_pretrained(directory, servers=servers) as model,
    ):
        logits = whole(prompts(2), use_cache=False).logits
        assert (model(prompts(2)).logits - logits).abs().max() < 1e-4


def test_samples_are_those_of_the_same_seed(model: Any, checkpoint: Checkpoint) -> None:
    made = []
    for one in (model, checkpoint.model):
        torch.manual_seed(3)
        made.append(one.generate(prompts(3), max_new_tokens=32, do_sample=True, top_k=20, num_return_sequences=2))
    assert made[0].shape == (6, 41) and torch.equal(*made)


def test_a_batch_with_padding_is_each_of_its_prompts_alone(
    model: Any, client: CountingClient, checkpoint: Checkpoint
) -> None:
    tokens, lengths = prompts(4), [9, 1, 4, 8]
    mask = torch.stack([torch.arange(9) >= 9 - length for length in lengths]).long()
    padded = greedy(model, tokens * mask, 12, attention_mask=mask)
    assert client.steps == [lengths, *[[1] * 4] * 11]
    alone = [greedy(checkpoint.model, tokens[row : row + 1, -n:], 12)[0, n:] for row, n in enumerate(lengths)]
    assert torch.equal(padded[:, 9:], torch.stack(alone))
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    assert (logits[2, -4:] - checkpoint.model(tokens[2:3, -4:]).logits[0]).abs().max() < 1e-4
    wait_until_none_is_open(client)


def test_rows_end_one_by_one_and_go_on_without_padding(
    model: Any, client: CountingClient, checkpoint: Checkpoint
) -> None:
    tokens = prompts(3)
    free = greedy(checkpoint.model, tokens, 16)[:, 9:]
    ends = [int(free[row, place]) for row, place in ((0, 3), (1, 8))]
    counts = [next((n for n, token in enumerate(row.tolist(), 1) if token in ends), 16) for row in free]
    assert len(set(counts)) == 3, "rows that end at different times"
    client.steps.clear()
    made = greedy(model, tokens, 16, eos_token_id=ends, return_dict_in_generate=True)
    assert torch.equal(made.sequences, greedy(checkpoint.model, tokens, 16, eos_token_id=ends))
    # A row's end is computed, like all that it may go on from; padding is not.
    rows = [sum(count >= n for count in counts) for n in range(1, max(counts))]
    assert client.steps == [[9] * 3, *([1] * count for count in rows)]

    asked = {"eos_token_id": int(tokens[0, -1])}  # an end in a prompt ends nothing
    assert torch.equal(greedy(model, tokens, 6, **asked), greedy(checkpoint.model, tokens, 6, **asked))

    said, more = made.sequences, prompts(3, columns=4)
    mask = torch.cat([said != PAD, torch.ones_like(more)], dim=1).long()
    going_on = torch.cat([said, more], dim=1)
    answer = greedy(model, going_on, 8, attention_mask=mask, past_key_values=made.past_key_values)
    for row, own in enumerate(mask.bool()):
        whole = going_on[row : row + 1, own]
        assert torch.equal(answer[row, -8:], greedy(checkpoint.model, whole, 8)[0, -8:])


def test_a_stopped_generation_goes_on_from_its_cache(
    model: Any, client: CountingClient, checkpoint: Checkpoint
) -> None:
    tokens = prompts(2)
    whole = greedy(checkpoint.model, tokens, 24)
    first = greedy(model, tokens, 10, return_dict_in_generate=True)
    again = copy.deepcopy(first.past_key_values)
    client.steps.clear()
    for cache in (first.past_key_values, again):
        assert torch.equal(greedy(model, first.sequences, 14, past_key_values=cache), whole)
        assert client.steps == [[1, 1]] * 14
        client.steps.clear()


def test_drafts_of_an_assistant_are_verified(
    model: Any, client: CountingClient, checkpoint: Checkpoint, write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    assistant = write_checkpoint(tmp_path / "model", "qwen3_5_text", **HYBRID, seed=1)
    assistant.generation_config.assistant_confidence_threshold = 0  # it is never sure of anything
    with torch.no_grad():  # so that it is often right
        for ours, theirs in zip(assistant.parameters(), checkpoint.model.parameters(), strict=True):
            ours.copy_(0.9 * theirs + 0.1 * ours)
    first = greedy(model, prompts(1), 16, return_dict_in_generate=True, assistant_model=assistant)
    last = greedy(model, first.sequences, 32, past_key_values=first.past_key_values, assistant_model=assistant)
    assert torch.equal(last, greedy(checkpoint.model, prompts(1), 48))
    verified = [tokens for [tokens] in client.steps[1:]]
    assert client.steps[0] == [8] and max(verified) == client.info().max_draft_tokens
    assert len(verified) < 40 and sum(verified) > 60, "some drafts were right, not all"


def test_beams_are_forks(model: Any, client: CountingClient, checkpoint: Checkpoint) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(greedy(model, prompts(2), 10, **options), greedy(checkpoint.model, prompts(2), 10, **options))
    wait_until_none_is_open(client)


def test_a_cache_closes_its_sequences_when_it_goes(model: Any, client: CountingClient) -> None:
    tokens = prompts(3)
    greedy(model, tokens, 2)
    wait_until_none_is_open(client)
    made = greedy(model, tokens, 2, return_dict_in_generate=True)
    assert client.load().sequences_open == 3
    del made
    gc.collect()
    wait_until_none_is_open(client)
    with model(tokens).past_key_values as cache:
        assert client.load().sequences_open == 3
    assert client.load().sequences_open == 0
    with pytest.raises(ValueError, match="this cache is closed"):
        model(tokens, past_key_values=cache)
    cache.reset()
    assert (model(tokens, past_key_values=cache).logits == model(tokens).logits).all()
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 5]))
    again = [
        model(tokens[rows], past_key_values=one).logits
        for rows, one in (([0, 2], cache), ([0, 1, 2], model(tokens).past_key_values))
    ]
    assert torch.allclose(again[0], again[1][[0, 2]], atol=1e-5)
    cache.activate_past_recording()
    model(tokens[[0, 2]], past_key_values=cache, logits_to_keep=3)
    cache.close()
    cache.crop(-2)  # of drafts that are gone too
    wait_until_none_is_open(client)


def test_a_model_that_goes_waits_until_its_sequences_are_closed(
    client: CountingClient, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = client.close

    def close_late(sequences: list[Sequence]) -> None:
        time.sleep(0.3)
        close(sequences)

    monkeypatch.setattr(client, "close", close_late)
    model = DeltalineForCausalLM.from_pretrained(checkpoint.directory, servers=[client])
    model(prompts(4))
    del model
    gc.collect()
    assert client.load().sequences_open == 0


def test_a_model_that_is_closed_closes_its_caches(client: CountingClient, checkpoint: Checkpoint) -> None:
    with DeltalineForCausalLM.from_pretrained(checkpoint.directory, servers=[client]) as model:
        cache = model(prompts(2)).past_key_values
        copied = copy.deepcopy(cache)
        assert client.load().sequences_open == 4
    assert client.load().sequences_open == 0
    for one in (cache, copied):
        with pytest.raises(ValueError, match="this cache is closed"):
            model(prompts(2), past_key_values=one)


def test_a_failed_step_is_the_client_s_error_and_closes_the_cache(model: Any, client: CountingClient) -> None:
    made = greedy(model, prompts(2), 3, return_dict_in_generate=True)
    client.close(client.opened[1:])
    with pytest.raises(SequenceClosed):
        greedy(model, made.sequences, 3, past_key_values=made.past_key_values)
    wait_until_none_is_open(client)
    with pytest.raises(ValueError, match="this cache is closed"):
        greedy(model, made.sequences, 3, past_key_values=made.past_key_values)


def test_a_batch_that_one_server_has_no_room_for_is_open_on_none(
    make_server: MakeServer, checkpoint: Checkpoint
) -> None:
    halves = {"layers": "0:1"}, {"layers": "1:2", "max_sequences": 3}
    with addresses(make_server, checkpoint.directory, *halves) as [first, second]:
        clients = Client(first), Client(second, retry=Retry(max_attempts=1))
        with (
            clients[0],
            clients[1],
            DeltalineForCausalLM.from_pretrained(checkpoint.directory, servers=clients) as model,
        ):
            with clients[1].open(), pytest.raises(NoFreeLines):
                greedy(model, prompts(3), 2)
            wait_until_none_is_open(clients[0])
            assert greedy(model, prompts(3), 2).shape == (3, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{"layers": "0:1"}], "each of the layers 0:2 once, got 0:1; `deltaline-server --layers FIRST:END`"),
        ([{}, {"layers": "1:2"}], "each of the layers 0:2 once, got 0:2, 1:2"),
        ([{"scope": "mixer"}], "whole layers, got their mixers: start the server with `--scope block`"),
        ([{"random_init": {"hc_mult": 2}}], "one residual stream, as transformers' models have, got 2"),
        ([{"random_init": {"hidden_size": 32}}], "of qwen3_5_text and width 64, got qwen3_5_text and 32: start"),
        ([], "each of the layers 0:2 once, got none"),
    ],
)
def test_servers_that_do_not_fit_are_refused(
    make_server: MakeServer, checkpoint: Checkpoint, tmp_path: Path, options: list[dict[str, Any]], message: str
) -> None:
    other = tmp_path / "other.json"
    for one in options:
        if "random_init" in one:
            other.write_text(json.dumps(GATED_DELTA_NET | one["random_init"]))
    drawn = {"random_init": str(other), "model": None}
    servers_of = [one | drawn if "random_init" in one else one for one in options]
    with (
        addresses(make_server, checkpoint.directory, *servers_of) as servers,
        pytest.raises(ValueError, match=re.escape(message)),
    ):
        DeltalineForCausalLM.from_pretrained(checkpoint.directory, servers=servers)


def test_a_checkpoint_without_its_ends_and_an_absent_server_are_refused(
    model: Any, client: CountingClient, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    load = DeltalineForCausalLM.from_pretrained
    with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1: start one with"):
        load(checkpoint.directory, servers=["127.0.0.1:1"])
    with pytest.raises(TypeError, match="expected a list of addresses, got the string 'localhost'"):
        load(checkpoint.directory, servers="localhost")
    tensors = {name: tensor for name, tensor in checkpoint.model.state_dict().items() if name != "model.norm.weight"}
    checkpoint.model.save_pretrained(tmp_path / "model", state_dict=tensors)
    with pytest.raises(ValueError, match=r"expected the tensors model\.norm\.weight, which the checkpoint lacks"):
        load(tmp_path / "model", servers=[client])


@pytest.mark.parametrize(
    ("cache", "arguments", "message"),
    [
        ("own", {}, "input_ids: expected either these or inputs_embeds"),
        ("own", {"input_ids": prompts(3)}, "input_ids: expected 2 rows, as the cache has, got 3"),
        (
            "own",
            {"input_ids": prompts(2), "attention_mask": torch.ones(2, 8)},
            r"expected shape \(2, 18\), got \(2, 8\)",
        ),
        ("other", {"input_ids": prompts(2)}, "expected a cache that this model made, got a DeltalineCache"),
        ("dynamic", {"input_ids": prompts(2)}, "expected a cache that this model made, got a DynamicCache"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    model: Any, client: CountingClient, checkpoint: Checkpoint, cache: str, arguments: dict[str, Any], message: str
) -> None:
    other = DeltalineForCausalLM.from_pretrained(checkpoint.directory, servers=[client])
    caches = {
        "own": model(prompts(2)).past_key_values,
        "other": other(prompts(2)).past_key_values,
        "dynamic": transformers.DynamicCache(),
    }
    with pytest.raises((TypeError, ValueError), match=message):
        model(past_key_values=caches[cache], **arguments)


def test_what_a_generation_can_not_do_is_refused(model: Any, client: CountingClient) -> None:
    with pytest.raises(ValueError, match="input_ids: expected a token behind the 9 of the cache, got none"):
        greedy(model, prompts(1), 2, past_key_values=model(prompts(1)).past_key_values)
    with pytest.raises(ValueError, match="attention_mask: expected padding on the left"):
        greedy(model, prompts(2), 2, attention_mask=torch.tensor([[1] * 9, [1] * 8 + [0]]))
    with pytest.raises(ValueError, match=r"tokens_to_remove: expected 0 \.\. 0, .* can't assist another one"):
        model(prompts(1)).past_key_values.crop(-1)
    with pytest.raises(TypeError, match="output_attentions"):
        greedy(model, prompts(1), 2, output_attentions=True)
    wait_until_none_is_open(client)
