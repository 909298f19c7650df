"""What configs say of latent attention mixers."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_BEHIND_LATENT, MAX_HEAD_DIM, MAX_LATENT_DIM
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.models.parts import MAX_HEADS, MAX_POSITIONS, MAX_SIZE

# Of a latent, two of whose channels are turned by an angle of 0 where there are none behind it.
MIN_LATENT_DIM = 4


@dataclass(frozen=True)
class LatentKeys:
    """Latent attention mixers whose keys are not rotated. positions: where a config says nothing. positions_keys: the
    spellings of its key. eps: of their norms, None for that of the other norms. is_sparse: whether an indexer selects
    tokens where there are more than `index_topk`."""

    positions: int
    positions_keys: tuple[str, ...] = ("max_position_embeddings",)
    eps: float | None = None
    is_sparse: bool = False

    def read(self, config: ConfigReader) -> LatentShape:
        """Read their sizes. Raises ModelError naming the key."""
        heads = config.integer("num_attention_heads", 1, MAX_HEADS)
        if config.get("num_key_value_heads") not in (None, heads):
            raise config.fail("num_key_value_heads", f"num_attention_heads ({heads}), as latents make keys for each")
        if config.flag("attention_bias", default=False):
            raise config.fail("attention_bias", "false")
        behind = config.integer("qk_rope_head_dim", 0, 0 if self.is_sparse else MAX_BEHIND_LATENT)
        if behind == 1:
            raise config.fail("qk_rope_head_dim", f"0 or 2..{MAX_BEHIND_LATENT}")
        # An indexer takes the ranks of queries.
        has_rank = self.is_sparse or config.get("q_lora_rank") is not None
        return LatentShape(
            num_heads=heads,
            latent_dim=config.integer("kv_lora_rank", MIN_LATENT_DIM, MAX_LATENT_DIM),
            behind_dim=behind,
            key_dim=config.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM),
            value_dim=config.integer("v_head_dim", 1, MAX_HEAD_DIM),
            query_rank=config.integer("q_lora_rank", 1, MAX_SIZE) if has_rank else 0,
            max_positions=config.integer(
                config.spelling(*self.positions_keys), 1, MAX_POSITIONS, default=self.positions
            ),
            max_selected=self._selected(config),
        )

    def _selected(self, config: ConfigReader) -> int:
        """Most tokens of a sequence of which an indexer selects all, 0 where there is no indexer."""
        if not self.is_sparse:
            return 0
        if not config.flag("index_kpool_always_select_tail", default=True):
            raise config.fail("index_kpool_always_select_tail", "true (else the last tokens may see too few)")
        selected = config.integer("index_topk", 1, MAX_POSITIONS, default=2048)
        pool = config.integer("index_kpool", 1, MAX_POSITIONS, default=16)
        if selected % pool:
            raise config.fail(
                "index_topk",
                f"a multiple of index_kpool ({pool}; 16 without), as whole pools are selected (2048 without)",
            )
        return selected
