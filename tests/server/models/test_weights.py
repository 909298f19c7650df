"""What a checkpoint must hold for a served layer, and how it is shared out and packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import CONFIG, NEXT, QWEN3_5, MemoryTensors, base_weights
from rigs.layer_weights import MixerWeights, block_weights, mixer_weights
from rigs.small_models import BAMBA, EXPERTS, GRANITE, HYBRID, OLMO
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Placement
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.parts import LayerKind, MixerKind, MlpKind
from deltaline_server.models.weights import LayerLoader, expected_tensors, random_init

LINEAR = MixerKind.GATED_DELTA_NET
DENSE = LayerKind(LINEAR, MlpKind.DENSE)
CPU = torch.device("cpu")
WHOLE = Placement(CPU, torch.float32)


def load_mixer(source: MemoryTensors, config: ModelConfig, rank: int = 0, world_size: int = 1) -> MixerWeights:
    placement = Placement(CPU, torch.float32, rank, world_size)
    return mixer_weights(LayerLoader(source, config, [1], Scope.MIXER, placement), 1)


@pytest.mark.parametrize(("model_type", "scope"), [("qwen3_next", Scope.MIXER), ("qwen3_5", Scope.BLOCK)])
def test_checkpoints_as_transformers_writes_them(
    tmp_path: Path, write_checkpoint: Callable[..., Any], model_type: str, scope: Scope
) -> None:
    model = write_checkpoint(tmp_path, model_type, hidden=32, layers=2, head_dim=8, max_shard_size="20KB")
    config = ModelConfig.from_directory(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        loader = LayerLoader(checkpoint, config, range(2), scope, WHOLE)
        mixer = mixer_weights(loader, 1)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(mixer.out_proj, model.get_decoder().layers[1].linear_attn.out_proj.weight)


def renamed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.replace("model.layers.", prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["layers.", "language_model.layers.", "model.language_model.layers."])
def test_prefixes(prefix: str) -> None:
    source = MemoryTensors(renamed(base_weights(QWEN3_5).tensors, prefix))
    norm = load_mixer(source, QWEN3_5).norm
    assert torch.equal(norm, source.tensors[f"{prefix}1.linear_attn.norm.weight"])


def test_two_prefixes_are_refused() -> None:
    tensors = base_weights(QWEN3_5).tensors
    both = MemoryTensors(tensors | renamed(tensors, "layers."))
    with pytest.raises(ModelError, match=r"^layers: expected tensors named .* got \['layers\.', 'model\.layers\.'\]"):
        LayerLoader(both, QWEN3_5, [1], Scope.MIXER, WHOLE)


@pytest.mark.parametrize(
    ("names", "got"),
    [
        (("base_model.model.backbone.layers.1.norm", "lm_head", "base_model.model.b"), "none, but {2!r}, {0!r}"),
        (("lm_head",), "none, but {0!r}"),
        ((), "no tensors at all"),
    ],
    ids=["others", "another", "none"],
)
def test_a_checkpoint_without_layers_is_refused_with_what_it_has(names: tuple[str, ...], got: str) -> None:
    source = MemoryTensors({name: torch.zeros(1) for name in names})
    with pytest.raises(ModelError, match=rf"^layers: expected tensors named .*, got {got.format(*names)}$"):
        LayerLoader(source, QWEN3_5, [1], Scope.MIXER, WHOLE)


@pytest.mark.parametrize("name", sorted(expected_tensors(NEXT, DENSE, Scope.BLOCK)))
def test_a_missing_tensor_is_named(name: str) -> None:
    source = base_weights(NEXT)
    del source.tensors[f"model.layers.1.{name}"]
    with pytest.raises(ModelError, match=rf"^model\.layers\.1\.{name}: expected shape .*, found nothing$"):
        LayerLoader(source, NEXT, [0, 1], Scope.BLOCK, WHOLE)


@pytest.mark.parametrize("name", sorted(expected_tensors(QWEN3_5, DENSE, Scope.BLOCK)))
def test_a_misshapen_tensor_is_named(name: str) -> None:
    source = base_weights(QWEN3_5)
    shape = list(source.tensors[f"model.layers.1.{name}"].shape)
    source.tensors[f"model.layers.1.{name}"] = torch.zeros(shape[0] + 1, *shape[1:])
    with pytest.raises(ModelError, match=rf"^model\.layers\.1\.{name}: expected shape \[.*\], got \[{shape[0] + 1}"):
        LayerLoader(source, QWEN3_5, [0, 1], Scope.BLOCK, WHOLE)


@pytest.mark.parametrize("scope", list(Scope))
def test_an_extra_tensor_is_named(scope: Scope) -> None:
    source = base_weights(NEXT)
    source.tensors["model.layers.1.linear_attn.conv1d.bias"] = torch.zeros(3)
    with pytest.raises(ModelError, match=r"^model\.layers\.1\.linear_attn\.conv1d\.bias: expected no such tensor"):
        LayerLoader(source, NEXT, [1], scope, WHOLE)
    assert LayerLoader(source, NEXT, [0], scope, WHOLE).shapes == {0: (NEXT.shapes[LINEAR],)}


def test_a_quantised_tensor_is_named() -> None:
    source = base_weights(NEXT)
    name = "model.layers.0.linear_attn.out_proj.weight"
    source.tensors[name] = source.tensors[name].to(torch.int8)
    with pytest.raises(ModelError, match=rf"^{name}: expected dtype F32 or BF16 or F16, got I8"):
        LayerLoader(source, NEXT, [0], Scope.MIXER, WHOLE)


def test_experts_are_passed_over_in_mixer_scope(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> None:
    write_checkpoint(tmp_path, "qwen3_next", hidden=32, layers=2, head_dim=8, num_experts=2, mlp_only_layers=[0])
    config = ModelConfig.from_directory(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        dense = LayerLoader(checkpoint, config, [0], Scope.BLOCK, WHOLE)
        assert block_weights(dense, 0).gate_up.shape == (2 * 384, 32)
        mixers = LayerLoader(checkpoint, config, [0, 1], Scope.MIXER, WHOLE)
        assert mixer_weights(mixers, 1).in_proj.shape[1] == 32


def test_attention_that_is_not_as_it_is_served_is_refused_where_it_is_asked_for() -> None:
    config = ModelConfig.from_mapping(CONFIG | {"rope_parameters": {"rope_type": "yarn"}})
    why = r"rope_parameters\.factor: expected a positive number that fp32 holds, got nothing"
    with pytest.raises(
        ModelError,
        match=rf"^layer 2: expected gated_delta_net, got attention \({why}\); what can be served: --spans auto",
    ):
        LayerLoader(base_weights(config), config, [0, 2], Scope.MIXER, WHOLE)
    assert LayerLoader(base_weights(config), config, [0], Scope.MIXER, WHOLE).shapes == {0: (config.shapes[LINEAR],)}


def test_the_mlp_is_shared_out_by_its_inner_columns() -> None:
    source = base_weights(NEXT)
    whole, *ranks = (
        block_weights(LayerLoader(source, NEXT, [1], Scope.BLOCK, placement), 1)
        for placement in (WHOLE, *(Placement(CPU, torch.float32, rank, 2) for rank in (0, 1)))
    )
    halves = zip(*(rank.gate_up.chunk(2) for rank in ranks), strict=True)
    assert torch.equal(torch.cat([torch.cat(pair) for pair in halves]), whole.gate_up)
    assert torch.equal(torch.cat([rank.down for rank in ranks], dim=1), whole.down)
    assert torch.equal(whole.input_norm, 1 + source.tensors["model.layers.1.input_layernorm.weight"])


def test_packed_weights_have_the_asked_dtype_and_their_own_memory() -> None:
    source = base_weights(QWEN3_5)
    mixer = mixer_weights(LayerLoader(source, QWEN3_5, [0], Scope.MIXER, Placement(CPU, torch.bfloat16)), 0)
    assert (mixer.in_proj.dtype, mixer.conv.dtype, mixer.out_proj.dtype) == (torch.bfloat16,) * 3
    assert (mixer.A_log.dtype, mixer.dt_bias.dtype, mixer.norm.dtype) == (torch.float32,) * 3
    assert mixer.conv.shape == (4, 56)
    assert mixer.conv.is_contiguous()
    source.tensors["model.layers.0.linear_attn.A_log"].zero_()
    assert mixer.A_log.any()


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [(0, 0, "world_size: expected at least 1"), (2, 2, "rank: expected 0..1, got 2"), (-1, 1, "rank: expected")],
)
def test_a_placement_that_cannot_be_is_refused(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Placement(CPU, torch.float32, rank, world_size)


def test_ranks_must_divide_the_heads_and_the_mlp() -> None:
    with pytest.raises(ModelError, match="--tensor-parallel: expected a divisor of 2 key heads, got 3"):
        LayerLoader(base_weights(NEXT), NEXT, [0], Scope.MIXER, Placement(CPU, torch.float32, 0, 3))
    odd = ModelConfig.from_mapping(CONFIG | {"intermediate_size": 35})
    with pytest.raises(ModelError, match="--tensor-parallel: expected a divisor of intermediate_size 35, got 2"):
        LayerLoader(base_weights(odd), odd, [0], Scope.BLOCK, Placement(CPU, torch.float32, 0, 2))


@pytest.mark.parametrize("config", [NEXT, QWEN3_5], ids=["interleaved", "separate"])
def test_random_weights_are_the_same_for_every_rank_and_choice_of_layers(config: ModelConfig) -> None:
    def draw(layers: list[int], rank: int, world_size: int) -> MixerWeights:
        source = random_init(config, layers, Scope.BLOCK, seed=7)
        placement = Placement(CPU, torch.float32, rank, world_size)
        return mixer_weights(LayerLoader(source, config, layers, Scope.BLOCK, placement), 1)

    whole, part = draw([0, 1], 0, 1), draw([1], 1, 2)
    assert torch.equal(part.out_proj, whole.out_proj[:, 12:])
    assert torch.equal(part.A_log, whole.A_log[3:])


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with each expert's weights by themselves."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem, _, stack = name.rpartition(".experts.")
        if not stem:
            found[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True)) if "gate" in stack else {"down": expert}
            found |= {f"{stem}.experts.{i}.{part}_proj.weight": weight for part, weight in parts.items()}
    return found


def respelled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with convolutions in parts."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem, is_conv, _ = name.partition("conv1d.weight")
        parts = [f"{stem}{part}_conv1d.weight" for part in "qkv"] if is_conv else [name]
        found |= dict(zip(parts, tensor.tensor_split(len(parts)), strict=True))
    return found


def with_frequencies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with those of a layer's rotary embedding, as old checkpoints have them."""
    return tensors | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}


