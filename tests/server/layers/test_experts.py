"""Mixtures of experts in whole layers against transformers on the same checkpoint, and their two forms in files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, Oracle, assert_close, assert_same_state, serve
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.block import Block
from deltaline_server.layers.experts import Experts, route_tokens, run_experts
from deltaline_server.layers.shapes import ExpertsShape
from deltaline_server.models.config import Scope
from deltaline_server.models.model import check_model, open_weights

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN = 64
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
    "max_position_embeddings": 256,
}
# The model type and what differs from 6 experts of 32 channels, of which a token has 2, and a shared one of 48.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", {"num_experts": 6}),
    "next-raw": ("qwen3_next", {"num_experts": 5, "norm_topk_prob": False, "shared_expert_intermediate_size": 64}),
    "next-dense-among": ("qwen3_next", {"num_experts": 4, "mlp_only_layers": [2]}),
    "next-every-second": ("qwen3_next", {"num_experts": 4, "decoder_sparse_step": 2}),
    "moe-text": ("qwen3_5_moe_text", {}),
    "moe-all": ("qwen3_5_moe_text", {"num_experts_per_tok": 6, "shared_expert_intermediate_size": 16}),
    "moe-one": ("qwen3_5_moe_text", {"num_experts": 1, "num_experts_per_tok": 1}),
    "moe": ("qwen3_5_moe", {}),
}
ALL = range(3)
PARTS = ("gate", "up", "down")
WRITTEN: dict[str, Any] = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 16, "layers": len(ALL)}
SHAPE = ExpertsShape(num_experts=7, top_k=3, intermediate_size=8, shared_size=12, normalises=True)
ONE_KIND = pytest.mark.parametrize("oracle", ["moe-text"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    model_type, changes = KINDS[request.param]
    model = write_checkpoint(directory, model_type, **WRITTEN, **HYBRID, **changes)
    return Oracle(model.get_decoder(), directory)


def test_prefill_decode_verify_and_commit(oracle: Oracle) -> None:
    served, cache, hidden = serve(oracle.options()), oracle.cache(), torch.randn(50, HIDDEN)
    prompt, drafts, accepted = 40, MAX_DRAFT, 2
    ours = [served.step(hidden[:prompt], [1], [prompt]), served.step(hidden[prompt : prompt + 1], [1], [1])]
    drafted = torch.cat((hidden[prompt + 1 : prompt + 1 + accepted], torch.randn(drafts - accepted, HIDDEN)))
    ours.append(served.step(drafted, [1], [drafts], verify=True)[:accepted])
    ours.append(served.step(hidden[prompt + 1 + accepted :], [1], [50 - prompt - 1 - accepted], accepted=accepted))
    assert_close(torch.cat(ours), oracle.run(ALL, hidden, cache))
    assert_same_state(served, 1, cache, ALL)


def test_each_layer_by_itself(oracle: Oracle) -> None:
    served, hidden = serve(oracle.options(spans=[range(i, i + 1) for i in ALL])), torch.randn(23, HIDDEN)
    for i in ALL:
        assert_close(served.step(hidden, [1], [23], span=i), oracle.run(range(i, i + 1), hidden))


@ONE_KIND
def test_rows_of_a_batch_are_their_sequences(oracle: Oracle) -> None:
    served, lengths = serve(oracle.options()), [1, 4, 30]
    hidden = torch.randn(sum(lengths), HIDDEN)
    made = served.step(hidden, [1, 2, 3], lengths).split(lengths)
    for ours, prompt in zip(made, hidden.split(lengths), strict=True):
        assert_close(ours, oracle.run(ALL, prompt))


@ONE_KIND
def test_experts_that_are_stacked_in_the_file(oracle: Oracle, tmp_path: Path) -> None:
    """As the published checkpoints of Qwen3.5 have them; transformers writes them one by one."""
    stack(oracle.directory, tmp_path)
    hidden = torch.randn(30, HIDDEN)
    stacked, single = (
        serve(replace(oracle.options(), model=directory)).step(hidden, [1], [30])
        for directory in (tmp_path, oracle.directory)
    )
    assert torch.equal(stacked, single)


def stack(directory: Path, to: Path) -> None:
    """Write the checkpoint again, its experts stacked."""
    tensors = load_file(directory / "model.safetensors")
    for i in ALL:
        name = f"model.layers.{i}.mlp.experts."
        parts = [[tensors.pop(f"{name}{expert}.{part}_proj.weight") for expert in range(6)] for part in PARTS]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors |= {f"{name}gate_up_proj": torch.cat((gate, up), dim=1), f"{name}down_proj": down}
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_bytes((directory / "config.json").read_bytes())


@ONE_KIND
@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_outputs_of_two_ranks_sum_to_the_whole(oracle: Oracle, tmp_path: Path, is_stacked: bool) -> None:
    directory = oracle.directory
    if is_stacked:
        directory = tmp_path
        stack(oracle.directory, directory)
    hidden, made = torch.randn(20, HIDDEN), []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        with open_weights(replace(oracle.options(), model=directory, rank=rank, world_size=world)) as loader:
            block = loader.block(2, {})
        assert isinstance(block, Block) and isinstance(block.mlp.inner, Experts)
        made.append(run_layer(block.mlp.inner, hidden))
    assert_close(made[1] + made[2], made[0])
    expected = "a divisor of moe_intermediate_size 8 and shared_expert_intermediate_size 12, got 8"
    with pytest.raises(ModelError, match=f"world_size: expected {expected}"):
        SHAPE.shard(8)


def run_layer(experts: Experts, hidden: Tensor) -> Tensor:
    rows = Rows.build([len(hidden)], [0], [1], [len(hidden)], [0], [0], max_short=1, device=hidden.device)
    return experts.forward(hidden, rows, None)


@ONE_KIND
def test_random_experts(oracle: Oracle) -> None:
    options = replace(oracle.options(), model=None, random_init=oracle.directory / "config.json")
    hidden = torch.randn(5, HIDDEN)
    first, second = (serve(options).step(hidden, [1], [5]) for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all() and not torch.equal(first, hidden)


def test_bfloat16_follows_the_checkpoint_model(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> None:
    model = write_checkpoint(tmp_path, "qwen3_5_moe_text", **WRITTEN, **HYBRID, num_experts_per_tok=6, dtype="bfloat16")
    oracle, hidden = Oracle(model, tmp_path), torch.randn(30, HIDDEN).bfloat16()
    assert_close(serve(oracle.options()).step(hidden, [1], [30]), oracle.run(ALL, hidden), tolerance=3e-2)


def test_a_row_depends_on_its_own_input_alone() -> None:
    """Whoever comes along: others on the same experts, none, or rows that are not finite."""
    x, logits = torch.randn(60, 16), torch.randn(60, 8)
    gate_up, down = torch.randn(9, 16, 16), torch.randn(9, 16, 8)

    def run(rows: slice) -> Tensor:
        return run_experts(x[rows], gate_up, down, *route_tokens(logits[rows], SHAPE))

    whole = run(slice(None))
    assert torch.equal(run(slice(5, 6)), whole[5:6]) and torch.equal(run(slice(20, 59)), whole[20:59])
    x[::2], logits[::4] = torch.nan, torch.nan
    assert torch.equal(run(slice(None))[1::2], whole[1::2])


def test_routes() -> None:
    """The largest first, of equal ones the lowest; then the shared one, in as many parts as it takes."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 3.0, -1.0, 0.0]])
    weights, experts = route_tokens(logits, SHAPE)
    assert experts.tolist() == [[1, 2, 4, 7, 8]]
    assert torch.allclose(weights, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]]))
    raw, _ = route_tokens(logits, replace(SHAPE, normalises=False))
    assert torch.allclose(raw[0, :3], logits[:, :-1].softmax(-1)[0, [1, 2, 4]])


@ONE_KIND
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gate.weight", r"gate\.weight: expected shape \[6, 64\], found nothing"),
        ("experts.5.up_proj.weight", r"experts\.5\.up_proj\.weight: expected shape \[32, 64\], found nothing"),
        ("shared_expert_gate.weight", r"shared_expert_gate\.weight: expected shape \[1, 64\], found nothing"),
        (
            "shared_expert.down_proj.weight",
            r"shared_expert\.down_proj\.weight: expected shape \[64, 48\], found nothing",
        ),
    ],
)
def test_a_missing_tensor_is_named(oracle: Oracle, tmp_path: Path, name: str, message: str) -> None:
    tensors = load_file(oracle.directory / "model.safetensors")
    del tensors[f"model.layers.1.mlp.{name}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((oracle.directory / "config.json").read_bytes())
    with pytest.raises(ModelError, match=rf"^model\.layers\.1\.mlp\.{message}$"):
        check_model(replace(oracle.options(), model=tmp_path))
    check_model(replace(oracle.options(scope=Scope.MIXER), model=tmp_path))
