"""PEFT as oracle: layers that serve many adapters at once compute for each row what its adapter makes of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import fill_slots, load_directory
from rigs.layer_oracle import MAX_DRAFT, Served, assert_close, serve
from torch import Tensor

from deltaline_server.models.config import Scope
from deltaline_server.models.lora_weights import Adapter
from deltaline_server.models.model import AdapterOptions, ModelOptions, open_weights

# Modules that a model has not, or a pattern that matches none.
pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.filterwarnings("ignore:target_parameters=.*no parameter was matched:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

HIDDEN, NUM_LAYERS = 48, 3
MIXERS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"]
MLPS = ["gate_proj", "up_proj", "down_proj"]
ALL = MIXERS + MLPS
# All in one batch.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*|.*up_proj"},
    "rslora": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ALL,
        # Sorted by key, as PEFT writes them.
        "rank_pattern": {r".*layers\.1\..*": 16, "down_proj": 1, "out_proj": 7},
        "alpha_pattern": {"mlp.up_proj": 12},
    },
    "dora": {"r": 5, "lora_alpha": 10, "use_dora": True, "target_modules": ALL},
    "mixers": {"r": 2, "lora_alpha": 8, "target_modules": MIXERS, "layers_to_transform": [0, 2]},
    "mlps": {"r": 8, "lora_alpha": 8, "use_dora": True, "use_rslora": True, "target_modules": MLPS},
    "parts": {"r": 6, "lora_alpha": 12, "use_dora": True, "target_modules": r".*\.(in_proj_ba?|up_proj)"},
    "one-layer": {"r": 16, "lora_alpha": 40, "target_modules": r".*layers\.2\..*_proj.*"},
}
MAX_RANK = 16
# Whose sequences a batch has; "" is the base model.
NAMES = [*ADAPTERS, "", ""]
# Not in the order of the rows, and one slot stays empty.
SLOTS = dict(zip(ADAPTERS, (7, 2, 0, 5, 8, 1, 4, 3), strict=True)) | {"": -1}
NUM_SLOTS = 9


@dataclass
class Tuned:
    """A transformers model "", copies of it into which PEFT put one adapter each, and the files of all."""

    models: dict[str, Any]
    directory: Path

    def cache(self) -> Any:
        import transformers  # large, and absent where only the other tests run

        return transformers.DynamicCache(config=self.models[""].config.get_text_config())

    def run(self, name: str, hidden: Tensor, cache: Any, scope: Scope = Scope.BLOCK) -> Any:
        """Run all layers, in mixer scope the last one's, over one sequence's tokens `[n, hidden]` with an adapter."""
        layers = self.models[name].get_decoder().layers
        x = hidden[None]
        if scope is Scope.MIXER:
            return layers[-1].linear_attn(x, cache_params=cache)[0]
        for layer in layers:
            x = layer(x, position_embeddings=None, past_key_values=cache)
        return x[0]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def tuned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Tuned:
    peft = pytest.importorskip("peft", reason="peft is not installed: it makes, writes and runs the adapters")
    directory = tmp_path_factory.mktemp(request.param)
    sizes: dict[str, Any] = {"intermediate": 40, "layers": NUM_LAYERS, "value_heads": 6, "head_dim": 8}
    model = write_checkpoint(directory / "base", request.param, hidden=HIDDEN, **sizes)
    models = {"": model}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for name, options in ADAPTERS.items():
            models[name] = copy.deepcopy(model)
            if request.param == "qwen3_next":  # PEFT takes it for a mixture of experts, and leaves the MLP out
                models[name].config.model_type = "qwen3_5_text"
            wrapped = peft.get_peft_model(models[name], peft.LoraConfig(init_lora_weights=False, **options))
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_magnitude" in parameter_name:
                    parameter.data.mul_(torch.linspace(0.5, 1.5, len(parameter)))
            wrapped.save_pretrained(directory / "adapters" / name)
    return Tuned(models, directory)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Draw the same tokens whatever ran before: of some, two experts score alike but for rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def serve_all(
    tuned: Tuned, device: str, names: Iterable[str] = ADAPTERS, **changes: Any
) -> tuple[Served, dict[str, Adapter]]:
    """A model with these adapters in their slots, and what was loaded for them."""
    base, room = tuned.directory / "base", AdapterOptions(NUM_SLOTS, MAX_RANK)
    options = ModelOptions(torch.device(device), model=base, adapters=room, **changes)
    served = serve(options, lines=len(NAMES))
    with open_weights(options) as weights:
        adapters = {
            name: load_directory(tuned.directory / "adapters" / name, served.model.layout, weights) for name in names
        }
    assert served.model.adapters is not None
    fill_slots(served.model.adapters, {SLOTS[name]: adapter for name, adapter in adapters.items()})
    return served, adapters


def step(served: Served, rows: Sequence[Tensor], names: Sequence[str], lines: Sequence[int], **fields: Any) -> Any:
    """What each row of tokens becomes under its adapter."""
    lengths = [len(row) for row in rows]
    made = served.step(torch.cat(list(rows)), lines, lengths, slots=[SLOTS[name] for name in names], **fields)
    return made.split(lengths)


def test_eight_adapters_and_base_rows_in_one_batch(tuned: Tuned, device: str) -> None:
    """Prefill, decode, verify and the replay of what was accepted, in batches of all sequences in changing order."""
    served, _ = serve_all(tuned, device)
    caches = [tuned.cache() for _ in NAMES]
    order = list(range(len(NAMES)))

    def check(ours: list[Tensor], rows: list[Tensor], lengths: list[int]) -> None:
        """The first so many tokens of each row."""
        for i, own, row, length in zip(order, ours, rows, lengths, strict=True):
            if length:
                # One by one, as a decode, but for a prompt: transformers' recurrence of several takes another path.
                parts = [row] if len(row) > MAX_DRAFT else list(row[:length].split(1))
                assert_close(own[:length], torch.cat([tuned.run(NAMES[i], part, caches[i]) for part in parts]))

    def turn(by: int) -> tuple[list[str], list[int]]:
        order[:] = order[by:] + order[:by]
        return [NAMES[i] for i in order], [i + 1 for i in order]

    lengths = [5, 70, 6, 33, 9, 7, 64, 12, 65, 8]
    prompts = [torch.randn(length, HIDDEN) for length in lengths]
    names, lines = turn(0)
    check(step(served, prompts, names, lines), prompts, lengths)

    names, lines = turn(3)
    tokens = [torch.randn(1, HIDDEN) for _ in NAMES]
    check(step(served, tokens, names, lines), tokens, [1] * len(NAMES))

    names, lines = turn(4)
    lengths = [4, 1, 4, 4, 2, 1, 4, 3, 4, 4]
    is_verify = [length > 1 for length in lengths]
    accepted = [4, 0, 3, 2, 1, 0, 0, 2, 4, 1]
    drafts = [torch.randn(length, HIDDEN) for length in lengths]
    committed = [0 if verify else 1 for verify in is_verify]
    ours = step(served, drafts, names, lines, verify=is_verify)
    check(ours, drafts, [max(pair) for pair in zip(accepted, committed, strict=True)])

    tokens = [torch.randn(1, HIDDEN) for _ in NAMES]
    check(step(served, tokens, names, lines, accepted=accepted), tokens, [1] * len(NAMES))


def test_every_adapter_matters(tuned: Tuned) -> None:
    """What the other tests compare is far from the base model's."""
    hidden = torch.randn(9, HIDDEN)
    outputs = {name: tuned.run(name, hidden, tuned.cache()) for name in SLOTS}
    for name in ADAPTERS:
        assert float((outputs[name] - outputs[""]).norm() / outputs[""].norm()) > 0.05


