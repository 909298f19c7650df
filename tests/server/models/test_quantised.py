"""Checkpoints in FP8, served as what their weights stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import assert_close, serve
from rigs.quantised import ALL, BLOCK, Checkpoints, apart, quantise, quantise_written, write_checkpoints
from rigs.ranked_layers import adapt, play
from rigs.small_models import EXPERTS, GATED_DELTA_NET, HYBRID
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models import weights
from deltaline_server.models.model import AdapterOptions, ModelOptions, check_model, load_model, open_plan

# Blocks are cut in every module, and parts of ranks begin within blocks.
SIZES = {"hidden_size": 200, "intermediate_size": 300, "linear_num_value_heads": 10, "moe_intermediate_size": 150}
DENSE, MOE = HYBRID | SIZES, EXPERTS | SIZES
NEXT = MOE | {"model_type": "qwen3_next"}
# Two ranks share whole blocks of every projection, and of every expert.
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_attention_heads": 2,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
CPU = torch.device("cpu")
# Of fp32: sums are made in another order, and nothing else.
NEAR = 3e-6


def outputs(directory: Path, **options: Any) -> Tensor:
    """What a model computes of a prefill, drafts and decodes."""
    return play(serve(ModelOptions(CPU, model=directory, **options)), (1, 2), (1, 2))


MODELS = pytest.mark.parametrize(
    ("config", "change"),
    [(DENSE, dict), (MOE, dict), (NEXT, apart)],
    ids=["dense", "experts-stacked", "experts-apart"],
)
EXPERT_FORMS = pytest.mark.parametrize("change", [dict, apart], ids=["stacked", "apart"])
SCALES = pytest.mark.parametrize("block", [BLOCK, None], ids=["blocks", "tensors"])


@SCALES
@MODELS
def test_it_computes_what_its_weights_in_fp32_do(
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    block: tuple[int, int] | None,
) -> None:
    """The whole model, and the second of two ranks, whose outputs are summands."""
    made = write_checkpoints(tmp_path, config, block, change)
    for rank, world_size in ((0, 1), (1, 2)):
        found = outputs(made.quantised, rank=rank, world_size=world_size)
        assert_close(found, outputs(made.plain, rank=rank, world_size=world_size), NEAR)


def kept(options: ModelOptions) -> dict[int, list[tuple[int, bool]]]:
    """The rows of the pieces of each layer's projections, and whether they stay in FP8."""
    with open_plan(options) as plan:
        return {layer: [(piece.rows, piece.in_fp8) for piece in plan.loader.pieces(layer)] for layer in plan.layers}


@SCALES
def test_what_stays_in_fp8_is_multiplied_at_once(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """Where ranks share whole blocks: q, k, v and z beside b and a, which are not in FP8; q with its gate, k and v."""
    made = write_checkpoints(tmp_path, HYBRID | WHOLE_BLOCKS, block)
    mlp = [(1024, True), (256, True)]
    model = load_model(ModelOptions(CPU, model=made.quantised))
    assert model.block_sizes["fp8_sizes"] == ((1024, 256), (256, 256), (256, 512))
    assert kept(ModelOptions(CPU, model=made.quantised)) == {
        0: [(1024, True), (4, False), (256, True), *mlp],
        1: [(1024, True), (256, True), *mlp],
    }
    halves = {
        0: [(512, True), (2, False), (256, True), (512, True), (256, True)],
        1: [(512, True), (256, True), (512, True), (256, True)],
    }
    for rank in range(2):
        options = ModelOptions(CPU, model=made.quantised, rank=rank, world_size=2)
        assert kept(options) == halves
        found = outputs(made.quantised, rank=rank, world_size=2)
        assert_close(found, outputs(made.plain, rank=rank, world_size=2), NEAR)


def test_where_a_rank_s_share_cuts_a_block_no_rank_keeps_it(tmp_path: Path) -> None:
    """Halves of the MLP's 384 channels begin within a block; those of other projections don't."""
    made = write_checkpoints(tmp_path, HYBRID | WHOLE_BLOCKS | {"intermediate_size": 384}, BLOCK)
    for rank in range(2):
        found = kept(ModelOptions(CPU, model=made.quantised, rank=rank, world_size=2))
        assert found[1] == [(512, True), (256, True), (384, False), (256, False)]


def experts_in_fp8(directory: Path, rank: int = 0, world_size: int = 1) -> list[bool]:
    """Of each layer."""
    with open_plan(ModelOptions(CPU, model=directory, rank=rank, world_size=world_size)) as plan:
        return [plan.loader.experts_in_fp8(layer) for layer in plan.layers]


@SCALES
@EXPERT_FORMS
def test_experts_stay_in_fp8_where_ranks_share_whole_blocks(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], block: tuple[int, int] | None
) -> None:
    """The shared one is two of their size."""
    config = EXPERTS | WHOLE_BLOCKS | {"shared_expert_intermediate_size": 512}
    made = write_checkpoints(tmp_path, config, block, change)
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        assert experts_in_fp8(made.quantised, rank, world_size) == [True, True]
        found = outputs(made.quantised, rank=rank, world_size=world_size)
        assert_close(found, outputs(made.plain, rank=rank, world_size=world_size), NEAR)
    assert load_model(ModelOptions(CPU, model=made.quantised)).block_sizes["experts_in_fp8"] == (True,)


