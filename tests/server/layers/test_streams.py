"""Layers between residual streams against transformers: its mixers and MLPs in its deepseek_v4 hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import fill_slots, load_directory
from rigs.layer_oracle import MAX_DRAFT, Oracle, assert_close, serve
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.streams import StreamEnds
from deltaline_server.models.config import Scope
from deltaline_server.models.model import AdapterOptions, ModelOptions, check_model, load_model, open_weights
from deltaline_server.step import SpanShapes

pytestmark = pytest.mark.usefixtures("no_gradients")

EXAMPLE = Path(__file__).parents[3] / "examples" / "streams.py"
HIDDEN, STREAMS = 64, 4
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layers": 3},
    "qwen3_5_text": {"layers": 3, "layer_types": HYBRID},
    "mamba2": {"layers": 3},
    "nemotron_h": {"layers": 3},
}


MakeOracle = Callable[..., Oracle]


@pytest.fixture
def make_oracle(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> MakeOracle:
    """A function that makes transformers write a small checkpoint with streams."""
    made: list[Path] = []

    def make(model_type: str, streams: int = STREAMS, **changes: Any) -> Oracle:
        directory = tmp_path / str(len(made))
        made.append(directory)
        options = {"hidden": HIDDEN, "head_dim": 32} | KINDS[model_type] | changes
        model = write_checkpoint(directory, model_type, **options)
        torch.manual_seed(3)
        with torch.inference_mode(False):
            run_path(str(EXAMPLE))["add_streams"](model, streams)
        model.eval().save_pretrained(directory)
        return Oracle(model, directory)

    return make


def joined(oracle: Oracle, streams: Tensor) -> Tensor:
    """What the head of the model makes of streams `[n, streams, hidden]`."""
    made: Tensor = oracle.model.base_model.hc_head(streams[None])[0]
    return made


def random_streams(tokens: int, streams: int = STREAMS) -> Tensor:
    return torch.randn(tokens, streams, HIDDEN)


@pytest.mark.parametrize(
    ("model_type", "streams"), [*((kind, STREAMS) for kind in KINDS), *(("mamba2", count) for count in (1, 8))]
)
def test_prefill_decode_verify_and_replay(make_oracle: MakeOracle, device: str, model_type: str, streams: int) -> None:
    oracle = make_oracle(model_type, streams)
    served, hidden = serve(oracle.options(device)), random_streams(48, streams)
    ours = [served.step(part, [1], [len(part)]) for part in hidden[:41].split([40, 1])]
    served.step(hidden[41:45], [1], [MAX_DRAFT], verify=True)
    # Two of the drafts are accepted; the next tokens follow these.
    ours.append(served.step(hidden[45:47], [1], [2], accepted=2))
    theirs = oracle.run(range(3), torch.cat([hidden[:43], hidden[45:47]]))
    assert_close(torch.cat(ours), torch.cat([theirs[:41], theirs[43:]]))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2"])
def test_the_ends_of_the_model(make_oracle: MakeOracle, device: str, model_type: str) -> None:
    oracle = make_oracle(model_type)
    hidden = torch.randn(20, HIDDEN)
    theirs = joined(oracle, oracle.run(range(3), hidden[:, None].expand(-1, STREAMS, -1)))
    whole = serve(oracle.options(device, stream_ends=StreamEnds.BOTH))
    assert_close(whole.step(hidden, [1], [20]), theirs)
    parts = serve(oracle.options(device, spans=[range(0, 1), range(1, 3)], stream_ends=StreamEnds.BOTH))
    assert parts.model.ends == (SpanShapes(HIDDEN, 4, 0, STREAMS), SpanShapes(HIDDEN, 4, STREAMS, 0))
    between = parts.step(hidden, [1], [20])
    assert_close(parts.step(between, [1], [20], span=1), theirs)
    plain = serve(oracle.options(device, spans=[range(0, 1), range(1, 3)]))
    assert plain.model.ends == (SpanShapes(HIDDEN, 4, STREAMS, STREAMS),) * 2
    assert torch.equal(plain.step(hidden[:, None].expand(-1, STREAMS, -1), [1], [20]), between)


@pytest.mark.parametrize("ends", [StreamEnds.EXPAND, StreamEnds.HEAD])
def test_one_end_alone(make_oracle: MakeOracle, device: str, ends: StreamEnds) -> None:
    oracle = make_oracle("mamba2")
    hidden = torch.randn(9, HIDDEN)
    streams = hidden[:, None].expand(-1, STREAMS, -1)
    theirs = oracle.run(range(3), streams)
    served = serve(oracle.options(device, stream_ends=ends))
    ours = served.step(hidden if ends.expands else streams, [1], [9])
    assert_close(ours, joined(oracle, theirs) if ends.has_head else theirs)


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2"])
def test_bfloat16_is_no_further_from_the_truth_than_the_checkpoint_model(
    make_oracle: MakeOracle, device: str, model_type: str
) -> None:
    """The gates' parameters stay fp32 in both; the oracle rounds the gates before it mixes."""
    oracle = make_oracle(model_type, dtype="bfloat16", layers=2)
    held = load_file(oracle.directory / "model.safetensors")
    assert {str(tensor.dtype) for name, tensor in held.items() if "_hc." in name} == {"torch.float32"}
    served, hidden = serve(oracle.options(device)), random_streams(40).bfloat16()
    assert served.model.dtype is torch.bfloat16
    ours = served.step(hidden, [1], [40]).float()
    theirs = oracle.run(range(2), hidden).float()
    oracle.model.float()
    exact = oracle.run(range(2), hidden.float())
    # Of a few tokens the recurrence makes much of a little: the median tells of the others.
    own, other = (((made - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)) for made in (ours, theirs))
    assert float(own.median()) < min(1.1 * float(other.median()), 2e-2)


