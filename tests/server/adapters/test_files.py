"""Adapters become what they do to the served layers; what belongs nowhere is refused by name."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_bad import content_of, entry
from rigs.adapter_cases import (
    CONFIG,
    NEXT,
    PREFIX,
    QWEN3_5,
    MemoryTensors,
    adapter_config,
    adapter_tensors,
    base_weights,
    merge_into,
    modules,
    plan_adapter,
    poisoned,
    with_magnitudes,
)
from rigs.layer_weights import block_weights, mixer_weights
from safetensors.torch import save
from torch import Tensor

from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Packed, Placement
from deltaline_server.checkpoints.tensor_file import DescriptorBytes, TensorFile
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_weights import Adapter
from deltaline_server.models.weights import LayerLoader

CPU = torch.device("cpu")
WHOLE = Placement(CPU, torch.float32)
# Of a layer with one mixer and a dense MLP.
PROJECTIONS = Packed.IN_PROJ, Packed.OUT_PROJ, Packed.GATE_UP, Packed.DOWN
CONFIGS = pytest.mark.parametrize("config", [NEXT, QWEN3_5], ids=["interleaved", "separate"])


def plan(
    config: ModelConfig,
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    scope: Scope = Scope.BLOCK,
    placement: Placement = WHOLE,
    layers: tuple[int, ...] = (0, 1),
) -> AdapterPlan:
    return plan_adapter(AdapterLayout(config, scope, layers, placement), raw, tensors)


def load(
    config: ModelConfig, raw: dict[str, Any], tensors: dict[str, Tensor], base: MemoryTensors, **options: Any
) -> Adapter:
    made = plan(config, raw, tensors, **options)
    placement, scope = options.get("placement", WHOLE), options.get("scope", Scope.BLOCK)
    return made.load(LayerLoader(base, config, [0, 1], scope, placement), poisoned)


def merged(base: MemoryTensors, tensors: dict[str, Tensor], scales: dict[str, float]) -> MemoryTensors:
    """The checkpoint with the adapter's changes in its weights, computed in fp64; scales by the end of the name."""
    changed = {name: tensor.double() for name, tensor in base.tensors.items()}
    for name, b in tensors.items():
        if name.endswith(".lora_B.weight"):
            stem = name.removesuffix(".lora_B.weight")
            weight = stem.removeprefix(PREFIX) + ".weight"
            scale = next(scale for end, scale in scales.items() if stem.endswith(end))
            changed[weight] += scale * b.double() @ tensors[f"{stem}.lora_A.weight"].double()
            magnitude = tensors.get(f"{stem}.lora_magnitude_vector")
            if magnitude is not None:
                changed[weight] *= (magnitude.double() / changed[weight].norm(dim=1))[:, None]
    return MemoryTensors(changed)


def check_served_as_merged(
    adapter: Adapter, config: ModelConfig, base: MemoryTensors, expected: MemoryTensors, placement: Placement = WHOLE
) -> None:
    """Every served projection with the adapter's changes is what the merged checkpoint makes of it."""
    exact = Placement(CPU, torch.float64, placement.rank, placement.world_size)
    before = LayerLoader(base, config, [0, 1], Scope.BLOCK, exact)
    after = LayerLoader(expected, config, [0, 1], Scope.BLOCK, exact)
    for layer in (0, 1):
        ours = projections(before, config, layer)
        for one in adapter.weights:
            if one.layer == layer:
                merge_into(ours[one.packed], one)
        theirs = projections(after, config, layer)
        for packed, weight in ours.items():
            torch.testing.assert_close(weight, theirs[packed], rtol=1e-5, atol=1e-5)


def projections(loader: LayerLoader, config: ModelConfig, layer: int) -> dict[Packed, Tensor]:
    mixer, block = mixer_weights(loader, layer), block_weights(loader, layer)
    return dict(zip(PROJECTIONS, (mixer.in_proj, mixer.out_proj, block.gate_up, block.down), strict=True))


