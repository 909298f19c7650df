"""The calculator says what the server allocates, for every family; and the command prints it."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs import small_models
from rigs.quantised import BLOCK, apart, write_checkpoints
from rigs.ranked_layers import MODELS as RANKED
from safetensors.torch import save_file

from deltaline_cli import main
from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import model_options, state_options
from deltaline_server.config import Config
from deltaline_server.engine.engine import Engine
from deltaline_server.layers.kv_cache import COPIES
from deltaline_server.layers.state_pool import LayerState
from deltaline_server.models.config import Scope
from deltaline_server.models.model import Model, load_model, open_plan
from deltaline_server.models.weights import random_init
from deltaline_server.runtime import Runtime
from deltaline_server.sizing import __main__ as sizing
from deltaline_server.sizing import host
from deltaline_server.sizing.sizes import size
from deltaline_server.snapshots.device.transfer import StateTransfer
from deltaline_server.snapshots.tiers import layer_numbers, make_layout
from deltaline_server.telemetry.metrics import Metrics

GATED_DELTA_NET = small_models.GATED_DELTA_NET | {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
MAMBA2 = small_models.MAMBA2 | {"use_bias": True}
HYBRID = small_models.HYBRID | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "max_position_embeddings": 1000,
}
EXPERTS = {
    "model_type": "qwen3_next",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [1],
}
MODELS = {
    "gated_delta_net": GATED_DELTA_NET,
    "mamba1": small_models.MAMBA1 | {"use_bias": True},
    "falcon_mamba": small_models.MAMBA1 | {"model_type": "falcon_mamba"},
    "mamba2": MAMBA2,
    "hybrid": HYBRID,
    "streams": HYBRID | {"hc_mult": 4},
    "experts": HYBRID | EXPERTS,
    "bamba": small_models.BAMBA | {"mlp_bias": True},
    "granite": small_models.GRANITE,
    "olmo": small_models.OLMO,
    "nemotron": small_models.NEMOTRON | {"use_bias": True},
    "nemotron-latents": small_models.NEMOTRON | {"moe_latent_size": 24, "mlp_bias": True},
    "lfm2": small_models.LFM2 | {"conv_bias": True},
    "lfm2_moe": small_models.LFM2_MOE | {"layer_types": ["full_attention", "conv", "conv"]},
    "jamba": small_models.JAMBA,
    "kimi": small_models.KIMI,
    "glm5_next": small_models.GLM5_NEXT,
    "kimi-low-rank": small_models.KIMI | {"q_lora_rank": 12, "qk_rope_head_dim": 0},
    "falcon": small_models.FALCON | {"projectors_bias": True, "mlp_bias": True},
}
Capture = pytest.CaptureFixture[str]
# Modules whose objects hold weights.
OWN = "deltaline_server", "deltaline_kernels.mhc"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "state_dtype": "bfloat16", "max_sequences": 5, "max_draft_tokens": 3},
    {
        "scope": "mixer",
        "spans": "auto",
        "page_size": 16,
        "max_context": 100,
        "adapter_bytes": 1 << 20,
        "adapter_slots": 3,
    },
    {"layers": "1:2", "state_bytes": 3 << 20},
    {"host_state_bytes": 1 << 20, "max_context": 100, "page_size": 16},
]


def config_of(folder: Path, model: dict[str, Any], **options: Any) -> Config:
    path = folder / "config.json"
    path.write_text(json.dumps(model))
    defaults: dict[str, Any] = {"device": "cpu", "max_sequences": 8, "max_draft_tokens": 4}
    return Config(random_init=str(path), **(defaults | options))


def tensors_of(model: Model) -> Iterator[torch.Tensor]:
    """Every tensor of a model's layers, once; not the slots of adapters."""
    left: list[Any] = [model]
    seen = {id(model.adapters)}
    if model.adapters is not None:
        layers = [model.adapters.layer(layer) for layer in model.layout.layers]
        seen |= {id(weights) for projections in layers for weights in projections.values()}
    while left:
        thing: Any = left.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, dict | tuple | list) or type(thing).__module__.startswith(OWN):
            left += gc.get_referents(thing)


