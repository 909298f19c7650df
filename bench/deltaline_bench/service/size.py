"""How large the judged service is: its model, its loads, and the bars that count at that size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from deltaline_bench.service.figure import Bar


@dataclass(frozen=True)
class Size:
    """One size. Bars count only where `is_judged`: elsewhere the parts only have to run, but for `max_echoes`.

    attention_every: of so many layers the last is attention; 0 for none.
    parts: those that make sense at this size. max_echoes: most that a decode step may take besides its computation, in
    bare echoes of the same bytes. ways: how decode steps are called. is_beside_layer: they are also compared with
    echoes around the same layer, and with a layer that only copies; of a CPU's size.
    """

    name: str
    is_judged: bool
    max_echoes: float
    hidden: int
    intermediate: int
    layers: int
    key_heads: int
    value_heads: int
    head_dim: int
    dtype: str
    decode_rows: int
    decode_steps: int
    client_steps: int
    clients: int
    chunk_tokens: int
    throughput_s: float
    prefill_tokens: int
    prefill_rounds: int
    mixed_tokens: int
    mixed_s: float
    steady_sequences: int
    steady_steps: int
    steady_tokens: int
    soak_s: float
    flood_s: float
    fork_rounds: int
    reuse_tokens: int
    reuse_rounds: int
    parts: tuple[str, ...] = ("decode", "throughput", "prefill", "mixed", "steady", "soak")
    scope: str = "block"
    ways: tuple[Literal["unary", "stream"], ...] = ("stream",)
    is_beside_layer: bool = False
    attention_every: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.hidden * (2 if self.dtype == "bfloat16" else 4)

    @property
    def batch_rows(self) -> int:
        """Short rows of a batch: those of all clients at once."""
        return self.clients * self.decode_rows

    @property
    def max_sequences(self) -> int:
        """Sequences that the server holds: those of all clients at once, and some more."""
        return max(2 * self.clients * self.decode_rows, 128)

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory of a client whose prefills have so many tokens: twice what goes in and what comes out."""
        return 4 * (tokens + 1024) * self.token_bytes

    def bar(self, limit: float, *, is_least: bool = False) -> Bar | None:
        """Make a bar that counts at this size only if it is judged."""
        return Bar(limit, is_least) if self.is_judged else None

    def model(self) -> dict[str, Any]:
        """The config.json of what is served: Gated DeltaNet layers with dense MLPs, and gated attention in between."""
        return {
            "model_type": "qwen3_next",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "layer_types": [self._mixer(layer) for layer in range(self.layers)],
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": self.head_dim,
            "linear_conv_kernel_dim": 4,
            "num_experts": 0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "num_attention_heads": self.value_heads // 2,
            "num_key_value_heads": max(self.value_heads // 12, 1),
            "max_position_embeddings": 65_536,
        } | ({"head_dim": 2 * self.head_dim} if self.attention_every else {})

    def _mixer(self, layer: int) -> str:
        is_attention = self.attention_every and (layer + 1) % self.attention_every == 0
        return "full_attention" if is_attention else "linear_attention"


H200 = Size(
    name="h200",
    is_judged=True,
    max_echoes=1.6,
    hidden=2048,
    intermediate=5632,
    layers=4,
    key_heads=16,
    value_heads=32,
    head_dim=128,
    dtype="bfloat16",
    decode_rows=64,
    decode_steps=20_000,
    client_steps=2_000,
    clients=8,
    chunk_tokens=4096,
    throughput_s=10.0,
    prefill_tokens=16_384,
    prefill_rounds=10,
    mixed_tokens=32_768,
    mixed_s=10.0,
    steady_sequences=64,
    steady_steps=10_000,
    steady_tokens=700,
    soak_s=600.0,
    flood_s=10.0,
    fork_rounds=200,
    reuse_tokens=8_192,
    reuse_rounds=20,
    parts=("decode", "throughput", "prefill", "mixed", "steady", "soak", "floods"),
)
# Layers of a model of 27 billion parameters: a quarter of one, and four of its linear ones alone.
REUSE = replace(
    H200,
    name="reuse",
    hidden=5120,
    intermediate=17408,
    layers=16,
    attention_every=4,
    value_heads=48,
    clients=2,
    parts=("forks", "hits"),
)
LINEAR = replace(REUSE, name="linear", layers=4, attention_every=0, parts=("forks", "waypoints"))
SMALL = Size(
    name="small",
    is_judged=False,
    max_echoes=1.5,
    hidden=256,
    intermediate=128,
    layers=1,
    key_heads=2,
    value_heads=2,
    head_dim=16,
    dtype="float32",
    decode_rows=16,
    decode_steps=400,
    client_steps=100,
    clients=2,
    chunk_tokens=512,
    throughput_s=1.5,
    prefill_tokens=1_024,
    prefill_rounds=3,
    mixed_tokens=2_048,
    mixed_s=2.0,
    steady_sequences=8,
    steady_steps=100,
    steady_tokens=70,
    soak_s=2.0,
    flood_s=4.0,
    fork_rounds=20,
    reuse_tokens=2_048,
    reuse_rounds=5,
    parts=("decode", "throughput", "prefill", "mixed", "steady", "soak", "forks", "waypoints", "hits"),
)
CPU = replace(
    SMALL,
    name="cpu",
    parts=("decode", "tls"),
    scope="mixer",
    hidden=1024,
    key_heads=16,
    value_heads=16,
    head_dim=64,
    decode_rows=64,
    decode_steps=200,
    client_steps=200,
    ways=("unary", "stream"),
    is_beside_layer=True,
)
SIZES = {size.name: size for size in (H200, REUSE, LINEAR, SMALL, CPU)}
