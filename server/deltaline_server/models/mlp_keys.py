"""What configs call the sizes of MLPs and of mixtures of experts, and how they are read, as transformers reads them."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_EXPERTS, MAX_TOP_K
from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.shapes import SIGMOID, SOFTMAX, ExpertsShape
from deltaline_server.models.parts import MAX_SIZE


@dataclass(frozen=True)
class ExpertKeys:
    """Experts behind a router, and a shared one behind a gate if has_shared_gate.

    shared_key: None where there is no shared one.

    num_experts, top_k, inner, shared: where a config says nothing; None where it must. normalises: whether a token's
    weights are divided by their sum, None where `norm_topk_prob` says it. count_key, inner_key, shared_key: the keys of
    the number of experts, and of their sizes. activation_key: the key that must say their activation. scoring: of the
    router; of sigmoids `routed_scaling_factor` is read, and `n_group` and `topk_group` if has_groups. score_bias: the
    key of whether there is a bias of scores, None where the family says it. absent: keys of parts that are not served.
    """

    num_experts: int
    top_k: int
    normalises: bool | None = None
    inner: int | None = 512
    shared: int | None = 512
    count_key: str = "num_experts"
    inner_key: str = "moe_intermediate_size"
    shared_key: str | None = "shared_expert_intermediate_size"
    has_shared_gate: bool = True
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"
    scoring: str = SOFTMAX
    has_groups: bool = True
    score_bias: str | None = None
    absent: tuple[str, ...] = ()

    def read(self, config: ConfigReader) -> ExpertsShape:
        """Read their sizes. Raises ModelError naming the key."""
        config.require(self.activation_key, self.activation, default=self.activation)
        for key in self.absent:
            if config.get(key):
                raise config.fail(key, "none beside experts (it is not served)")
        num_experts = config.integer(self.count_key, 1, MAX_EXPERTS, default=self.num_experts)
        groups = top_groups = 1
        scale = 1.0
        if self.scoring == SIGMOID:
            if self.has_groups:
                groups = config.integer("n_group", 1, num_experts, default=1)
                top_groups = config.integer("topk_group", 1, groups, default=1)
            scale = config.positive("routed_scaling_factor", default=1.0)
        size = num_experts // groups
        if num_experts % groups or (groups > 1 and size < 2):
            raise config.fail("n_group", f"a divisor of {num_experts} experts, with at least 2 in a group")
        shape = ExpertsShape(
            num_experts=num_experts,
            top_k=config.integer("num_experts_per_tok", 1, min(top_groups * size, MAX_TOP_K), default=self.top_k),
            intermediate_size=config.integer(self.inner_key, 1, MAX_SIZE, default=self.inner),
            shared_size=self._shared_size(config),
            normalises=config.flag("norm_topk_prob", default=True) if self.normalises is None else self.normalises,
            has_shared_gate=self.has_shared_gate and self.shared_key is not None,
            activation=self.activation,
            scoring=self.scoring,
            num_groups=groups,
            top_groups=top_groups,
            weight_scale=scale,
            has_score_bias=self.score_bias is None or config.flag(self.score_bias, default=True),
        )
        if self.shared_key is not None and shape.num_shared > MAX_TOP_K:
            expected = f"at most {MAX_TOP_K} times {self.inner_key} ({shape.intermediate_size})"
            raise config.fail(self.shared_key, expected)
        return shape

    def _shared_size(self, config: ConfigReader) -> int:
        """The size of the shared expert, 0 where there is none."""
        return 0 if self.shared_key is None else config.integer(self.shared_key, 1, MAX_SIZE, default=self.shared)


def adjusted_size(config: ConfigReader) -> int:
    """The size of the dense MLPs of LFM2, as Lfm2MLP of transformers computes it.

    `block_ff_dim`, or `intermediate_size`; where it is adjusted two thirds of it, times `block_ffn_dim_multiplier`, up
    to a multiple of `block_multiple_of`. Raises ModelError naming the key.
    """
    key = config.spelling("block_ff_dim", "intermediate_size")
    inner = config.integer(key, 1, MAX_SIZE, default=12288)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    if not (config.says("block_ffn_dim_multiplier") and config.get("block_ffn_dim_multiplier") is None):
        inner = int(config.positive("block_ffn_dim_multiplier", default=1.0) * inner)
        multiple = config.integer("block_multiple_of", 1, MAX_SIZE, default=256)
        inner = -(-inner // multiple) * multiple
    if not 1 <= inner <= MAX_SIZE:
        raise config.fail(key, f"MLPs of 1..{MAX_SIZE} channels once adjusted (block_auto_adjust_ff_dim), not {inner}")
    return inner