@CONFIGS
@pytest.mark.parametrize("is_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_an_adapter_does_is_what_merging_it_does(config: ModelConfig, is_dora: bool, world_size: int) -> None:
    base = base_weights(config)
    tensors = adapter_tensors(base, modules(config))
    tensors = with_magnitudes(tensors) if is_dora else tensors
    for rank in range(world_size):
        placement = Placement(CPU, torch.float32, rank, world_size)
        adapter = load(config, adapter_config(use_dora=is_dora), tensors, base, placement=placement)
        assert len(adapter.weights) == 2 * len(PROJECTIONS)
        check_served_as_merged(adapter, config, base, merged(base, tensors, {"": 2.0}), placement)


def test_ranks_and_scales_by_pattern_and_rank_stabilisation() -> None:
    base = base_weights(NEXT)
    tensors = adapter_tensors(base, modules(NEXT), ranks={"mlp.down_proj": 4, "linear_attn.out_proj": 1})
    raw = adapter_config(
        use_rslora=True, rank_pattern={"down_proj": 4, r".*\.linear_attn\.out_.*": 1}, alpha_pattern={"down_proj": 5.0}
    )
    adapter = load(NEXT, raw, tensors, base)
    scales = {"mlp.down_proj": 2.5, "linear_attn.out_proj": 6.0, "": 6 / 3**0.5}
    check_served_as_merged(adapter, NEXT, base, merged(base, tensors, scales))
    assert adapter.rank == 4
    ranks = {(one.layer, one.packed): one.ranks.tolist() for one in adapter.weights}
    for layer in (0, 1):
        assert ranks[layer, Packed.OUT_PROJ] == [1] and ranks[layer, Packed.DOWN] == [4]
        assert ranks[layer, Packed.IN_PROJ] == ranks[layer, Packed.GATE_UP] == [3, 3]


@CONFIGS
def test_projections_that_an_adapter_leaves_alone_have_no_weights(config: ModelConfig) -> None:
    base = base_weights(config)
    last = modules(config)[1]
    tensors = adapter_tensors(base, [last], range(1, 2))
    raw = adapter_config(target_modules=[last.rpartition(".")[2]], layers_to_transform=[1])
    adapter = load(config, raw, tensors, base)
    assert [(one.layer, one.packed) for one in adapter.weights] == [(1, Packed.IN_PROJ)]
    check_served_as_merged(adapter, config, base, merged(base, tensors, {"": 2.0}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_have_the_models_dtype_and_lie_in_the_memory_given(dtype: torch.dtype) -> None:
    base = base_weights(QWEN3_5)
    tensors = {name: tensor.bfloat16() for name, tensor in adapter_tensors(base, modules(QWEN3_5)).items()}
    made = plan(QWEN3_5, adapter_config(), tensors, placement=Placement(CPU, dtype))
    adapter = made.load(None, poisoned)
    assert adapter.num_bytes == made.num_bytes == adapter.memory.numel()
    begin = adapter.memory.data_ptr()
    for one in adapter.weights:
        assert {tensor.dtype for tensor in (*one.a, one.b)} == {dtype}
        for tensor in (*one.a, one.b, one.ranks, one.scales):
            assert (tensor.data_ptr() - begin) % 64 == 0 and tensor.is_contiguous()
            assert begin <= tensor.data_ptr() < begin + adapter.num_bytes
    name = f"{PREFIX}model.layers.0.mlp.down_proj.lora_A.weight"
    [down] = [one for one in adapter.weights if (one.layer, one.packed) == (0, Packed.DOWN)]
    assert torch.equal(down.a[0], tensors[name].to(dtype))


def test_modules_that_are_not_served_are_passed_over_and_counted() -> None:
    base = base_weights(NEXT)
    tensors = adapter_tensors(base, modules(NEXT))
    for name, rows, columns in (("q_proj", 2 * 4096, 24), ("o_proj", 24, 4096)):
        tensors[f"{PREFIX}model.layers.2.self_attn.{name}.lora_A.weight"] = torch.randn(3, columns)
        tensors[f"{PREFIX}model.layers.2.self_attn.{name}.lora_B.weight"] = torch.randn(rows, 3)
    adapter = load(NEXT, adapter_config(), tensors, base)
    assert (len(adapter.weights), adapter.num_elsewhere) == (8, 2)
    mixer_only = load(NEXT, adapter_config(), tensors, base, scope=Scope.MIXER, layers=(1,))
    assert (len(mixer_only.weights), mixer_only.num_elsewhere) == (2, 11)
    assert mixer_only.content_hash == adapter.content_hash


def test_experts_are_passed_over_where_they_are_not_served() -> None:
    config = ModelConfig.from_mapping(CONFIG | {"num_experts": 8})
    tensors = with_magnitudes(adapter_tensors(base_weights(NEXT), modules(NEXT)[:3]))
    stem = f"{PREFIX}model.layers.0.mlp.experts.3.up_proj."
    expert = {"lora_A.weight": (3, 24), "lora_B.weight": (9, 3), "lora_magnitude_vector": (9,)}
    tensors |= {stem + part: torch.randn(shape) for part, shape in expert.items()}
    made = plan(config, adapter_config(use_dora=True), tensors, scope=Scope.MIXER)
    assert made.load(LayerLoader(base_weights(NEXT), config, [0, 1], Scope.MIXER, WHOLE), poisoned).num_elsewhere == 1
    with pytest.raises(ModelError, match=r"lora_magnitude_vector': expected shape \[9\], got \[8\]"):
        plan(
            config,
            adapter_config(use_dora=True),
            tensors | {stem + "lora_magnitude_vector": torch.randn(8)},
            Scope.MIXER,
        )


def test_what_is_passed_over_is_not_held_in_memory(tmp_path: Path) -> None:
    tensors = adapter_tensors(base_weights(NEXT), modules(NEXT))
    small = save(tensors)
    length = int.from_bytes(small[:8], "little")
    header, data = json.loads(small[8 : 8 + length]), small[8 + length :]
    stem, columns = f"{PREFIX}model.layers.2.self_attn.q_proj", 1 << 22
    begin, end = len(data), len(data) + 3 * columns * 4
    header[f"{stem}.lora_A.weight"] = entry([3, columns], begin, end)
    header[f"{stem}.lora_B.weight"] = entry([1, 3], end, end + 12)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(content_of(header, data))
    os.truncate(path, path.stat().st_size + end + 12 - begin)  # sparse: takes no space
    # Of attention that is not as it is served no config tells the sizes.
    config = ModelConfig.from_mapping(CONFIG | {"rope_parameters": {"rope_type": "yarn"}})
    with path.open("rb") as opened:
        file = TensorFile(DescriptorBytes(opened.fileno(), path.name))
        made = AdapterPlan(AdapterConfig(adapter_config()), file, AdapterLayout(config, Scope.BLOCK, (0, 1), WHOLE))
        tracemalloc.start()
        assert made.load(None, poisoned).content_hash == made.content_hash()
        assert tracemalloc.get_traced_memory()[1] < (end - begin) // 2
        tracemalloc.stop()


def test_what_a_model_has_beside_its_layers_is_passed_over_and_a_part_of_the_hash() -> None:
    config = ModelConfig.from_mapping({"model_type": "qwen3_5", "text_config": CONFIG | {"model_type": "qwen3_5_text"}})
    base = base_weights(QWEN3_5)
    tensors = adapter_tensors(base, modules(QWEN3_5))
    plain = load(config, adapter_config(), tensors, base)
    stem = f"{PREFIX}model.visual.blocks.0.attn.qkv"
    seeing = tensors | {f"{stem}.lora_A.weight": torch.randn(3, 50), f"{stem}.lora_B.weight": torch.randn(70, 3)}
    adapter = load(config, adapter_config(), seeing, base)
    assert (plain.num_elsewhere, adapter.num_elsewhere, len(adapter.weights)) == (0, 1, len(plain.weights))
    assert adapter.content_hash != plain.content_hash
    with pytest.raises(ModelError, match=r"model\.visual\.blocks.*found no such module"):
        plan(QWEN3_5, adapter_config(), seeing)


@pytest.mark.parametrize("module", ["gate", "experts.0.up_proj", "shared_expert.up_proj", "shared_expert_gate"])
def test_experts_take_no_adapters(module: str) -> None:
    """Beside them mixers do; and where experts are the orchestrator's, so are their adapters."""
    config = ModelConfig.from_mapping(CONFIG | {"num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": [0]})
    base = base_weights(NEXT)
    tensors = {name: tensor for name, tensor in adapter_tensors(base, modules(NEXT)).items() if "1.mlp." not in name}
    raw = adapter_config(target_modules=r".*0\.mlp\..*|.*linear_attn\..*proj.*|.*1\.mlp\." + module.replace(".", r"\."))
    assert plan(config, raw, tensors).num_bytes > 0
    stem = f"{STEM}mlp.{module}"
    more = tensors | {stem + A: torch.randn(3, 24), stem + B: torch.randn(4, 3)}
    with pytest.raises(ModelError, match=r"1\.mlp\..*: expected no tensor of a mixture of experts"):
        plan(config, raw, more)
    mixers = {name: tensor for name, tensor in more.items() if "0.mlp." not in name}
    assert plan(config, raw, mixers, Scope.MIXER).num_bytes > 0


STEM = f"{PREFIX}model.layers.1."
A, B = ".lora_A.weight", ".lora_B.weight"
BAD_NAMES = {
    "no such module": STEM + "linear_attn.in_proj_qkv" + A,
    "a module that is not linear": STEM + "linear_attn.conv1d" + A,
    "no such layer": f"{PREFIX}model.layers.3.mlp.up_proj{A}",
    "no number": f"{PREFIX}model.layers.one.mlp.up_proj{A}",
    "a number with zeros": f"{PREFIX}model.layers.01.mlp.up_proj{A}",
    "a huge number": f"{PREFIX}model.layers.{'9' * 100}.mlp.up_proj{A}",
    "attention in a layer that has none": STEM + "self_attn.q_proj" + A,
    "a mixer in a layer that has another": f"{PREFIX}model.layers.2.linear_attn.out_proj{A}",
    "an embedding": f"{PREFIX}model.embed_tokens.lora_embedding_A",
    "vision in a model that has none": f"{PREFIX}model.visual.blocks.0.attn.proj{A}",
    "the head": f"{PREFIX}lm_head{A}",
    "a base weight": STEM + "mlp.up_proj.base_layer.weight",
    "a bias": STEM + "mlp.up_proj.lora_B.bias",
    "no prefix": f"model.layers.1.mlp.up_proj{A}",
    "a module to save": STEM + "input_layernorm.weight",
    "another adapter's name": STEM + "mlp.up_proj.lora_A.default.weight",
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_a_tensor_that_matches_nothing_is_refused_by_name(case: str) -> None:
    base = base_weights(NEXT)
    tensors = adapter_tensors(base, modules(NEXT)) | {BAD_NAMES[case]: torch.randn(3, 24)}
    with pytest.raises(ModelError, match="expected a tensor of a linear module") as error:
        plan(NEXT, adapter_config(), tensors)
    assert BAD_NAMES[case][:40] in str(error.value)


UP = STEM + "mlp.up_proj."
# What is missing of an adapter, the changes of its config, and what is refused.
INCOMPLETE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a module left out": ("no tensor", {"exclude_modules": ["up_proj"]}, r"up_proj\.lora_A.*target_modules leaves out"),
    "no A": (UP + "lora_A", {}, r"^model\.layers\.1\.mlp\.up_proj\.lora_A\.weight: expected a tensor, found nothing$"),
    "no B": (UP + "lora_B", {}, r"^model\.layers\.1\.mlp\.up_proj\.lora_B\.weight: expected a tensor, found nothing$"),
    "no magnitude": (
        UP + "lora_mag",
        {},
        r"^model\.layers\.1\.mlp\.up_proj\.lora_magnitude_vector: expected a tensor, fo",
    ),
    "no tensors": (UP, {}, r"^model\.layers\.1\.mlp\.up_proj: expected tensors, as target_modules names"),
    "no DoRA": ("no tensor", {"use_dora": False}, r"lora_magnitude_vector: expected none, as use_dora is off"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_tensors_that_the_config_does_not_ask_for_or_that_are_missing_are_named(case: str) -> None:
    missing, changes, message = INCOMPLETE[case]
    tensors = with_magnitudes(adapter_tensors(base_weights(NEXT), modules(NEXT)))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(missing)}
    with pytest.raises(ModelError, match=message):
        plan(NEXT, adapter_config(**{"use_dora": True} | changes), tensors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear_attn.in_proj_qkvz.lora_A.weight", (24, 3)),
        ("linear_attn.in_proj_qkvz.lora_A.weight", (4, 24)),
        ("linear_attn.in_proj_qkvz.lora_B.weight", (3, 80)),
        ("linear_attn.in_proj_ba.lora_B.weight", (13, 3)),
        ("linear_attn.out_proj.lora_A.weight", (3, 25)),
        ("linear_attn.out_proj.lora_A.weight", (72,)),
        ("mlp.down_proj.lora_magnitude_vector", (25,)),
        ("mlp.down_proj.lora_magnitude_vector", (24, 1)),
    ],
)
def test_a_misshapen_tensor_is_named(name: str, shape: tuple[int, ...]) -> None:
    tensors = with_magnitudes(adapter_tensors(base_weights(NEXT), modules(NEXT)))
    tensors[STEM + name] = torch.randn(shape)
    with pytest.raises(ModelError, match=rf"{name}': expected shape \[.*\], got \[{shape[0]}"):
        plan(NEXT, adapter_config(use_dora=True), tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e6])
def test_values_that_are_not_finite_in_the_models_dtype_are_named(value: float) -> None:
    tensors = adapter_tensors(base_weights(NEXT), modules(NEXT))
    tensors[STEM + "mlp.up_proj.lora_B.weight"][5, 1] = value
    made = plan(NEXT, adapter_config(), tensors, placement=Placement(CPU, torch.float16))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight': expected finite values"):
        made.load(None, poisoned)


def test_a_direction_of_length_zero_is_named() -> None:
    base = base_weights(NEXT)
    tensors = with_magnitudes(adapter_tensors(base, modules(NEXT)))
    base.tensors["model.layers.1.mlp.up_proj.weight"][3] = 0
    tensors[STEM + "mlp.up_proj.lora_B.weight"][3] = 0
    with pytest.raises(ModelError, match=r"up_proj\.lora_magnitude_vector': expected finite values"):
        load(NEXT, adapter_config(use_dora=True), tensors, base)


def test_two_prefixes_are_refused() -> None:
    tensors = adapter_tensors(base_weights(NEXT), modules(NEXT))
    other = {name.replace("model.layers.", "layers."): tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ModelError, match=r"expected layers named (model\.)?layers\.N, as others are"):
        plan(NEXT, adapter_config(), tensors | {key: other[key] for key in list(other)[:1]})


def test_an_adapter_of_other_layers_is_refused() -> None:
    tensors = adapter_tensors(base_weights(NEXT), modules(NEXT), range(1))
    with pytest.raises(ModelError, match="expected tensors of at least one served layer"):
        plan(NEXT, adapter_config(target_modules=modules(NEXT), layers_to_transform=0), tensors, layers=(1,))


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(ModelError, match="at least one served layer"):
        plan(NEXT, adapter_config(target_modules=[]), {})


def test_the_hash_is_of_what_the_adapter_does() -> None:
    base = base_weights(NEXT)
    tensors = adapter_tensors(base, modules(NEXT))

    def content_hash(raw: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
        return load(NEXT, raw, tensors, base).content_hash

    same = content_hash(adapter_config(), tensors)
    assert len(same) == 32
    assert content_hash(adapter_config(), dict(reversed(tensors.items()))) == same
    assert content_hash(adapter_config(lora_dropout=0.5, revision="x", target_modules=modules(NEXT)), tensors) == same
    assert content_hash(adapter_config(lora_alpha=1, alpha_pattern={".*": 6}), tensors) == same
    bare = {name.replace("model.model.", "model."): tensor for name, tensor in tensors.items()}
    assert content_hash(adapter_config(), bare) == same
    name = STEM + "mlp.up_proj.lora_B.weight"
    nudged = tensors[name].clone()
    nudged[5, 1] += 1e-5
    others = [
        content_hash(adapter_config(lora_alpha=5), tensors),
        content_hash(adapter_config(use_rslora=True), tensors),
        content_hash(adapter_config(alpha_pattern={"up_proj": 5}), tensors),
        content_hash(adapter_config(), tensors | {name: nudged}),
        content_hash(adapter_config(use_dora=True), with_magnitudes(tensors)),
    ]
    assert len({same, *others}) == len(others) + 1


def test_the_hash_tells_modules_with_the_same_bytes_apart() -> None:
    base = base_weights(NEXT)
    raw = adapter_config(target_modules=["gate_proj"]), adapter_config(target_modules=["up_proj"])
    gate = adapter_tensors(base, ["mlp.gate_proj"])
    up = {name.replace("gate_proj", "up_proj"): tensor for name, tensor in gate.items()}
    assert load(NEXT, raw[0], gate, base).content_hash != load(NEXT, raw[1], up, base).content_hash
