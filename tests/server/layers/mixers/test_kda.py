"""KDA mixers against those of transformers with the same weights: prefill, decode, verify and commit, and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, assert_close
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.checkpoints.checkpoint import TensorInfo
from deltaline_server.checkpoints.config_reader import ConfigReader, ModelError
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Placement
from deltaline_server.layers.mixers.kda import CONVOLUTIONS, NAME, Kda, KdaFamily
from deltaline_server.layers.shapes import KdaShape
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.models.keys.kda import KdaKeys

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN, HEADS, DIM, WIDTH, EPS = 48, 4, 16, 4, 1e-5
MODULES = ("kimi_linear", "KimiLinear", "DeltaAttention"), ("glm5_next", "Glm5NextText", "LinearAttention")
KINDS = {"softplus": (*MODULES[0], None), "safe": (*MODULES[1], -5.0), "unbounded": (*MODULES[1], None)}


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
    """A mixer of transformers, in fp32, its config, and the family and the checkpoint that serve it."""

    module: Any
    config: Any
    family: KdaFamily
    source: Tensors

    def load(self, device: str, rank: int = 0, world_size: int = 1) -> Kda:
        place = Placement(torch.device(device), torch.float32, rank, world_size)
        return self.family.mixer(LayerReader(self.source, "", self.family.modules, place), {})

    def run(self, hidden: Tensor, cache: Any = None) -> Tensor:
        made: Tensor = self.module(hidden[None], cache_params=cache)
        return made[0]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    """A mixer with gates of either form."""
    return make_case(request.param)


def make_case(kind: str) -> Case:
    pytest.importorskip("transformers", reason="transformers is not installed: it computes what is compared with")
    model_type, prefix, suffix, lower_bound = KINDS[kind]
    modeling = __import__(f"transformers.models.{model_type}.modeling_{model_type}", fromlist=["modeling"])
    kinds = [getattr(modeling, name) for name in dir(modeling) if name in (f"{prefix}Config", f"{prefix}TextConfig")]
    config = kinds[0](
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        linear_num_heads=HEADS,
        linear_head_dim=DIM,
        linear_conv_kernel_dim=WIDTH,
        rms_norm_eps=EPS,
        **({} if model_type == "kimi_linear" else {"linear_lower_bound": lower_bound}),
    )
    module = getattr(modeling, prefix + suffix)(config, 0).eval()
    for name, parameter in module.named_parameters():
        drawn = torch.empty_like(parameter).uniform_(0.0, 1.5) if name.endswith("A_log") else None
        parameter.copy_(torch.randn_like(parameter) * 0.3 if drawn is None else drawn)
    module.o_norm.weight += 1.0
    stored = {NAME + name.removeprefix("forget_gate."): tensor for name, tensor in module.state_dict().items()}
    whole = stored.pop(NAME + "conv1d.weight")
    stored |= dict(zip(CONVOLUTIONS, whole.chunk(3), strict=True))
    shape = KdaShape(HEADS, HEADS, DIM, DIM, WIDTH, lower_bound)
    family = KdaFamily(shape, HIDDEN, EPS, has_wide_rates=model_type == "kimi_linear")
    return Case(module, config, family, Tensors(stored))


class Lines:
    """The state of one mixer, which a test runs row by row."""

    def __init__(self, mixer: Kda, shape: KdaShape, device: str) -> None:
        pool = StatePool([shape], StateOptions(2, MAX_DRAFT), dtype=torch.float32, device=torch.device(device))
        [self.state] = pool.layers
        assert isinstance(self.state, LayerState)
        self._mixer, self._device, self._half, self._is_new = mixer, device, 0, True

    def step(self, hidden: Tensor, *, verify: bool = False, accepted: int = 0) -> Tensor:
        n, read = len(hidden), 0 if self._is_new else 1
        told: tuple[Sequence[int], ...] = ([n], [read], [1], [0 if verify else n], [accepted], [self._half])
        rows = Rows.build(*told, max_short=MAX_DRAFT, device=self._device)
        self._is_new, self._half = False, self._half ^ verify
        return self._mixer.forward(hidden.to(self._device), rows, self.state).cpu()


def test_the_family_names_what_the_checkpoint_has(case: Case) -> None:
    modules = {f"{module.name}.weight": (module.rows, module.columns) for module in case.family.modules}
    found = {name: tuple(tensor.shape) for name, tensor in case.source.tensors.items()}
    assert modules | case.family.tensors == found


def test_a_life_is_what_transformers_computes(case: Case, device: str) -> None:
    """Prefill, decode, a verify of which two tokens are accepted, and what follows; and the state behind it all."""
    from transformers import DynamicCache  # large, and absent where only the other tests run

    hidden, drafted = torch.randn(50, HIDDEN), torch.randn(MAX_DRAFT, HIDDEN)
    cache = DynamicCache(config=case.config)
    lines = Lines(case.load(device), case.family.shape, device)
    drafted[:2] = hidden[41:43]
    ours = [lines.step(hidden[:40]), lines.step(hidden[40:41]), lines.step(drafted, verify=True)[:2]]
    ours += [lines.step(hidden[43:], accepted=2)]
    assert_close(torch.cat(ours), case.run(hidden, cache))
    kept = cache.layers[0]
    assert_close(lines.state.recurrent[1].cpu(), kept.recurrent_states[0][0].transpose(1, 2))
    assert_close(lines.state.conv[1, : WIDTH - 1].cpu(), kept.conv_states[0][0].t()[1:])


def test_strong_decays_do_not_overflow(case: Case, device: str) -> None:
    """Of 64 tokens in a chunk the inverse of what is left would be more than fp32 holds."""
    case.source.tensors[NAME + "dt_bias"].fill_(6.0)
    case.source.tensors[NAME + "A_log"].fill_(2.0)
    hidden = torch.randn(80, HIDDEN)
    made = Lines(case.load(device), case.family.shape, device).step(hidden)
    assert made.isfinite().all()
    assert_close(made, case.run(hidden))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_have_summands_of_one_output(case: Case, world_size: int) -> None:
    hidden, total = torch.randn(30, HIDDEN), torch.zeros(30, HIDDEN)
    for rank in range(world_size):
        mixer = case.load("cpu", rank, world_size)
        total += Lines(mixer, case.family.shape.shard(world_size), "cpu").step(hidden)
    assert_close(total, case.run(hidden))


def test_heads_are_dealt_out_whole() -> None:
    with pytest.raises(ModelError, match=r"^--tensor-parallel: expected a divisor of 4 heads, got 3"):
        KdaShape(HEADS, HEADS, DIM, DIM, WIDTH).shard(3)


@pytest.mark.parametrize(
    ("keys", "config", "shape"),
    [
        (KdaKeys(32), {}, KdaShape(32, 32, 128, 128, 4)),
        (KdaKeys(32), {"linear_num_heads": 6, "linear_head_dim": 64}, KdaShape(6, 6, 64, 64, 4)),
        (
            KdaKeys(32),
            {
                "linear_num_heads": 5,
                "linear_attn_config": {"num_heads": 6, "head_dim": 32, "short_conv_kernel_size": 3},
                "linear_lower_bound": -3,
            },
            KdaShape(6, 6, 32, 32, 3),
        ),
        (KdaKeys(64, bounds_decays=True), {}, KdaShape(64, 64, 128, 128, 4, -5.0)),
        (KdaKeys(64, bounds_decays=True), {"linear_lower_bound": -2}, KdaShape(64, 64, 128, 128, 4, -2.0)),
        (KdaKeys(64, bounds_decays=True), {"linear_lower_bound": None}, KdaShape(64, 64, 128, 128, 4)),
        (
            KdaKeys(64, bounds_decays=True),
            {"linear_lower_bound": None, "linear_attn_config": {"safe_gate": True}},
            KdaShape(64, 64, 128, 128, 4, -5.0),
        ),
        (
            KdaKeys(64, bounds_decays=True),
            {"linear_attn_config": {"safe_gate": False, "gate_lower_bound": None}},
            KdaShape(64, 64, 128, 128, 4),
        ),
    ],
)
def test_sizes_come_from_either_spelling(keys: KdaKeys, config: dict[str, Any], shape: KdaShape) -> None:
    assert keys.read(ConfigReader(config, "config.json: ")) == shape


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"linear_num_heads": 0}, r"^linear_num_heads: expected an integer in 1\.\."),
        ({"linear_attn_config": {"head_dim": 257}}, r"^linear_attn_config\.head_dim: expected an integer in 1\.\.256"),
        ({"linear_lower_bound": 5.0}, r"^linear_lower_bound: expected a negative number that fp32 holds, or null"),
        ({"linear_lower_bound": True}, r"^linear_lower_bound: expected a negative number"),
        ({"linear_attn_config": {"safe_gate": 1, "gate_lower_bound": None}}, r"^linear_attn_config\.safe_gate: "),
    ],
)
def test_a_config_that_lies_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        KdaKeys(64, bounds_decays=True).read(ConfigReader(config, ""))