def test_the_outputs_of_two_ranks_sum_to_the_whole(tuned: Tuned, device: str) -> None:
    """In mixer scope. What adapters add, and what DoRA multiplies, is dealt out with the heads."""
    names = [name for name in NAMES if name != "mlps"]
    rows, lines = [torch.randn(6 + i, HIDDEN) for i in range(len(names))], list(range(1, len(names) + 1))
    sums = [torch.zeros_like(row) for row in rows]
    for rank in (0, 1):
        options = {"scope": Scope.MIXER, "spans": [range(2, 3)], "rank": rank, "world_size": 2}
        served, _ = serve_all(tuned, device, filter(None, names), **options)
        for total, part in zip(sums, step(served, rows, names, lines), strict=True):
            total += part
    for total, name, row in zip(sums, names, rows, strict=True):
        assert_close(total, tuned.run(name, row, tuned.cache(), Scope.MIXER))


def test_another_adapter_in_a_slot_is_another_model(tuned: Tuned, device: str) -> None:
    """Of fewer ranks, without factors and for other modules: nothing of the one before is left."""
    served, adapters = serve_all(tuned, device)
    row, lines = torch.randn(20, HIDDEN), iter(range(1, len(NAMES) + 1))
    assert served.model.adapters is not None
    for before, after in (("dora", "mixers"), ("mixers", "mlps"), ("plain", "one-layer"), ("patterns", "parts")):
        fill_slots(served.model.adapters, {SLOTS[before]: adapters[before], 6: adapters[before]})
        fill_slots(served.model.adapters, {SLOTS[before]: adapters[after]})
        [ours] = step(served, [row], [before], [next(lines)])
        assert_close(ours, tuned.run(after, row, tuned.cache()))


def test_mixers_beside_experts_have_adapters(tmp_path: Path, write_checkpoint: Callable[..., Any], device: str) -> None:
    """A row with an adapter and one without, in one batch: prefill, verify, decode."""
    peft = pytest.importorskip("peft", reason="peft is not installed: it makes, writes and runs the adapter")
    sizes: dict[str, Any] = {"hidden": HIDDEN, "layers": NUM_LAYERS, "value_heads": 6, "head_dim": 8}
    base = write_checkpoint(tmp_path / "base", "qwen3_5_moe_text", **sizes)
    wanted = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=MIXERS)
    models = {"": base, "plain": copy.deepcopy(base)}
    peft.get_peft_model(models["plain"], wanted).save_pretrained(tmp_path / "adapters" / "plain")
    tuned, names = Tuned(models, tmp_path), ["plain", ""]
    served, _ = serve_all(tuned, device, ["plain"])
    caches, accepted = [tuned.cache() for _ in names], 2
    prompts, drafts, tokens = ([torch.randn(length, HIDDEN) for _ in names] for length in (30, 4, 1))
    ours = [step(served, prompts, names, [1, 2]), step(served, drafts, names, [1, 2], verify=True)]
    ours.append(step(served, tokens, names, [1, 2], accepted=accepted))
    for i, name in enumerate(names):
        rows = prompts[i], *drafts[i][:accepted].split(1), tokens[i]
        theirs = torch.cat([tuned.run(name, row, caches[i]) for row in rows])
        assert_close(torch.cat((ours[0][i], ours[1][i][:accepted], ours[2][i])), theirs)
    plain, bare = (tuned.run(name, prompts[0], tuned.cache()) for name in names)
    assert float((plain - bare).norm() / bare.norm()) > 0.05