@pytest.mark.parametrize("layers", ["0:1", "3:4"], ids=["mlp", "experts"])
def test_layers_without_a_state_are_served_alone(layers: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, small_models.NEMOTRON, layers=layers, state_bytes=1 << 20, host_state_bytes=1 << 20)
    sizes = size(config, None)
    runtime = Runtime.build(config, Metrics([]), lambda: 0.0, lambda *_: None)
    Engine.close(runtime.engine)
    asyncio.run(runtime.tiers.close())
    assert (sizes.state.total_bytes, sizes.sequence_bytes, runtime.pool.total_bytes) == (0, 0, 0)
    assert "room for --max-sequences" not in sizing.report(sizes, config, None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_calculated_is_what_the_server_allocates(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, MODELS[name], **options)
    sizes = size(config, None)
    runtime = Runtime.build(config, Metrics([]), lambda: 0.0, lambda *_: None)
    info, pool, model = runtime.info(), runtime.pool, runtime.model
    Engine.close(runtime.engine)
    asyncio.run(runtime.tiers.close())

    assert sizes.fits and sizes.state.line_bytes == info.sequence_state_bytes == pool.bytes_per_sequence
    assert sizes.state.total_bytes == pool.total_bytes
    assert sum(len(layer.layers) for layer in sizes.layers) == model.num_layers
    lines = {tensor.data_ptr(): tensor.nbytes for state in pool.layers for tensor in vars(state).values()}
    assert sum(lines.values()) == sizes.state.total_bytes
    tokens = {layer.token_bytes for layer in sizes.layers if layer.token_bytes}
    for state in pool.layers:
        if isinstance(state, LayerState):
            [layer] = [layer for layer in sizes.layers if layer.line]
            rows = config.max_sequences + config.snapshot_lines_beside(config.max_sequences) + 1
            rows += bool(config.host_state_bytes)
            assert layer.line == {part: tensor.nbytes // rows for part, tensor in vars(state).items()}
        else:
            # Of latents values are among the keys.
            parts = {part.data_ptr(): part.nbytes for part in (state.k_pages, state.v_pages)}
            page_bytes = sum(parts.values()) // len(state.k_pages)
            assert tokens == {page_bytes // config.page_size}
    kv = sizes.state.kv
    pages = (0, 0, 0, 0) if kv is None else (kv.num_pages, kv.page_size, kv.page_bytes, kv.max_context)
    assert pages == (info.kv_pages, info.kv_page_tokens, info.kv_page_bytes, info.max_context)
    copy_bytes = sum(COPIES * block[:, 0].nbytes for block in pool.page_blocks)
    transfer = 0
    if config.host_state_bytes:
        layout = make_layout(model, pool)
        mover = StateTransfer(layout, layer_numbers(model), pool)
        transfer = sum(value.nbytes for value in vars(mover).values() if isinstance(value, torch.Tensor))
    assert sizes.transfer_bytes == transfer
    assert sizes.total_bytes == sizes.weight_bytes + pool.total_bytes + copy_bytes + transfer + sizes.adapter_bytes
    assert sizes.adapter_bytes == (0 if model.adapters is None else model.adapters.total_bytes)
    assert sizes.weight_bytes == sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors_of(model))


@pytest.mark.parametrize("name", ["streams", "mamba2-streams"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("ends", ["expand", "head", "both"])
def test_weights_of_streams_are_what_the_server_loads(name: str, dtype: str, ends: str, tmp_path: Path) -> None:
    """A head where a span has it, and terms where streams are bf16, as those of this Mamba2 model never are."""
    given = MAMBA2 | {"hc_mult": 2} if name == "mamba2-streams" else MODELS[name]
    spans = f"0:1,1:{given['num_hidden_layers']}"
    config = config_of(tmp_path, given, dtype=dtype, stream_ends=ends, spans=spans)
    held = list(tensors_of(load_model(model_options(config))))
    assert size(config, None).weight_bytes == sum(tensor.nbytes for tensor in held)
    assert any(t.ndim == 3 and t.dtype == torch.bfloat16 for t in held) == (name == "streams" and dtype == "bfloat16")


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_of_ranks_it_is_what_each_of_them_loads(name: str, world_size: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, RANKED[name], tensor_parallel=world_size)
    sizes, model = size(config, None), load_model(model_options(config))
    pool = model.make_pool(state_options(config))
    assert sizes.weight_bytes == sum(tensor.nbytes for tensor in tensors_of(model))
    assert (sizes.state.line_bytes, sizes.state.total_bytes) == (pool.bytes_per_sequence, pool.total_bytes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("context", [1, 64, 500])
def test_a_budget_holds_so_many_sequences_and_not_one_more(name: str, context: int, tmp_path: Path) -> None:
    budget = 5_000_000

    def holds(count: int) -> bool:
        config = config_of(tmp_path, MODELS[name], max_sequences=count, state_bytes=budget)
        sizes = size(config, None)
        kv = sizes.state.kv
        return sizes.fits and (kv is None or kv.num_pages >= count * -(-context // kv.page_size))

    count = size(config_of(tmp_path, MODELS[name], state_bytes=budget), context).sequences_in(budget)
    assert count > 3 and holds(count) and not holds(count + 1)


def test_what_a_budget_does_not_hold_is_told(tmp_path: Path) -> None:
    sizes = size(config_of(tmp_path, HYBRID, max_sequences=100, state_bytes=1 << 19), 64)
    assert not sizes.fits and 0 < sizes.sequences_in(1 << 19) < 100
    assert sizes.sequences_in(10) == 0


def test_a_checkpoint_is_sized_by_its_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, HYBRID, dtype="float32")
    with open_plan(model_options(config)) as plan:
        source = random_init(plan.config, plan.layers, Scope.BLOCK, 0)
        tensors = {name: source.read(name, slice(None), slice(None)) for name in source.names}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(Checkpoint, "read", None)
    sized, random = size(replace(config, model=str(tmp_path), random_init=None), 64), size(config, 64)
    assert (sized.weight_bytes, sized.sequence_bytes) == (random.weight_bytes, random.sequence_bytes)


@pytest.mark.parametrize("block", [BLOCK, None], ids=["blocks", "tensors"])
@pytest.mark.parametrize(("name", "change"), [("hybrid", dict), ("experts", dict), ("experts", apart)])
def test_weights_in_fp8_are_counted_as_they_are_kept(
    name: str, change: Callable[[dict[str, Any]], dict[str, Any]], block: tuple[int, int] | None, tmp_path: Path
) -> None:
    made = write_checkpoints(tmp_path, MODELS[name], block, change)
    config = config_of(tmp_path, MODELS[name], dtype="bfloat16")
    in_fp8, plain = (replace(config, model=str(path), random_init=None) for path in made)
    assert size(in_fp8, 64).weight_bytes < size(plain, 64).weight_bytes
    tensors = tensors_of(load_model(model_options(in_fp8)))
    assert size(in_fp8, 64).weight_bytes == sum(one.numel() * one.element_size() for one in tensors)


def test_wrong_options_are_refused_as_the_server_does(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--layers"):
        size(config_of(tmp_path, HYBRID, layers="0:9"), None)
    with pytest.raises(ValueError, match=r"--context: expected 1 \.\. 1000 tokens, .*\(--max-context\), got 1001"):
        size(config_of(tmp_path, HYBRID), 1001)


def test_the_command_prints_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    config_of(tmp_path, HYBRID)
    model = ["--random-init", str(tmp_path / "config.json"), "--dtype", "float32", "--page-size", "16"]

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["deltaline size", *model, *arguments])
        return sizing.main()

    assert run("--state-bytes", "16MiB", "--max-sequences", "10", "--context", "100") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "qwen3_5_text, block scope, spans 0:3, float32, state in float32"
    assert [line.split()[:2] for line in lines[3:5]] == [["gated_delta_net", "1"], ["attention", "2"]]
    assert lines[-3].startswith("a sequence of 100 tokens: ") and lines[-3].endswith(", 7 pages")
    assert lines[-1].startswith("--state-bytes 16777216: room for --max-sequences ")
    assert "on the host, for the local link's clients, at most: 268,435,456 bytes (256.0 MiB)" in lines
    held = "on the host, for messages and replies of link and front ends, at most: 536,870,912 bytes (512.0 MiB)"
    assert held in lines
    assert run("--front-ends", "2") == 0
    bound = "on the host, for each of 2 front ends, at most: 1,440,743,424 bytes (1.3 GiB)"
    assert bound in capsys.readouterr().out
    assert run("--state-bytes", "20KiB") == 1
    assert "too little for --max-sequences 256; room for" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    assert "usage: deltaline size [--context N] [options of deltaline-server]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host_bytes", "stored", "told"),
    [(1000, "0", "too little"), (1 << 40, "0", "room"), (1 << 40, "1TiB", "too little"), (None, "1TiB", "")],
)
def test_the_command_tells_what_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, host_bytes: int | None, stored: str, told: str
) -> None:
    monkeypatch.setattr(host, "host_bytes", lambda: host_bytes)
    path = config_of(tmp_path, HYBRID).random_init
    options = ["--device", "cpu", "--random-init", str(path), "--host-state-bytes", stored]
    monkeypatch.setattr(sys, "argv", ["deltaline size", *options])
    assert sizing.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("this host has ")]
    assert [line.partition(": ")[2] for line in lines] == ([f"{told} for this server on its CPU"] if told else [])


def test_the_command_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = config_of(tmp_path, RANKED["gated-delta-net"]).random_init
    options = ["--device", "cuda", "--random-init", str(path), "--tensor-parallel", "4"]
    monkeypatch.setattr(sys, "argv", ["deltaline size", *options])
    assert sizing.main() == 0
    out = capsys.readouterr().out
    assert "on each of 4 devices" in out and "this host has" not in out
    # 96 MiB, and three slots of 2.5 MiB for each rank.
    assert [line.split()[5:] for line in out.splitlines() if "sum through" in line] == [["132,120,576", "126.0", "MiB"]]


@pytest.mark.parametrize(("device", "ranks", "expected"), [("cuda", 2, 111 << 20), ("cuda", 1, 0), ("cpu", 2, 0)])
def test_what_peers_share_counts_for_what_a_server_takes(
    device: str, ranks: int, expected: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, RANKED["gated-delta-net"], device=device, tensor_parallel=ranks)
    sizes = size(config, None)
    others = sizes.weight_bytes + sizes.state.total_bytes
    assert (sizes.peer_bytes, sizes.total_bytes) == (expected, expected + others)


def test_the_command_is_run_with_what_the_server_is_run_with(capfd: Capture) -> None:
    assert main.main(["size", "--random-init", "x", "--contxt", "5"]) == 1
    assert capfd.readouterr().err == "deltaline: error: unrecognized arguments: --contxt 5\n"


def test_the_command_names_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "re2" else find_spec(name))
    assert main.main(["size", "--model", "x"]) == 1
    assert capsys.readouterr().err == "deltaline: error: size needs re2: pip install 'deltaline[server]'\n"


def test_other_commands_refuse_what_they_do_not_know(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["load", "--model", "x"])
    assert "unrecognized arguments: --model" in capsys.readouterr().err
