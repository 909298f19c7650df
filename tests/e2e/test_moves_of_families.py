"""Sequences of every family that are moved with pages, an adapter and a pending verify: the same bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.test_moves import pair, reasons
from e2e.test_moves_by_link import link_of, linked_pair
from rigs.adapter_cases import adapter_config, tensors_of
from rigs.linked import FAST
from rigs.moved_sequences import PREFILL, VERIFY, Calls, all_kinds
from rigs.small_models import BAMBA, EXPERTS, GRANITE, LFM2_MOE, MAMBA1, OLMO
from rigs.stored_states import MODELS
from safetensors.torch import save

from deltaline_client import AsyncClient

# Families with states of a kind that others of the table have too.
ALIKE = {
    "falcon_mamba": MAMBA1 | {"model_type": "falcon_mamba"},
    "experts": EXPERTS,
    "bamba": BAMBA,
    "granite": GRANITE,
    "olmo": OLMO,
    "lfm2_moe": LFM2_MOE,
}
CASES = [pytest.param(*model, id=name) for name, model in MODELS.items()]
CASES += [pytest.param(model, None, id=name, marks=pytest.mark.sweep) for name, model in ALIKE.items()]


@pytest.mark.parametrize(("model", "spans"), CASES)
@pytest.mark.parametrize(("way", "state_dtype"), [("grpc", "float32"), ("link", "bfloat16")])
async def test_a_moved_sequence_goes_on_bit_by_bit(
    tmp_path: Path, model: dict[str, Any], spans: list[range] | None, way: str, state_dtype: str
) -> None:
    options: dict[str, Any] = {"adapter_bytes": 1 << 22, "page_size": 16, "state_dtype": state_dtype}
    if spans is not None:
        options["spans"] = ",".join(f"{span.start}:{span.stop}" for span in spans)
    make = pair if way == "grpc" else linked_pair
    async with make(tmp_path, model, **options) as (source, target), Calls() as calls:
        served = source.runtime.model
        config, tensors = json.dumps(adapter_config(use_dora=True)).encode(), save(tensors_of(served.layout))
        for server in (source, target):
            async with AsyncClient(server.address, retry=FAST) as client:
                await client.adapters.load("a", config=config, tensors=tensors)
        one, twin = await calls.open(source.address, 2, adapter="a")
        for each in (one, twin):
            for span, ends in enumerate(served.ends):
                each.shape = ends.input_shape
                await each.step(PREFILL, 40, span=span)
                await each.step(VERIFY, 4, span=span)
        assert not reasons(await calls.move([one], target.address if way == "grpc" else link_of(target)))
        has_pages = source.runtime.table.pages is not None
        assert one.address == target.address and (source.runtime.mover.bytes_ahead > 0) == has_pages
        for span in range(len(served.ends)):
            assert await one.again(span) == await twin.again(span)
            for each in (one, twin):
                await each.commit(2, span)
            assert await all_kinds(one, span) == await all_kinds(twin, span)
