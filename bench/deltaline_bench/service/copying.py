"""deltaline-server with layers that only copy: what a step costs around them. A process of its own."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from deltaline_server.__main__ import main
from deltaline_server.models.model import Model


def copy(model: Model, span: int, hidden: Tensor, *_: Any) -> Tensor:
    """Stand in for Model.forward."""
    return hidden.clone()


if __name__ == "__main__":
    Model.forward = copy  # type: ignore[assignment]
    sys.exit(main())
