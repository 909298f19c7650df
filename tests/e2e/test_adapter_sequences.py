"""Sequences with adapters on a whole server: bound when they open, mixed in a batch, and kept until their end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules, write_adapter
from rigs.programs import relative_error

from deltaline_client import AdapterInUse, AdaptersOff, AdapterState, AdapterUnknown, AsyncClient
from deltaline_server.app import Server
from deltaline_server.models.config import ModelConfig

TOLERANCE = 1e-4


def write(directory: Path, config: Path, seed: int) -> Path:
    """An adapter of every module of the model with this config.json."""
    model = ModelConfig.from_mapping(json.loads(config.read_text()))
    torch.manual_seed(seed)
    return write_adapter(
        directory, adapter_config(lora_alpha=0.1), adapter_tensors(base_weights(model), modules(model))
    )


@pytest.mark.parametrize("num_slots", [1, 4])
async def test_a_batch_mixes_adapters_and_each_sequence_keeps_its_own(
    make_server: Callable[..., Server], tmp_path: Path, num_slots: int
) -> None:
    async with (
        make_server(adapter_bytes=1 << 24, adapter_slots=num_slots) as server,
        AsyncClient(server.address) as client,
    ):
        french, german = (write(tmp_path / name, tmp_path / "config.json", len(name)) for name in ("french", "ancient"))
        hashes = [(await client.adapters.load(path.name, path)).adapter.content_hash for path in (french, german)]
        names = ["french", "ancient", None, "french"]
        mixed = [await client.open(adapter=name) for name in names]
        alone = [await client.open(adapter=name) for name in names]
        assert [one.adapter_hash for one in mixed] == [*hashes, b"", hashes[0]]
        rng = np.random.default_rng(0)
        width = (await client.info()).hidden_size
        prompts = rng.standard_normal((4, 20, width)).astype(np.float32)
        prompts[1:3] = prompts[0]
        outputs = await client.prefill(mixed, list(prompts))
        for sequence, prompt, output in zip(alone, prompts, outputs, strict=True):
            assert relative_error(output, await sequence.prefill(prompt)) < TOLERANCE
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert relative_error(outputs[one], outputs[other]) > 100 * TOLERANCE
        listed = {one.name: one.sequences for one in (await client.adapters.list()).adapters}
        assert listed == {"french": 4, "ancient": 2}
        with pytest.raises(AdapterInUse):
            await client.adapters.unload("french")
        assert await client.adapters.unload("french", drain=True) == 4
        with pytest.raises(AdapterUnknown):
            await client.open(adapter="french")
        # The name means the other content from now on, and not for who has it already.
        assert (await client.adapters.load("french", german)).adapter.content_hash == hashes[1]
        token = rng.standard_normal((1, width)).astype(np.float32)
        decoded = await client.decode(mixed, np.repeat(token, 4, axis=0))
        for sequence, output in zip(alone, decoded, strict=True):
            assert relative_error(output, (await sequence.decode(token))[0]) < TOLERANCE
        [description] = await client.describe(mixed[:1])
        assert (description.adapter, description.adapter_hash) == ("french", hashes[0])
        await client.close([*mixed, *alone])
        states = [(one.name, one.state) for one in (await client.adapters.list()).adapters]
        assert [name for name, _ in states] == ["ancient", "french"]
        assert all(state is not AdapterState.DRAINING for _, state in states)


async def test_a_server_without_adapters_opens_none(make_server: Callable[..., Server]) -> None:
    async with make_server() as server, AsyncClient(server.address) as client:
        with pytest.raises(AdaptersOff):
            await client.open(adapter="french")
        assert (await client.info()).adapter_bytes == 0