@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
def test_streams_have_the_dtype_that_the_config_asks_for_residuals(
    make_oracle: MakeOracle, device: str, monkeypatch: pytest.MonkeyPatch, in_fp32: bool
) -> None:
    oracle, dtypes = make_oracle("mamba2", dtype="bfloat16", residual_in_fp32=in_fp32), set()
    stack: Any = import_module("deltaline_server.layers.stack")
    mix = stack.mhc_post_pre

    def spy(made: Tensor, residual: Tensor, *arguments: Any, **options: Any) -> Any:
        dtypes.add(residual.dtype)
        return mix(made, residual, *arguments, **options)

    monkeypatch.setattr(stack, "mhc_post_pre", spy)
    served, hidden = serve(oracle.options(device)), random_streams(30).bfloat16()
    ours = served.step(hidden, [1], [30])
    assert dtypes == {torch.float32 if in_fp32 else torch.bfloat16}
    assert_close(ours, oracle.run(range(3), hidden), tolerance=2e-2)


def test_between_two_branches_there_is_one_call(
    make_oracle: MakeOracle, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a layer to the next: three layers of two branches have five places between them."""
    called: list[str] = []
    stack = import_module("deltaline_server.layers.stack")

    def spy(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        called.append(kernel.__name__)
        return kernel(*arguments, **options)

    for name in ("mhc_pre", "mhc_post_pre", "mhc_post"):
        monkeypatch.setattr(stack, name, partial(spy, getattr(stack, name)))
    serve(make_oracle("qwen3_next").options(device)).step(random_streams(2), [1], [2])
    assert called == ["mhc_pre", *["mhc_post_pre"] * 5, "mhc_post"]


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(make_oracle: MakeOracle, device: str) -> None:
    oracle = make_oracle("mamba2")
    served, again = serve(oracle.options(device)), serve(oracle.options(device))
    lengths, tokens = [1, MAX_DRAFT, 40], 1 + MAX_DRAFT + 40
    hidden = random_streams(tokens)
    bad = hidden.clone()
    bad[1 : 1 + MAX_DRAFT, 2] = torch.nan
    clean, poisoned = (
        one.step(rows, [1, 2, 3], lengths, verify=[False, True, False])
        for one, rows in ((served, hidden), (again, bad))
    )
    assert poisoned[1 : 1 + MAX_DRAFT].isnan().any(dim=-1).all()
    for rows in (slice(0, 1), slice(1 + MAX_DRAFT, tokens)):
        assert torch.equal(poisoned[rows], clean[rows])


def test_an_empty_batch(make_oracle: MakeOracle, device: str) -> None:
    served = serve(make_oracle("mamba2").options(device, stream_ends=StreamEnds.BOTH))
    assert served.step(torch.zeros(0, HIDDEN), [1], [0]).shape == (0, HIDDEN)


def test_the_mixer_of_a_layer_knows_no_streams(make_oracle: MakeOracle, device: str) -> None:
    oracle = make_oracle("qwen3_next")
    served = serve(oracle.options(device, scope=Scope.MIXER, layers=range(1, 2)))
    assert served.model.ends == (SpanShapes(HIDDEN, 4),)
    hidden, cache = torch.randn(20, HIDDEN), oracle.cache()
    theirs = oracle.model.base_model.layers[1].linear_attn(hidden[None], cache_params=cache)[0]
    assert_close(served.step(hidden, [1], [20]), theirs)


def test_random_weights_serve_a_config_alone(make_oracle: MakeOracle, device: str) -> None:
    config = make_oracle("qwen3_5_text").directory / "config.json"
    options = ModelOptions(torch.device(device), random_init=config, stream_ends=StreamEnds.BOTH)
    hidden = torch.randn(20, HIDDEN)
    first, again, other = (serve(replace(options, seed=seed)).step(hidden, [1], [20]) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert 0.1 < float(first.std()) < 10


def test_the_self_test_is_told_of_streams_where_there_are_some(make_oracle: MakeOracle) -> None:
    oracle = make_oracle("mamba2")
    block = load_model(oracle.options(stream_ends=StreamEnds.BOTH))
    mixer = load_model(oracle.options(scope=Scope.MIXER))
    assert (
        block.block_sizes == {"streams": STREAMS, "hidden": HIDDEN, "mlp_dim": 0} and mixer.block_sizes["streams"] == 0
    )


@pytest.mark.filterwarnings("ignore:target_parameters=.*no parameter was matched:RuntimeWarning")
def test_adapters_change_the_branches_between_the_streams(make_oracle: MakeOracle, tmp_path: Path, device: str) -> None:
    """PEFT on the same model: a row with an adapter and one without, in one batch."""
    peft = pytest.importorskip("peft", reason="peft is not installed: it makes, writes and runs the adapter")
    oracle = make_oracle("qwen3_5_text")
    hidden = random_streams(40)
    plain = oracle.run(range(3), hidden)
    options = oracle.options(device, adapters=AdapterOptions(2, 8))
    wanted = peft.LoraConfig(r=8, lora_alpha=16, init_lora_weights=False, target_modules="all-linear")
    peft.get_peft_model(oracle.model, wanted).save_pretrained(tmp_path / "adapters" / "all")
    tuned = oracle.run(range(3), hidden)

    served = serve(options)
    assert served.model.adapters is not None
    with open_weights(options) as base:
        adapter = load_directory(tmp_path / "adapters" / "all", served.model.layout, base)
    fill_slots(served.model.adapters, {1: adapter})
    ours = served.step(torch.cat([hidden, hidden]), [1, 2], [40, 40], slots=[1, -1])
    assert_close(ours, torch.cat([tuned, plain]))
    assert float((tuned - plain).norm() / plain.norm()) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda held: held.pop("model.layers.1.ffn_hc.base"),
            r"layers\.1\.ffn_hc\.base: .* \[24\], found nothing \(hc_mult in config",
        ),
        (
            lambda held: held.update({"model.layers.0.attn_hc.scale": torch.ones(2)}),
            r"^model\.layers\.0\.attn_hc\.scale: expected shape \[3\], got \[2\]",
        ),
        (
            lambda held: held.update({"model.layers.0.attn_hc.gate": torch.ones(2)}),
            r"^model\.layers\.0\.attn_hc\.gate: expected no such tensor in a served layer, found one",
        ),
        (lambda held: held.pop("model.hc_head.hc_fn"), r"^model\.hc_head\.hc_fn: expected shape \[4, 256\], found"),
        (
            lambda held: held.update({"model.hc_head.hc_base": torch.ones(2, 2)}),
            r"^model\.hc_head\.hc_base: expected shape \[4\], got \[2, 2\]",
        ),
    ],
    ids=["missing", "misshapen", "extra", "no-head", "other-head"],
)
def test_wrong_tensors_are_refused_by_name(
    make_oracle: MakeOracle, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    oracle = make_oracle("qwen3_next")
    file = oracle.directory / "model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        check_model(oracle.options(stream_ends=StreamEnds.BOTH))
    if "hc_head" in message:  # who does not ask for the head needs none
        check_model(oracle.options())