IN_MEMORY = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
IN_MEMORY |= {"router.layer.weight": "router.weight"}


def as_in_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with Granite's experts as transformers names them once they are loaded."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem, is_expert, own = name.partition("block_sparse_moe.")
        found[stem + is_expert + IN_MEMORY[own] if is_expert else name] = tensor
    return found


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (HYBRID, dict),
        (HYBRID, with_frequencies),
        (EXPERTS, dict),
        (EXPERTS, one_by_one),
        (BAMBA | {"attention_bias": True, "mlp_bias": True}, dict),
        (GRANITE, dict),
        (GRANITE, as_in_memory),
        (OLMO, dict),
        (OLMO, respelled),
        (HYBRID | {"hc_mult": 2}, dict),
    ],
)
def test_a_layer_is_stored_as_what_is_read_for_it(
    config: dict[str, Any], change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """So that all of it, and nothing else, is read ahead."""
    parsed, reads = ModelConfig.from_mapping(config), set[str]()
    drawn = random_init(parsed, range(2), Scope.BLOCK, 0)

    class Read(MemoryTensors):
        def read(self, name: str, rows: slice, columns: slice) -> Tensor:
            reads.add(name)
            return super().read(name, rows, columns)

    source = Read(change({name: drawn.read(name, slice(None), slice(None)) for name in drawn.names}))
    loader = LayerLoader(source, parsed, range(2), Scope.BLOCK, WHOLE)
    for layer in range(2):
        reads.clear()
        loader.block(layer, {})
        assert reads == set(loader.stored(layer)) != set()
