"""The engines' gated delta rule in the place of transformers' own, in whole models that generate."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.compat import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", EXPERTS),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {}),
}
OURS = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_generate_the_same(exact_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both functions in any order of the state's dimensions; with one of them in transformers' order."""
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    kind, more = MODELS[name]
    config_kind = kind.replace("ForCausalLM", "TextConfig" if name == "qwen3_5" else "Config")
    torch.manual_seed(0)
    model = getattr(modeling, kind)(getattr(configuration, config_kind)(**SIZES, **more)).eval().to(exact_path.device)
    prompt = torch.randint(1, 64, (2, 9)).to(exact_path.device)

    def generate() -> torch.Tensor:
        told = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        made = model.generate(prompt, max_new_tokens=5, output_hidden_states=True, **told)
        return torch.stack(made.logits)

    want = generate()
    for ours, v_first in ((list(OURS), True), (list(OURS), False), ([min(OURS)], False), ([max(OURS)], False)):
        calls: list[str] = []

        def run(*args: Any, own: Any, name: str, v_first: bool = v_first, calls: list[str] = calls, **told: Any) -> Any:
            calls.append(name)
            return own(*args, state_v_first=v_first, **told)

        with monkeypatch.context() as patch:
            for function in ours:
                patch.setattr(modeling, function, partial(run, own=OURS[function], name=function))
            assert_close("logits", generate(), want, torch.float32)
        assert set(calls) == set(ours)
