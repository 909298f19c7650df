"""Sequences that travel by file: they go on at another server as if nothing had been, by both clients, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.conftest import server_of
from e2e.test_state_files import HOST, folder_of, goes_on
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules
from rigs.killing_proxy import KillingProxy
from rigs.linked import FAST, Driven, tokens
from rigs.served import served
from rigs.small_models import GATED_DELTA_NET, HYBRID
from safetensors.torch import save

from deltaline_client import AsyncClient, InvalidRequest, SequenceState, StateMismatch, VerifyPending
from deltaline_server.models.config import ModelConfig


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pending_verify_goes_on_elsewhere_bit_by_bit(
    driven: Driven, tmp_path: Path, device: str, each_small_model: dict[str, Any], options: dict[str, str]
) -> None:
    do, path = driven.do, tmp_path / "sequence"
    with served(server_of(each_small_model, folder_of(tmp_path, "one"), device, **HOST, **options)) as address:
        client = driven.make(address, retry=FAST)
        sequence = do(client.open())
        do(sequence.prefill(tokens(37)))
        do(sequence.verify(tokens(4, 5)))
        do(sequence.save(path))
        with pytest.raises(InvalidRequest, match="sequence"):
            do(client.snapshots.load(path))
        with pytest.raises(VerifyPending):
            do(sequence.snapshot())
        do(sequence.commit(2))
        expected = goes_on(do, sequence)
        assert do(client.snapshots.list()) == [], "it is no snapshot"
        do(client.disconnect())
    with served(server_of(each_small_model, folder_of(tmp_path, "two"), device, **HOST, **options)) as address:
        client = driven.make(address, retry=FAST)
        for source in (path, path.read_bytes()):
            came = do(client.load_sequence(source, lease_s=30.0))
            progress = came.progress()
            assert (progress.step, progress.position, progress.pending_tokens) == (2, 37, 4)
            [told] = do(client.describe([came]))
            assert told.state is SequenceState.OPEN and 20 < told.lease_remaining_s <= 30
            do(came.commit(2))
            assert goes_on(do, came) == expected
            do(came.close())
        do(client.disconnect())


def test_a_file_of_another_kind_is_told_with_the_call_that_takes_it(driven: Driven, tmp_path: Path) -> None:
    do = driven.do
    with served(server_of(GATED_DELTA_NET, tmp_path, "cpu", **HOST)) as address:
        client = driven.make(address, retry=FAST)
        sequence = do(client.open())
        do(sequence.prefill(tokens(3)))
        whole, snapshot = do(sequence.export()), do(do(sequence.snapshot()).export())
        for load, content, message in (
            (
                client.snapshots.load,
                whole,
                "the file is a sequence's, which is loaded with it, in Python by load_sequence",
            ),
            (
                client.load_sequence,
                snapshot,
                "the file is a snapshot's, loaded without it, in Python by snapshots.load",
            ),
            (client.snapshots.load, b"x" * 100, "expected the file of a snapshot or of a sequence, got something else"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                do(load(content))
        do(client.disconnect())


def test_spans_that_are_uneven_travel(driven: Driven, tmp_path: Path) -> None:
    do, options = driven.do, {"spans": "0:1,1:2", **HOST}
    with served(server_of(HYBRID, tmp_path, "cpu", **options)) as address:
        client = driven.make(address, retry=FAST)
        sequence = do(client.open())
        do(sequence.prefill(tokens(40), span=1))
        came = do(client.load_sequence(do(sequence.export())))
        assert [came.progress(span).position for span in (0, 1)] == [0, 40]
        for span, count in ((0, 40), (1, 3), (0, 3)):
            mine, its = (do(one.prefill(tokens(count, count), span=span)) for one in (sequence, came))
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))
        do(client.disconnect())


def test_a_commit_that_waits_for_a_step_is_made_first(driven: Driven, tmp_path: Path) -> None:
    do = driven.do
    with served(server_of(GATED_DELTA_NET, tmp_path, "cpu", **HOST)) as address:
        client = driven.make(address, retry=FAST)
        sequence = do(client.open())
        do(sequence.verify(tokens(4)))
        do(sequence.commit(3))
        came = do(client.load_sequence(do(sequence.export())))
        assert (came.position, came.progress().pending_tokens) == (3, 0)
        assert goes_on(do, came) == goes_on(do, sequence)
        do(client.disconnect())


async def test_an_adapter_has_to_be_the_same_there(tmp_path: Path) -> None:
    shape = ModelConfig.from_mapping(GATED_DELTA_NET)
    tensors = adapter_tensors(base_weights(shape), modules(shape), rank=2)
    config = json.dumps(adapter_config(r=2)).encode()
    options = {"adapter_bytes": 1 << 22, "link": "off", **HOST}
    async with (
        server_of(GATED_DELTA_NET, folder_of(tmp_path, "one"), "cpu", **options) as one,
        AsyncClient(one.address, retry=FAST) as client,
        server_of(GATED_DELTA_NET, folder_of(tmp_path, "two"), "cpu", **options) as two,
        AsyncClient(two.address, retry=FAST) as other,
    ):
        await client.adapters.load("a", config=config, tensors=save(tensors))
        sequence = await client.open(adapter="a")
        await sequence.prefill(tokens(9))
        content = await sequence.export()
        with pytest.raises(StateMismatch, match="adapter"):
            await other.load_sequence(content)
        await other.adapters.load("a", config=config, tensors=save(tensors))
        came = await other.load_sequence(content)
        assert (came.adapter, came.adapter_hash) == ("a", sequence.adapter_hash)
        for token in tokens(3, 1):
            np.testing.assert_array_equal(await came.decode(token), await sequence.decode(token))
        await came.close()
        await other.adapters.unload("a")


async def test_connections_that_break_open_one_sequence(tmp_path: Path) -> None:
    async with (
        server_of(GATED_DELTA_NET, tmp_path, "cpu", link="off", **HOST) as server,
        AsyncClient(server.address, retry=FAST) as direct,
    ):
        sequence = await direct.open()
        await sequence.prefill(tokens(5))
        content = await sequence.export()
        lives = [size * len(content) // 4 for size in (1, 2, 3)]
        async with KillingProxy(server.address, lives) as proxy, AsyncClient(proxy.address, retry=FAST) as client:
            came = await client.load_sequence(content)
            assert proxy.kills == len(lives)
            assert server.runtime.table.num_open == 2
            np.testing.assert_array_equal(await came.decode(tokens(1)[0]), await sequence.decode(tokens(1)[0]))