@pytest.mark.parametrize(
    ("change", "world_size", "expected"),
    [(dict, 1, False), (apart, 1, True), (apart, 2, False)],
    ids=["stacked", "apart", "apart-shared"],
)
def test_experts_of_whom_a_block_is_cut_are_dequantised(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], world_size: int, expected: bool
) -> None:
    """Up begins within a block where both are stacked, and a rank's channels do; a weight's end may be within one."""
    made = write_checkpoints(tmp_path, MOE, BLOCK, change)
    for rank in range(world_size):
        assert experts_in_fp8(made.quantised, rank, world_size) == [expected, expected]


def test_experts_are_dequantised_beside_a_shared_one_that_is_not_in_fp8(tmp_path: Path) -> None:
    """They are multiplied by one kernel; other layers, and what is beside them, stay in FP8."""
    made = write_checkpoints(tmp_path, EXPERTS | WHOLE_BLOCKS, BLOCK, apart)
    file, plain = made.quantised / "model.safetensors", load_file(made.plain / "model.safetensors")
    name = "model.layers.1.mlp.shared_expert.up_proj.weight"
    stored = load_file(file) | {name: plain[name]}
    del stored[f"{name}_scale_inv"]
    save_file(stored, file)
    assert experts_in_fp8(made.quantised) == [True, False]
    assert_close(outputs(made.quantised), outputs(made.plain), NEAR)
    sizes = load_model(ModelOptions(CPU, model=made.quantised)).block_sizes
    assert sizes["experts_in_fp8"] == (False, True)


