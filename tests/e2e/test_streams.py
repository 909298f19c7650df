"""Residual streams over the wire: shapes of what goes in and comes out, their bytes, and who begins and ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.small_models import HYBRID, MAMBA2
from rigs.target import LAYER, Target, reason_of, step_request

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import AsyncClient, LayerSpan, Row, StatePoisoned, StepError
from deltaline_server.app import Server

HIDDEN, STREAMS = 64, 4
Array = NDArray[Any]


@pytest.fixture
def small_model(request: pytest.FixtureRequest) -> dict[str, Any]:
    model: dict[str, Any] = getattr(request, "param", HYBRID)
    return model | {"hc_mult": STREAMS}


def tokens(count: int, seed: int = 0) -> Array:
    """Embeddings `[count, hidden]`."""
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def streams_of(hidden: Array) -> Array:
    """The same as the beginning of every stream, `[count, streams, hidden]`."""
    return np.repeat(hidden[:, np.newaxis], STREAMS, axis=1)


@pytest.mark.parametrize("small_model", [HYBRID, MAMBA2], ids=["hybrid", "mamba2"], indirect=True)
async def test_steps_of_every_form_carry_streams(make_server: Callable[..., Server]) -> None:
    async with make_server() as server, AsyncClient(server.address) as client:
        info = await client.info()
        assert info.spans == (LayerSpan(0, 2, STREAMS, STREAMS),)
        assert info.input_shape() == info.output_shape() == (STREAMS, HIDDEN)
        one, two, three = await client.open_many(3)
        hidden = streams_of(tokens(70)) * np.arange(1, STREAMS + 1, dtype=np.float32)[:, np.newaxis]
        whole = await one.prefill(hidden)
        assert whole.shape == hidden.shape and np.isfinite(whole).all()
        await client.prefill([two, three], [hidden[:60]] * 2)
        drafts = await client.verify([two, three], np.stack([hidden[60:63]] * 2))  # [2, 3, streams, hidden]
        await client.commit([two, three], [3, 2])
        np.testing.assert_allclose(drafts[0], whole[60:63], rtol=1e-3, atol=1e-4)
        decoded = await client.decode([two, three], np.stack([hidden[63], hidden[62]]))  # [2, streams, hidden]
        np.testing.assert_allclose(decoded, whole[[63, 62]], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(await two.decode(hidden[64]), whole[64], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(await two.decode(hidden[65:66]), whole[65:66], rtol=1e-3, atol=1e-4)
        mixed = await client.step([Row.verify(two, hidden[66:68]), Row.prefill(three, hidden[63:70])], output="last")
        assert [output.shape for output in mixed.outputs] == [(1, STREAMS, HIDDEN)] * 2
        np.testing.assert_allclose(np.concatenate(mixed.outputs), whole[[67, 69]], rtol=1e-3, atol=1e-4)
        await two.commit(0)
        assert (await two.prefill(hidden[66:], output="none")).shape == (0, STREAMS, HIDDEN)


@pytest.mark.parametrize("shared_bytes", [0, 1 << 20], ids=["inline", "shared"])
@pytest.mark.parametrize(
    ("ends", "layer_span"),
    [
        ("none", LayerSpan(0, 2, STREAMS, STREAMS)),
        ("expand", LayerSpan(0, 2, 0, STREAMS)),
        ("head", LayerSpan(0, 2, STREAMS, 0)),
        ("both", LayerSpan(0, 2, 0, 0)),
    ],
)
async def test_ends_of_any_width_pass_however_tensors_travel(
    make_server: Callable[..., Server], ends: str, layer_span: LayerSpan, shared_bytes: int
) -> None:
    """A prefill larger than a message, one way or both, and what follows it are those of a server without limits."""
    hidden = tokens(300, seed=1)
    async with make_server(stream_ends=ends) as server, AsyncClient(server.address) as client:
        info = await client.info()
        assert info.spans == (layer_span,)
        given = streams_of(hidden) if layer_span.input_streams else hidden
        expected = await (await client.open()).prefill(given)
        assert expected.shape == (300, *info.output_shape())
    limit = 64 * STREAMS * HIDDEN * 4
    small = make_server(stream_ends=ends, inline_limit_bytes=limit, shared_memory_bytes=shared_bytes)
    async with small as server, AsyncClient(server.address, shared_memory_bytes=shared_bytes) as client:
        sequence, other, third = await client.open_many(3)
        # A message would hold its hidden states, but where streams begin here not its outputs.
        np.testing.assert_allclose(await third.prefill(given[:100]), expected[:100], rtol=1e-3, atol=1e-4)
        prompt, _ = await client.prefill([sequence, other], [given[:290], given[:2]])
        np.testing.assert_allclose(prompt, expected[:290], rtol=1e-3, atol=1e-4)
        verified = await sequence.verify(given[290:294])
        np.testing.assert_allclose(verified, expected[290:294], rtol=1e-3, atol=1e-4)
        await sequence.commit(1)
        both = await client.decode([sequence, other], given[[291, 2]])
        np.testing.assert_allclose(both, expected[[291, 2]], rtol=1e-3, atol=1e-4)
        rest = await sequence.prefill(given[292:], output="last")
        np.testing.assert_allclose(rest, expected[299:], rtol=1e-3, atol=1e-4)


async def test_spans_hand_streams_on(make_server: Callable[..., Server]) -> None:
    """Those of one server too: the first begins them, the last ends them."""
    hidden = tokens(40)
    async with make_server(stream_ends="both") as server, AsyncClient(server.address) as client:
        expected = await (await client.open()).prefill(hidden)
    async with make_server(spans="0:1,1:2", stream_ends="both") as server, AsyncClient(server.address) as client:
        info = await client.info()
        assert info.spans == (LayerSpan(0, 1, 0, STREAMS), LayerSpan(1, 1, STREAMS, 0))
        one, two = await client.open_many(2)
        between = await one.prefill(hidden, span=0)
        assert between.shape == (40, STREAMS, HIDDEN)
        np.testing.assert_allclose(await one.prefill(between, span=1), expected, rtol=1e-3, atol=1e-4)
        await client.prefill([two], [between[:39]], span=1)
        last = await client.decode([two], between[39:], span=1)
        np.testing.assert_allclose(last, expected[39:], rtol=1e-3, atol=1e-4)
        with pytest.raises(ValueError, match=r"4 streams of width 64, \[\.\.\., 4, 64\], got shape \(1, 64\)"):
            await one.decode(hidden[:1], span=1)


async def test_tokens_without_streams_are_not_taken_for_one_with_them(make_server: Callable[..., Server]) -> None:
    """As many of them as there are streams have the shape of one."""
    plain = tokens(STREAMS)
    async with make_server() as server, AsyncClient(server.address) as client:
        one, two = await client.open_many(2)
        for call in (
            one.prefill(plain),
            one.verify(plain),
            client.prefill([one, two], [plain, plain]),
            client.verify([one, two], np.stack([plain, plain])),
        ):
            with pytest.raises(
                ValueError, match=r"expected shape \[tokens, 4, 64\] of at least one token, got \(4, 64\)"
            ):
                await call
        assert (await one.decode(plain)).shape == (STREAMS, HIDDEN)  # of one token
        assert one.progress().position == 1


async def test_a_row_that_overflows_spoils_no_other(make_server: Callable[..., Server]) -> None:
    async with make_server() as server, AsyncClient(server.address) as client:
        bad, good = await client.open_many(2)
        hidden = streams_of(tokens(5))
        expected = await (await client.open()).prefill(hidden)
        huge = hidden.copy()
        huge[3, 2] = 3e38
        with pytest.raises(StepError) as refused:
            await client.step([Row.prefill(bad, huge), Row.prefill(good, hidden)])
        assert {row: type(error) for row, error in refused.value.errors.items()} == {0: StatePoisoned}
        np.testing.assert_allclose(refused.value.results[1].output, expected, rtol=1e-4, atol=1e-5)


async def send(target: Target, handle: int, hidden: Array) -> tuple[str, pb.StepResponse]:
    """Take a first prefill with raw values; the reason of its refusal, and its reply."""
    request = step_request(
        target,
        [handle],
        kind=[pb.ROW_KIND_PREFILL],
        step=[1],
        position=[0],
        accepted=[-1],
        query_start_loc=[0, len(hidden)],
        hidden=wire.encode(hidden),
    )
    _, message, body, status = await target.send(LAYER + "Step", request.SerializeToString())
    return ("" if status is None else f"{reason_of(status)}: {message}", pb.StepResponse.FromString(body))


@pytest.fixture
async def raw(make_server: Callable[..., Server]) -> Any:
    """A server that makes the streams and takes small messages, for raw steps."""
    server = make_server(stream_ends="expand", inline_limit_bytes=64 * HIDDEN * 4)
    async with server, AsyncClient(server.address) as client:
        target = Target(server, client, *await client.open_many(2))
        yield target
        await target.channel.close()


async def test_tensors_of_another_shape_are_refused(raw: Target) -> None:
    for shape in ((3, STREAMS, HIDDEN), (3, HIDDEN, 1), (3, HIDDEN + 1), (3 * HIDDEN,), (3, 1, 1, HIDDEN)):
        got, _ = await send(raw, raw.witness.handle, np.ones(shape, np.float32))
        assert got == f"INVALID_TENSOR: hidden.shape: must be [tokens, 64], got {list(shape)}"
    got, _ = await send(raw, raw.witness.handle, tokens(3))
    assert not got


async def test_outputs_that_are_too_wide_for_a_message_are_refused(raw: Target) -> None:
    """Its hidden states would fit, its outputs are four times as large."""
    got, _ = await send(raw, raw.witness.handle, tokens(17))
    assert got == "MESSAGE_TOO_LARGE: hidden: has outputs of 17408 bytes, expected at most 16384 in a message"
    got, reply = await send(raw, raw.witness.handle, tokens(16))
    assert not got and len(reply.hidden.inline) == 16384
