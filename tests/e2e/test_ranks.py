"""Servers over ranks, as their launcher starts them: they answer as one process does, and end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules, with_magnitudes, write_adapter
from rigs.server_process import ServerProcess, is_alive
from rigs.small_models import GATED_DELTA_NET, HIDDEN
from rigs.until import until

from deltaline_client import AsyncClient, Retry, Stopping, Unavailable
from deltaline_server.models.config import ModelConfig

# Until callers are told, and until nothing is left.
TOLD_S, END_S = 5.0, 20.0
OPTIONS = ("--host-state-bytes", "16MiB", "--adapter-bytes", "16MiB", "--max-sequences", "8", "--drain-timeout-s", "0")
TWO = ("--tensor-parallel", "2")
# Once: else a client asks again, until its time is over.
ONCE = Retry(max_attempts=1)

Values = NDArray[np.float32]


def ranks_of(server: ServerProcess) -> list[int]:
    """The processes that the launcher has started, in that order."""
    return sorted(map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()))


async def use(client: AsyncClient, adapter: Path, kept: Path) -> tuple[Values, Values]:
    """Steps of all kinds, with an adapter and without, forks, and a sequence that leaves for a file; and its next step,
    of a token of zeros but for one."""
    source = np.random.default_rng(0)
    prompt, token, drafts = (source.standard_normal((n, HIDDEN), dtype=np.float32) for n in (100, 1, 4))
    await client.adapters.load("french", adapter)
    sequence, french = await client.open(), await client.open(adapter="french")
    made = await client.prefill([sequence, french], [prompt, prompt])
    made += [await sequence.verify(drafts)]
    await sequence.commit(2)
    children = await sequence.fork(2)
    made.append(await client.decode([sequence, *children], np.repeat(token, 3, axis=0)))
    await sequence.save(kept)
    assert np.abs(made[0] - made[1]).max() > 0.1
    return np.concatenate(made), await sequence.decode(np.eye(1, HIDDEN, dtype=np.float32))


async def test_two_ranks_answer_as_one_process_and_end_with_it_after_a_signal(tmp_path: Path) -> None:
    """Sequences that one of them has saved go on at the other."""
    adapter = tmp_path / "adapter"
    config = ModelConfig.from_mapping(GATED_DELTA_NET)
    tensors = with_magnitudes(adapter_tensors(base_weights(config), modules(config)))
    write_adapter(adapter, adapter_config(use_dora=True), tensors)
    async with ServerProcess(tmp_path, *OPTIONS) as one, ServerProcess(tmp_path, *OPTIONS, *TWO) as two:
        ranks = ranks_of(two)
        assert len(ranks) == 2
        async with AsyncClient(one.address) as alone, AsyncClient(two.address) as shared:
            expected, expected_next = await use(alone, adapter, tmp_path / "alone")
            made, made_next = await use(shared, adapter, tmp_path / "shared")
            np.testing.assert_allclose(made, expected, atol=1e-4)
            np.testing.assert_allclose(made_next, expected_next, atol=1e-4)
            for kept, client in (("alone", shared), ("shared", alone)):
                moved = await client.load_sequence(tmp_path / kept)
                on = await moved.decode(np.eye(1, HIDDEN, dtype=np.float32))
                np.testing.assert_allclose(on, expected_next, atol=1e-4)
        os.kill(two.pid, signal.SIGTERM)
        await until(lambda: not is_alive(two.pid), END_S)
        assert two.said("stopped") and not any(map(is_alive, ranks))


async def kill_and_see(tmp_path: Path, rank: int, number: int, world_size: int = 2) -> None:
    """A signal to a rank under load: callers are told UNAVAILABLE, readiness is off, and all of the group ends."""
    options = (*OPTIONS, "--tensor-parallel", str(world_size))
    async with (
        ServerProcess(tmp_path, *options, config=GATED_DELTA_NET | {"linear_num_key_heads": 4}) as server,
        AsyncClient(server.address, retry=ONCE, timeout=30) as client,
    ):
        ranks, last_s = ranks_of(server), [0.0]

        async def step() -> None:
            sequence = await client.open()
            while True:
                await sequence.decode(np.ones((1, HIDDEN), dtype=np.float32))
                last_s[0] = time.monotonic()

        stepping = [asyncio.create_task(step()) for _ in range(4)]
        await until(lambda: last_s[0])
        await asyncio.sleep(0.2)
        begin_s = time.monotonic()
        os.kill(ranks[rank], number)
        if number != signal.SIGSTOP:
            await until(lambda: not is_alive(ranks[rank]), TOLD_S)
        await until(lambda: not is_alive(server.pid), END_S)
        assert not any(map(is_alive, ranks))
        ended = await asyncio.gather(*stepping, return_exceptions=True)
        # By the server while it ends, or by the connection that has ended: both are UNAVAILABLE.
        assert all(isinstance(error, Stopping | Unavailable) for error in ended), ended
        if rank:  # nothing is told by rank 0 itself when that is killed
            assert server.said("the device is lost")
            assert last_s[0] - begin_s < TOLD_S


async def test_a_rank_that_is_killed_ends_the_group(tmp_path: Path) -> None:
    await kill_and_see(tmp_path, 1, signal.SIGKILL)


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("rank", "number"),
    # Of rank 0 that hangs, whoever asks for its readiness gets no answer.
    [(0, signal.SIGKILL), (0, signal.SIGSTOP), (-1, signal.SIGKILL), (-1, signal.SIGSTOP)],
)
async def test_any_rank_that_is_killed_or_hangs_ends_the_group(
    tmp_path: Path, rank: int, number: int, world_size: int
) -> None:
    await kill_and_see(tmp_path, rank % world_size, number, world_size)


@pytest.mark.sweep
@pytest.mark.parametrize("turn", range(50))
async def test_groups_end_whenever_a_rank_is_killed(tmp_path: Path, turn: int) -> None:
    await kill_and_see(tmp_path, turn % 2, signal.SIGKILL)


@pytest.mark.sweep
async def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    ranks = "-m torch.distributed.run --nproc-per-node 2 --master-port 29517"
    command = [*ranks.split(), "-m", "deltaline_server"]
    async with ServerProcess(tmp_path, *OPTIONS, command=command) as server, AsyncClient(server.address) as client:
        sequence = await client.open()
        assert np.isfinite(await sequence.prefill(np.ones((70, HIDDEN), dtype=np.float32))).all()
        [agent_rank, other] = ranks_of(server)
        os.kill(other, signal.SIGKILL)
        await until(lambda: not is_alive(agent_rank), END_S)
        await until(lambda: not is_alive(server.pid), END_S)


def start_all(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Run commands at the same time; exit code and standard error of each."""
    running = [subprocess.Popen([sys.executable, *one], stderr=subprocess.PIPE, text=True) for one in commands]
    return [(one.returncode, said) for one, (_, said) in ((one, one.communicate(timeout=60)) for one in running)]