def test_a_device_that_knows_no_fp8_is_given_what_weights_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_checkpoints(tmp_path, EXPERTS | WHOLE_BLOCKS, BLOCK, apart)
    monkeypatch.setattr(weights, "can_multiply_fp8", lambda device: False)
    assert experts_in_fp8(made.quantised) == [False, False]
    assert not any(in_fp8 for pieces in kept(ModelOptions(CPU, model=made.quantised)).values() for _, in_fp8 in pieces)
    assert torch.equal(outputs(made.quantised), outputs(made.plain))
    config = json.loads((made.quantised / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = ModelOptions(CPU, random_init=tmp_path / "config.json")
    rounded = play(serve(drawn), (1, 2), (1, 2))
    monkeypatch.undo()
    assert_close(play(serve(drawn), (1, 2), (1, 2)), rounded, NEAR)


def test_modules_whose_rows_end_within_a_block_are_multiplied_by_themselves(tmp_path: Path) -> None:
    made = write_checkpoints(tmp_path, DENSE, BLOCK)
    assert kept(ModelOptions(CPU, model=made.quantised))[1][:4] == [(192, True), (32, True), (32, True), (200, True)]


@pytest.fixture
def dense(tmp_path: Path) -> Checkpoints:
    return write_checkpoints(tmp_path, GATED_DELTA_NET | {"hidden_size": 200}, BLOCK)


def test_it_computes_in_the_model_s_dtype(dense: Checkpoints) -> None:
    """Nearer to what fp32 makes than weights that are rounded to that dtype."""
    exact = outputs(dense.plain)
    rounded, found = (outputs(directory, dtype=torch.bfloat16) for directory in (dense.plain, dense.quantised))
    assert found.dtype == torch.bfloat16
    assert_close(found, exact, float((rounded.float() - exact).norm() / exact.norm()))


def test_adapters_are_of_the_rows_that_are_meant(dense: Checkpoints) -> None:
    def adapted(directory: Path) -> Tensor:
        options = ModelOptions(CPU, model=directory, adapters=AdapterOptions(1, 8))
        served = serve(options)
        adapt(served.model, options)
        return play(served, (1, 2), (1, 2), (0, -1))

    assert_close(adapted(dense.quantised), adapted(dense.plain), NEAR)


def test_weights_and_scales_are_in_the_fingerprint(dense: Checkpoints) -> None:
    def fingerprint(**options: Any) -> bytes:
        options = {"model": dense.quantised} | options
        return load_model(ModelOptions(CPU, **options)).fingerprint(torch.float32, 1)

    first, file = fingerprint(), dense.quantised / "model.safetensors"
    assert {fingerprint(rank=rank, world_size=2) for rank in range(2)} == {first} != {fingerprint(model=dense.plain)}
    stored = load_file(file)
    for name in ("linear_attn.out_proj.weight", "linear_attn.out_proj.weight_scale_inv"):
        changed = stored[f"model.layers.1.{name}"].clone()
        changed.view(torch.uint8)[-1, -1] ^= 1
        save_file(stored | {f"model.layers.1.{name}": changed}, file)
        assert fingerprint() != first
    save_file(stored, file)
    assert fingerprint() == first


def test_what_is_read_ahead_is_all_that_it_is_loaded_of(tmp_path: Path) -> None:
    made = write_checkpoints(tmp_path, NEXT, None, apart)
    with open_plan(ModelOptions(CPU, model=made.quantised), hashes=True) as plan:
        for layer, names in plan.stored().items():
            plan.loader.block(layer, {})
            assert plan.hashed is not None
            read = {str(name) for name, *_ in plan.hashed.identity()}
            assert {name for name in read if f"layers.{layer}." in name} == set(names)
            assert any(name.endswith("_scale") for name in names)
            assert not any(name.endswith("input_scale") for name in names)


def written(folder: Path, changes: dict[str, Tensor | None]) -> ModelOptions:
    """Options of a checkpoint of which some tensors are others, or gone."""
    made = write_checkpoints(folder, DENSE, BLOCK).quantised
    tensors = load_file(made / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, made / "model.safetensors")
    return ModelOptions(CPU, model=made)


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"{DOWN}_scale_inv": None}, f"{DOWN}_scale_inv: expected the scales of a weight of dtype F8_E4M3, found"),
        ({f"{DOWN}_scale_inv": torch.ones(3, 2)}, f"{DOWN}_scale_inv: expected shape [2, 3] of a weight [200, 300]"),
        ({f"{DOWN}_scale_2": torch.ones(1)}, f"{DOWN}_scale_2: expected no such tensor in a served layer, found one"),
        ({"model.layers.0.mlp.x_scale_inv": torch.ones(1)}, "model.layers.0.mlp.x_scale_inv: expected no such tensor"),
        ({DOWN: None}, f"{DOWN}: expected shape [200, 300], found nothing"),
    ],
)
def test_a_checkpoint_that_lies_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Tensor | None], expected: str
) -> None:
    options = written(tmp_path, changes)
    with pytest.raises(ModelError) as refused:
        check_model(options)
    assert str(refused.value).startswith(expected)


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    options = written(tmp_path, {})
    assert options.model is not None
    path = options.model / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["weight_block_size"] = [64, 64]
    path.write_text(json.dumps(raw))
    with pytest.raises(
        ModelError, match=r"_scale_inv: expected shape .* \(\[64, 64\], the weight_block_size\), got \["
    ):
        check_model(options)


