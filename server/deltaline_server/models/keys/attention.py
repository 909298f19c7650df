"""What configs say of attention mixers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltaline_kernels import MAX_HEAD_DIM
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.shapes import AttentionShape, QkNorm
from deltaline_server.models.keys.rotary import WHOLE_HEADS, RotaryKeys
from deltaline_server.models.parts import MAX_HEADS, MAX_POSITIONS, MAX_SIZE

# Of Zamba2 where its config asks for a long context, whatever it says of positions.
LONG_POSITIONS = 16384


@dataclass(frozen=True)
class AttentionKeys:
    """Attention mixers. heads, kv_heads, head_dim, positions: where a config says nothing. None: for heads it must say
    it, kv_heads are as many as heads, head_dim is hidden_size / heads.

    name: what stands before the names of a mixer's tensors. rotates: whether a config has rotary embeddings, None where
    all have; rotary: None where none has. scale: the key of what multiplies the products of queries and keys, None
    where the head's size says it. bias: the key of whether projections have biases, None where they have none.
    takes_embeddings: whether the input is hidden states and embeddings beside each other.
    key_scale, input_scale, output_scale: the keys of what keys, input and output are multiplied by, None where nothing
    is. out, norms: as AttentionFamily has them.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 32768
    name: str = "self_attn."
    is_gated: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    rotary: RotaryKeys | None = WHOLE_HEADS
    rotates: Callable[[ConfigReader], bool] | None = None
    scale: str | None = None
    bias: str | None = "attention_bias"
    key_scale: str | None = None
    input_scale: str | None = None
    output_scale: str | None = None
    takes_embeddings: bool = False
    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm.weight", "k_norm.weight")

    def read(self, config: ConfigReader) -> AttentionShape:
        """Read their sizes. Raises ModelError naming the key, also of a kind of rotary embedding that is not served."""
        heads = config.integer("num_attention_heads", 1, MAX_HEADS, default=self.heads)
        kv_heads, named = heads, config.says("num_key_value_heads")  # null: as many as heads
        if config.get("num_key_value_heads") is not None or (self.kv_heads is not None and not named):
            kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, default=self.kv_heads)
        if heads % kv_heads:
            raise config.fail("num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})")
        head_dim = self._head_dim(config, heads)
        scale = None if self.scale is None else config.positive(self.scale, default=1.0)
        positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS, default=self.positions)
        if self.takes_embeddings:
            scale = (head_dim / 2) ** -0.5
            positions = LONG_POSITIONS if config.flag("use_long_context", default=False) else positions
        rotary_dim, theta, scaling = 0, 1.0, None
        if self.rotary is not None and (self.rotates is None or self.rotates(config)):
            rotary_dim, theta, scaling = self.rotary.read(config, head_dim, positions)
        if self.key_scale is not None and (keys := config.positive(self.key_scale, default=1.0)) != 1.0:
            scale = (head_dim**-0.5 if scale is None else scale) * keys
        return AttentionShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=positions,
            has_bias=self.bias is not None and config.flag(self.bias, default=False),
            is_gated=self.is_gated,
            qk_norm=self.qk_norm,
            scale=scale,
            input_scale=1.0 if self.input_scale is None else config.positive(self.input_scale, default=1.0),
            output_scale=1.0 if self.output_scale is None else config.positive(self.output_scale, default=1.0),
        )

    def _head_dim(self, config: ConfigReader, heads: int) -> int:
        """Channels of a head."""
        if self.takes_embeddings:
            head_dim = 2 * config.integer("hidden_size", 1, MAX_SIZE) // heads
            if not 2 <= head_dim <= MAX_HEAD_DIM:
                raise config.fail("num_attention_heads", f"twice hidden_size / 2..{MAX_HEAD_DIM}")
            inputs = 2 * config.integer("hidden_size", 1, MAX_SIZE)
            for key, size in (
                ("attention_head_dim", head_dim),
                ("head_dim", head_dim),
                ("attention_hidden_size", inputs),
            ):
                if config.get(key) not in (None, size):
                    raise config.fail(key, f"{size}, which follows from hidden_size and num_attention_heads")
            return head_dim
        if self.head_dim is not None or config.get("head_dim") is not None:
            return config.integer("head_dim", 2, MAX_HEAD_DIM, default=self.head_dim)
        head_dim = config.integer("hidden_size", 1, MAX_SIZE) // heads
        if not 2 <= head_dim <= MAX_HEAD_DIM:
            raise config.fail("num_attention_heads", f"hidden_size / 2..{MAX_HEAD_DIM}, as there is no head_dim")
        return head_dim
