"""The table of families, by model type."""

from __future__ import annotations

from collections.abc import Mapping

from deltaline_server.models.families.bamba import BAMBA
from deltaline_server.models.families.family import Family
from deltaline_server.models.families.glm5_next import GLM5_NEXT
from deltaline_server.models.families.jamba import JAMBA
from deltaline_server.models.families.kimi import KIMI_LINEAR
from deltaline_server.models.families.lfm2 import LFM2
from deltaline_server.models.families.mamba import MAMBA
from deltaline_server.models.families.nemotron_h import NEMOTRON_H
from deltaline_server.models.families.olmo_hybrid import OLMO_HYBRID
from deltaline_server.models.families.qwen import QWEN
from deltaline_server.models.families.zamba2 import ZAMBA2

FAMILIES: Mapping[str, Family] = {
    **QWEN,
    **MAMBA,
    "nemotron_h": NEMOTRON_H,
    **BAMBA,
    "zamba2": ZAMBA2,
    "jamba": JAMBA,
    **LFM2,
    "olmo_hybrid": OLMO_HYBRID,
    "kimi_linear": KIMI_LINEAR,
    **GLM5_NEXT,
}
