"""Latent attention mixers against those of transformers with the same weights, with and without rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, PAGE_SIZE, assert_close
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.checkpoints.checkpoint import TensorInfo
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Placement
from deltaline_server.layers.kv_cache import KvState, kept_values
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.mixers.latent_attention import NAME, HeadProjections, LatentAttentionFamily
from deltaline_server.layers.state_pool import StateOptions, StatePool

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN, THETA, EPS = 48, 50.0, 1e-6
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10}
SHAPE = LatentShape(4, 20, 6, 12, 10, query_rank=0, max_positions=100)


@dataclass(frozen=True)
class Tensors:
    """The tensors of one layer, as a checkpoint has them."""

    tensors: Mapping[str, Tensor]

    @property
    def names(self) -> Iterable[str]:
        return self.tensors

    def info(self, name: str) -> TensorInfo:
        return TensorInfo("", tuple(self.tensors[name].shape), "F32")

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        tensor = self.tensors[name]
        return tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]


@dataclass(frozen=True)
class Case:
    """A mixer of transformers, in fp32, and the family and the checkpoint that serve it. rotary: None without."""

    module: Any
    rotary: Any
    family: LatentAttentionFamily
    source: Tensors

    def run(self, hidden: Tensor) -> Tensor:
        """What transformers makes of a whole sequence."""
        mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        angles = {} if self.rotary is None else {"position_embeddings": self.rotary(hidden[None], _positions(hidden))}
        made: Tensor = self.module(hidden[None], attention_mask=mask, **angles)[0]
        return made[0]

    def mixer(self, device: str, rank: int = 0, world_size: int = 1) -> Any:
        place = Placement(torch.device(device), torch.float32, rank, world_size)
        return self.family.mixer(LayerReader(self.source, "", self.family.modules, place), {})


def _positions(hidden: Tensor) -> Tensor:
    return torch.arange(len(hidden))[None]


@pytest.fixture(params=["plain", "low rank", "rotary", "rotary, low rank", "nothing behind"])
def case(request: pytest.FixtureRequest) -> Case:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is compared with")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as rotating
    from transformers.models.kimi_linear import modeling_kimi_linear as plain

    rank = 14 if "low rank" in request.param else None
    shape = LatentShape(4, 20, 6, 12, 10, query_rank=rank or 0, max_positions=100)
    rotary = None
    if "rotary" in request.param:
        config = transformers.DeepseekV3Config(
            **SIZES,
            q_lora_rank=rank,
            rope_interleave=False,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            attn_implementation="eager",
        )
        module, rotary = rotating.DeepseekV3Attention(config, 0), rotating.DeepseekV3RotaryEmbedding(config)
        shape = LatentShape(4, 20, 6, 12, 10, rank or 0, max_positions=100, rotary_dim=6, rope_theta=THETA)
    else:
        changes = {"qk_rope_head_dim": 0} if request.param == "nothing behind" else {}
        config = transformers.KimiLinearConfig(**SIZES | changes, q_lora_rank=rank, attn_implementation="eager")
        module = plain.KimiLinearAttention(config, 0)
        if changes:
            shape = LatentShape(4, 20, 0, 12, 10, query_rank=0, max_positions=100)
    for name, parameter in module.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + ("norm" in name))
    stored = {NAME + name: tensor for name, tensor in module.state_dict().items()}
    return Case(module.eval(), rotary, LatentAttentionFamily(shape, HIDDEN, EPS), Tensors(stored))


class Line:
    """The pages of one sequence, poisoned where nothing was written."""

    def __init__(self, mixer: Any, shape: LatentShape, device: str) -> None:
        pool = StatePool(
            [shape],
            StateOptions(1, MAX_DRAFT, page_size=PAGE_SIZE),
            dtype=torch.float32,
            device=torch.device(device),
        )
        [state] = pool.layers
        assert isinstance(state, KvState)
        state.k_pages.fill_(torch.nan)
        state.page_table[1] = torch.arange(state.page_table.shape[1]).flip(0) + 1
        self.state, self._mixer, self._device, self._position = state, mixer, device, 0

    def step(self, hidden: Tensor, *, accepted: int | None = None) -> Tensor:
        """Run the next tokens. accepted: of drafts, how many join the sequence; None for all."""
        told = ([len(hidden)], [1], [1], [len(hidden)], [0], [0])
        rows = Rows.build(*told, max_short=MAX_DRAFT, device=self._device, position=[self._position])
        self._position += len(hidden) if accepted is None else accepted
        made: Tensor = self._mixer.forward(hidden.to(self._device), rows, self.state)
        return made.cpu()


def test_the_family_names_what_the_checkpoint_has(case: Case) -> None:
    modules = {f"{module.name}.weight": (module.rows, module.columns) for module in case.family.modules}
    found = {name: tuple(tensor.shape) for name, tensor in case.source.tensors.items()}
    assert modules | case.family.tensors == found


def test_a_life_is_what_transformers_computes(case: Case, device: str) -> None:
    """Prefill, decode, drafts of which two are accepted, and what follows."""
    hidden, drafted = torch.randn(50, HIDDEN), torch.randn(MAX_DRAFT, HIDDEN)
    drafted[:2] = hidden[36:38]
    line = Line(case.mixer(device), case.family.shape, device)
    made = [line.step(hidden[:35]), line.step(hidden[35:36]), line.step(drafted, accepted=2)[:2]]
    made.append(line.step(hidden[38:]))
    assert_close(torch.cat(made), case.run(hidden))


def test_ranks_have_all_latents_and_a_share_of_the_heads(case: Case, device: str) -> None:
    hidden, shape = torch.randn(40, HIDDEN), case.family.shape
    lines = [Line(case.mixer(device, rank, 2), shape.shard(2), device) for rank in range(2)]
    outputs = [line.step(hidden) for line in lines]
    assert_close(outputs[0] + outputs[1], case.run(hidden))
    first, second = (line.state.k_pages.nan_to_num() for line in lines)
    assert torch.equal(first, second)
    with pytest.raises(ModelError, match="expected a divisor of 4 query heads, got 3"):
        shape.shard(3)


def test_a_token_is_one_row_in_one_place() -> None:
    pool = StatePool(
        [SHAPE, SHAPE], StateOptions(2, MAX_DRAFT, page_size=16), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert pool.kv is not None and kept_values(SHAPE) == 26
    assert pool.kv.page_bytes == 2 * 16 * 26 * 2
    assert sum(block.nbytes for block in pool.page_blocks) == pool.kv.total_bytes
    for state in pool.layers:
        assert state.v_pages is state.k_pages and state.k_pages.shape[2:] == (1, 26)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 17, 70])
def test_a_row_of_heads_has_the_same_bits_alone_and_among_others(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weights = torch.randn(3, 33, 17, generator=generator)
    x = torch.randn(num_rows, 3, 22, generator=generator)[..., :17]
    project, whole = HeadProjections(weights), torch.full((num_rows, 3, 40), torch.nan)
    project(x, whole[..., :33])
    assert torch.allclose(whole[..., :33], torch.einsum("thi,hoi->tho", x, weights), rtol=1e-5, atol=1e-4)
    assert whole[..., 33:].isnan().all()
    for i in range(num_rows):
        alone = torch.empty(1, 3, 33)
        project(x[i : i + 1], alone)
        assert torch.equal(alone[0], whole[i, :, :33])
