"""What docs/engines.md puts into transformers' models: the same tokens as without it, and layers that compile whole."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs_code import blocks
from torch._dynamo import lookup_backend

from deltaline_kernels import compat

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
MODELS = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
}
# What is replaced in the layers of either delta rule, and by what: of a prompt and of a token.
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KIMI_RULES = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
OURS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
OUR_KDA = ("chunk_kda", "fused_recurrent_kda")
# Heads of other sizes for keys and values: a state that is transposed does not fit.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "initializer_range": 0.125,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KIMI_SIZES = {
    "num_key_value_heads": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mlp_layer_types": ["dense"] * 3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "bos_token_id": None,
}


@pytest.fixture(params=MODELS)
def modeling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modeling file of a model; what is put into it is taken out again."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of transformers' convolution
    file = importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    for name in (*CONVOLUTIONS, *(KIMI_RULES if is_kimi(file) else RULES)):
        monkeypatch.setattr(file, name, getattr(file, name))
    return file


@pytest.fixture
def called() -> Counter[str]:
    """How often each adapter was called."""
    return Counter()


@pytest.fixture
def use_kernels(called: Counter[str]) -> Callable[[Any], None]:
    """The function of the page; the adapters that it uses are counted."""
    names: dict[str, Any] = {}
    exec(next(block.content for block in blocks(PAGE) if "def use_kernels" in block.content), names)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            return function(*args, **kwargs)

        return count

    names |= {name: counted(name, getattr(compat, name)) for name in compat.__all__ if name in names}
    use: Callable[[Any], None] = names["use_kernels"]
    return use


def is_kimi(modeling: Any) -> bool:
    return "kimi" in modeling.__name__


def make_model(modeling: Any, device: str) -> Any:
    config, model = MODELS[modeling.__name__.rpartition(".modeling_")[2]]
    torch.manual_seed(0)
    sizes = SIZES | (KIMI_SIZES if is_kimi(modeling) else {})
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval().to(device)


def test_models_generate_the_same_tokens(
    modeling: Any, use_kernels: Callable[[Any], None], called: Counter[str], device: str
) -> None:
    model = make_model(modeling, device)
    prompt = torch.randint(64, (2, 70), device=device)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    theirs = model.generate(prompt, **options)
    use_kernels(modeling)
    ours = model.generate(prompt, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=1e-4, atol=1e-4)
    # Two layers: the prompt, then eleven tokens.
    chunk, step = OUR_KDA if is_kimi(modeling) else OURS
    assert called == {"causal_conv1d_fn": 2, chunk: 2, "causal_conv1d_update": 22, step: 22}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor's own imports
def test_layer_is_compiled_whole(modeling: Any, use_kernels: Callable[[Any], None], device: str) -> None:
    """A prompt and a token behind it, through a cache that the graph writes to."""
    model = make_model(modeling, device)
    layer = model.model.layers[-1].self_attn if is_kimi(modeling) else model.model.layers[-1].linear_attn
    tokens = torch.randn(2, 71, 64, device=device)
    found = set[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.update(str(node.target) for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)

    def run(layer: Callable[..., Any]) -> list[Any]:
        cache = transformers.DynamicCache(config=model.config)
        return [layer(part, cache_params=cache) for part in tokens.split((70, 1), dim=1)]

    with torch.no_grad():
        theirs = run(layer)
        use_kernels(modeling)
        torch.compiler.reset()
        compiled = run(torch.compile(layer, fullgraph=True, backend=backend))
    torch.testing.assert_close(compiled, theirs, rtol=1e-4, atol=1e-4)
    names = (*CONVOLUTIONS, *(OUR_KDA if is_kimi(modeling) else OURS))
    assert {f"deltaline.{name}.default" for name in names} <= found


def test_training_is_refused(modeling: Any, use_kernels: Callable[[Any], None], device: str) -> None:
    use_kernels(modeling)
    with pytest.raises(ValueError, match="needs no gradient"):
        make_model(modeling, device).train()(torch.randint(64, (1, 5), device=device))