def test_what_can_t_be_shared_is_refused_in_one_line(tmp_path: Path) -> None:
    """Heads that don't divide; ranks of other weights, as if each had been started with a seed of its own."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GATED_DELTA_NET))
    options = ("--random-init", str(config), "--device", "cpu", "--port", "0", "--metrics-port", "-1", "--link", "off")
    launched = ("-m", "deltaline_server", *options, "--log-level", "error")
    # The seed of a rank is its own environment's.
    env = "import os,sys; os.environ['DELTALINE_SEED'] = os.environ['RANK']; sys.argv[0] = 'x'; "
    run = "from deltaline_server.__main__ import main; sys.exit(main())"
    launcher = (
        "import os,sys; from deltaline_server.ranks.launcher import launch; "
        f"sys.exit(launch(2, [sys.executable, '-c', {env + run!r}, *sys.argv[1:]], os.environ))"
    )
    done = start_all([(*launched, "--tensor-parallel", "3"), ("-c", launcher, *options, "--log-level", "error")])
    heads, weights = (said for _, said in done)
    assert [code for code, _ in done] == [1, 1]
    assert heads == "deltaline-server: error: --tensor-parallel: expected a divisor of 2 key heads, got 3\n"
    assert "error: rank 1: expected the model and weights of rank 0, " in weights and weights.count("\n") == 1
