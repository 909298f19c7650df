"""States that travel by file: saved from one server, loaded into another, by both clients and every way, bit by bit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.conftest import server_of
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules
from rigs.killing_proxy import KillingProxy
from rigs.linked import FAST, Driven, tokens
from rigs.served import served
from rigs.small_models import GATED_DELTA_NET, HYBRID
from safetensors.torch import save

from deltaline_client import (
    AsyncClient,
    HostTierOff,
    SnapshotState,
    SnapshotUnknown,
    StateDamaged,
    StateMismatch,
    Tier,
)
from deltaline_server.app import Server
from deltaline_server.models.config import ModelConfig

HOST = {"host_state_bytes": 8 << 20}


def folder_of(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


def goes_on(do: Callable[[Any], Any], sequence: Any) -> list[bytes]:
    """What a sequence answers to steps of every kind."""
    outputs = [do(sequence.decode(tokens(1, 1)[0])), do(sequence.prefill(tokens(70, 2)))]
    outputs.append(do(sequence.verify(tokens(3, 3))))
    do(sequence.commit(2))
    outputs.append(do(sequence.decode(tokens(1, 4)[0])))
    return [np.asarray(output).tobytes() for output in outputs]


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_saved_state_goes_on_elsewhere_bit_by_bit(
    driven: Driven, tmp_path: Path, device: str, each_small_model: dict[str, Any], options: dict[str, str]
) -> None:
    do, path = driven.do, tmp_path / "state"
    with served(server_of(each_small_model, folder_of(tmp_path, "one"), device, **HOST, **options)) as address:
        client = driven.make(address, retry=FAST)
        sequence = do(client.open())
        do(sequence.prefill(tokens(37)))
        do(sequence.verify(tokens(4, 5)))
        do(sequence.commit(2))
        snapshot = do(sequence.snapshot())
        do(snapshot.save(path))
        assert path.read_bytes() == do(snapshot.export()) and [one.name for one in tmp_path.glob("state*")] == ["state"]
        expected = goes_on(do, sequence)
        do(client.disconnect())
    with served(server_of(each_small_model, folder_of(tmp_path, "two"), device, **HOST, **options)) as address:
        client = driven.make(address, retry=FAST)
        came = do(client.snapshots.load(path, pin=True, lease_s=30.0))
        assert (came.position, came.pinned, came.tier) == (39, True, Tier.HOST) and came.id != snapshot.id
        assert 20 < came.lease_remaining_s <= 30
        for child in do(came.restore(2)):
            assert goes_on(do, child) == expected
        again = do(client.snapshots.load(path.read_bytes()))
        assert goes_on(do, do(client.open(snapshot=again))) == expected
        do(client.disconnect())


@pytest.mark.parametrize("way", ["grpc", "link", "front end"])
def test_both_clients_by_every_way(driven: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A state of several pieces."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    link = str(tmp_path / "run" / "link.sock") if way == "link" else "off"
    wide = GATED_DELTA_NET | {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    options = {"link": link, "front_ends": int(way == "front end"), "max_sequences": 4, **HOST}
    with served(server_of(wide, tmp_path, "cpu", **options)) as address:
        do, client = driven.do, driven.make(f"link:{link}" if way == "link" else address, retry=FAST)
        sequence = do(client.open())
        do(sequence.prefill(tokens(5)))
        snapshot = do(sequence.snapshot())
        path = tmp_path / "state"
        do(snapshot.save(path))
        assert path.stat().st_size > 2 << 20
        came = do(client.snapshots.load(path))
        [child] = do(came.restore())
        assert goes_on(do, child) == goes_on(do, sequence)
        damaged = bytearray(path.read_bytes())
        damaged[1 << 20] ^= 1
        with pytest.raises(StateDamaged):
            do(client.snapshots.load(bytes(damaged)))
        with pytest.raises(StateDamaged):
            do(client.snapshots.load(b""))
        with pytest.raises(FileNotFoundError):
            do(client.snapshots.load(tmp_path / "nothing"))
        with pytest.raises(IsADirectoryError):
            do(client.snapshots.load(tmp_path))
        with pytest.raises(FileNotFoundError):
            do(came.save(tmp_path / "none" / "state"))
        assert do(client.snapshots.release([came, snapshot])) == [SnapshotState.RELEASED] * 2
        with pytest.raises(SnapshotUnknown):
            do(came.save(path))
        assert path.stat().st_size == len(damaged), "what was there stays"
        assert do(client.snapshots.list()) == []
        do(client.disconnect())


async def test_another_model_s_state_is_refused(tmp_path: Path) -> None:
    async def exported(name: str, **options: Any) -> bytes:
        async with (
            server_of(GATED_DELTA_NET, folder_of(tmp_path, name), "cpu", link="off", **HOST, **options) as server,
            AsyncClient(server.address, retry=FAST) as client,
        ):
            sequence = await client.open()
            for span in range(len((await client.info()).spans)):
                await sequence.prefill(tokens(3), span=span)
            return await (await sequence.snapshot()).export()

    others = [
        await exported("another seed", seed=8),
        await exported("another type", state_dtype="bfloat16"),
        await exported("other spans", spans="0:1,1:2"),
    ]
    mine = await exported("the same", max_draft_tokens=2, max_sequences=3)
    async with (
        server_of(GATED_DELTA_NET, tmp_path, "cpu", link="off", **HOST) as server,
        AsyncClient(server.address, retry=FAST) as client,
    ):
        for other in others:
            with pytest.raises(StateMismatch):
                await client.snapshots.load(other)
        assert (await client.snapshots.load(mine)).position == 3
    async with (
        server_of(HYBRID, tmp_path, "cpu", link="off") as server,
        AsyncClient(server.address, retry=FAST) as client,
    ):
        with pytest.raises(HostTierOff, match="--host-state-bytes"):
            await client.snapshots.load(mine)


async def test_a_state_of_an_adapter_needs_the_same_there(tmp_path: Path) -> None:
    shape = ModelConfig.from_mapping(GATED_DELTA_NET)
    tensors = adapter_tensors(base_weights(shape), modules(shape), rank=2)
    config = json.dumps(adapter_config(r=2)).encode()
    options = {"adapter_bytes": 1 << 22, "link": "off", **HOST}
    async with (
        server_of(GATED_DELTA_NET, folder_of(tmp_path, "one"), "cpu", **options) as server,
        AsyncClient(server.address, retry=FAST) as client,
    ):
        await client.adapters.load("a", config=config, tensors=save(tensors))
        sequence = await client.open(adapter="a")
        await sequence.prefill(tokens(9))
        snapshot = await sequence.snapshot()
        content = await snapshot.export()
        expected = [np.asarray(await sequence.decode(token)).tobytes() for token in tokens(3, 1)]
    async with (
        server_of(GATED_DELTA_NET, folder_of(tmp_path, "two"), "cpu", **options) as server,
        AsyncClient(server.address, retry=FAST) as client,
    ):
        with pytest.raises(StateMismatch, match="adapter"):
            await client.snapshots.load(content)
        other = {name: tensor * 2 for name, tensor in tensors.items()}
        await client.adapters.load("a", config=config, tensors=save(other))
        with pytest.raises(StateMismatch, match="adapter"):
            await client.snapshots.load(content)
        await client.adapters.unload("a")
        await client.adapters.load("a", config=config, tensors=save(tensors))
        came = await client.snapshots.load(content)
        assert (came.adapter, came.adapter_hash) == ("a", snapshot.adapter_hash)
        [child] = await came.restore()
        assert [np.asarray(await child.decode(token)).tobytes() for token in tokens(3, 1)] == expected


@pytest.mark.parametrize("device", ["cpu"])
async def test_connections_that_break_cost_a_state_nothing(tmp_path: Path, make_server: Callable[..., Server]) -> None:
    async with make_server(link="off", **HOST) as server, AsyncClient(server.address, retry=FAST) as direct:
        sequence = await direct.open()
        await sequence.prefill(tokens(5))
        snapshot = await sequence.snapshot()
        whole = await snapshot.export()
        lives = [size * len(whole) // 4 for size in (1, 2, 3, 1, 2, 3)]
        async with KillingProxy(server.address, lives) as proxy, AsyncClient(proxy.address, retry=FAST) as client:
            [one] = await client.snapshots.list()
            path = tmp_path / "state"
            await one.save(path)
            assert path.read_bytes() == whole
            came = await client.snapshots.load(path)
            assert proxy.kills == len(lives)
        assert {one.id for one in await direct.snapshots.list()} == {snapshot.id, came.id}
