"""How a layer chooses experts: what `route_tokens` is told beside the logits."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels.checks import check_positive, parse_number

MAX_EXPERTS, MAX_TOP_K = 4096, 64
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Router:
    """Which experts a token has, and with which weights.

    Args:
        top_k: experts of a token, 1..64, the shared ones not counted.
        scoring: of logits, "softmax" over all experts or "sigmoid".
        normalize: the weights of a token's experts are divided by their sum, and by 1e-20 more.
        num_groups: of equal size, in which experts lie one behind the other. top_groups: so many groups of a token
            have its experts: those of the largest score, or of the largest sum of the two largest where there is a
            bias.
        scale: what multiplies the weights of the chosen ones.
        num_shared: experts that every token has; they lie behind the others, and come last in the weights.
        shared_gate: the weights of the shared ones are the sigmoid of one logit more; else 1.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """

    top_k: int
    scoring: str = "softmax"
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    num_shared: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_groups"):
            check_positive(name, getattr(self, name))
        if not isinstance(self.num_shared, int):
            raise TypeError(f"num_shared: expected an integer, got {type(self.num_shared).__name__}")
        for name in ("normalize", "shared_gate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {type(getattr(self, name)).__name__}")
        if self.top_k > MAX_TOP_K:
            raise ValueError(f"top_k: expected at most {MAX_TOP_K}, got {self.top_k}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring: expected {' or '.join(SCORINGS)}, got {self.scoring!r}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups: expected at most num_groups, {self.num_groups}, got {self.top_groups}")
        if not 0 <= self.num_shared <= MAX_TOP_K:
            raise ValueError(f"num_shared: expected 0..{MAX_TOP_K}, got {self.num_shared}")
        if self.shared_gate and self.num_shared == 0:
            raise ValueError("shared_gate: expected False without shared experts, got True")
        object.__setattr__(self, "scale", parse_number("scale", self.scale))

    @property
    def num_choices(self) -> int:
        return self.top_k + self.num_shared

    def check_experts(self, num_experts: int, *, has_bias: bool) -> None:
        """Raise ValueError unless a token can have its experts among so many, the shared ones not counted."""
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ValueError(f"logits: expected 1..{MAX_EXPERTS} experts, got {num_experts}")
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups: expected a divisor of {num_experts} experts, got {self.num_groups}")
        size = num_experts // self.num_groups
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"top_k: expected at most {self.top_groups * size} experts, those of {self.top_groups} groups of "
                f"{size}, got {self.top_k}"
            )
        if has_bias and self.num_groups > 1 and size < 2:
            raise ValueError(
                f"num_groups: expected groups of at least 2 experts beside a bias, got {self.num_groups} groups of 1"
            )