@EXPERT_FORMS
def test_blocks_need_not_be_said(tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    made = write_checkpoints(tmp_path, MOE, BLOCK, change)
    path = made.quantised / "config.json"
    raw = json.loads(path.read_text())
    del raw["quantization_config"]["weight_block_size"]
    path.write_text(json.dumps(raw))
    assert_close(outputs(made.quantised), outputs(made.plain), NEAR)


def test_scales_are_refused_whose_values_the_model_s_dtype_does_not_hold(tmp_path: Path) -> None:
    made = write_checkpoints(tmp_path, HYBRID | WHOLE_BLOCKS, BLOCK)
    [file] = made.quantised.glob("*.safetensors")
    tensors = load_file(file)
    name = next(one for one in tensors if one.endswith("mlp.down_proj.weight"))
    tensors[f"{name}_scale_inv"][0, 0] = 300.0
    save_file(tensors, file)
    load_model(ModelOptions(CPU, dtype=torch.bfloat16, model=made.quantised))
    words = f"{name}_scale_inv: expected positive numbers that times 448 are finite in float16, got others"
    for world_size in (1, 2):
        with pytest.raises(ModelError, match=f"^{re.escape(words)}$"):
            load_model(ModelOptions(CPU, dtype=torch.float16, model=made.quantised, world_size=world_size))


def test_a_weight_that_holds_no_number_is_refused_by_name(tmp_path: Path) -> None:
    made = write_checkpoints(tmp_path, DENSE | WHOLE_BLOCKS, BLOCK)
    [file] = made.quantised.glob("*.safetensors")
    tensors = load_file(file)
    name = next(one for one in tensors if one.endswith("mlp.down_proj.weight"))
    tensors[name].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"^{re.escape(name)}: expected numbers, got NaN$"):
        load_model(ModelOptions(CPU, model=made.quantised))


def test_weights_in_fp8_are_refused_where_the_config_tells_of_none(tmp_path: Path) -> None:
    options = written(tmp_path, {})
    assert options.model is not None
    raw = json.loads((options.model / "config.json").read_text())
    del raw["quantization_config"]
    (options.model / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"_scale_inv: expected no such tensor in a served layer, found one"):
        check_model(options)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_transformers_makes_the_same_weights_of_it(
    tmp_path: Path, write_checkpoint: Callable[..., Any], model_type: str
) -> None:
    """Of sizes that blocks divide, as it takes no others."""
    import transformers  # large, and absent where only the other tests run

    sizes = {"layers": 1, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4}
    write_checkpoint(tmp_path, model_type, **sizes)
    quantise_written(tmp_path, tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    ).state_dict()
    with open_plan(ModelOptions(CPU, model=tmp_path)) as plan:
        [source] = plan.between
        [names] = plan.stored().values()
        ours = {name: source.read(name, ALL, ALL) for name in names if not name.endswith("_scale_inv")}
    num_quantised = sum(name.endswith("_scale_inv") for name in names)
    assert num_quantised >= (4 * 3 if "moe" in model_type else 3)
    for i in range(4 if "moe" in model_type else 0):
        experts = "model.layers.0.mlp.experts."
        parts = [ours.pop(f"{experts}{i}.{part}_proj.weight") for part in ("gate", "up", "down")]
        assert torch.equal(theirs[f"{experts}gate_up_proj"][i], torch.cat(parts[:2]))
        assert torch.equal(theirs[f"{experts}down_proj"][i], parts[2])
    assert len(ours) > 8
    for name, weight in ours.items():
        assert torch.equal(theirs[name], weight), name


def test_stacked_experts_are_what_transformers_makes_of_them() -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    theirs = module.Fp8Dequantize(None)
    made = quantise(torch.randn(3, 256, 128), BLOCK)
    found = theirs.convert({"weight$": made.stored, "weight_scale_inv": made.scales})["weight"]
    assert torch.equal(found, made.meant)
