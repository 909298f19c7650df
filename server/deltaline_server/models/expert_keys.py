"""What configs call the sizes of a mixture of experts, and how they are read, as transformers reads them."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_EXPERTS, MAX_TOP_K
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.shapes import ExpertsShape
from deltaline_server.models.parts import MAX_SIZE


@dataclass(frozen=True)
class ExpertKeys:
    """Experts behind a softmax router, and a shared one behind a gate.

    num_experts, top_k: where a config says nothing. normalises: whether a token's weights are divided by their sum,
    None where `norm_topk_prob` says it.
    """

    num_experts: int
    top_k: int
    normalises: bool | None = None

    def read(self, config: ConfigReader) -> ExpertsShape:
        """Read their sizes. Raises ModelError naming the key."""
        config.require("hidden_act", "silu", default="silu")
        num_experts = config.integer("num_experts", 1, MAX_EXPERTS, default=self.num_experts)
        shape = ExpertsShape(
            num_experts=num_experts,
            top_k=config.integer("num_experts_per_tok", 1, min(num_experts, MAX_TOP_K), default=self.top_k),
            intermediate_size=config.integer("moe_intermediate_size", 1, MAX_SIZE, default=512),
            shared_size=config.integer("shared_expert_intermediate_size", 1, MAX_SIZE, default=512),
            normalises=config.flag("norm_topk_prob", default=True) if self.normalises is None else self.normalises,
        )
        if shape.num_shared > MAX_TOP_K:
            expected = f"at most {MAX_TOP_K} times moe_intermediate_size ({shape.intermediate_size})"
            raise config.fail("shared_expert_intermediate_size", expected)
        return shape
