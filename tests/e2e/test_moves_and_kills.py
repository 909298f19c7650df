"""kill -9 of the source, the target and the caller of moves, under load: no sequence goes on from a state that is not
its own, and what is lost is said to be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import numpy as np
import pytest
from e2e.test_state_files import folder_of
from rigs.moved_sequences import DECODE, PREFILL, Asked, Calls, Refused, Stepped
from rigs.routers import free_port
from rigs.server_process import ServerProcess
from rigs.until import until

from deltaline.v1 import layer_service_pb2 as pb

NUM_SEQUENCES, NUM_STEPS, PAUSE_S = 16, 150, 0.02
HOST = ("--host-state-bytes", "16MiB", "--advertise", "127.0.0.1")


class Life:
    """A sequence that is stepped until it is over or lost, wherever it lives. first: as it was before."""

    def __init__(self, one: Stepped, expected: list[bytes]) -> None:
        """expected: what each step gives."""
        self.one, self.first, self._expected = one, replace(one), expected
        self.num_steps, self.is_lost, self.is_over = 0, False, False

    def went_on(self, num_steps: int) -> bool:
        """Whether it was stepped more often, or is lost, or through."""
        return self.is_lost or self.num_steps > num_steps + 3 or self.num_steps == len(self._expected)

    async def run(self) -> None:
        while not self.is_over and self.num_steps < len(self._expected):
            await asyncio.sleep(PAUSE_S)
            answer = await self.answer(asked(self.num_steps + 1))
            if answer is None:
                self.is_lost = True
                return
            assert answer.position[0] == asked(self.num_steps + 2).position
            output, wanted = (
                np.frombuffer(content, np.float32) for content in (answer.hidden.inline, self._expected[self.num_steps])
            )
            np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-4)
            self.num_steps += 1

    async def answer(self, step: Asked) -> pb.StepResponse | None:
        """The answer to a step, of whoever owns the sequence; None where that is gone."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.one.send(step)
                except Refused as refused:
                    if refused.reason == "STATE_LOST":
                        return None
                    assert refused.reason == "STATE_ELSEWHERE", refused.reason
                    self.one.follow(refused.metadata)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                    await asyncio.sleep(0.02)


def asked(step: int) -> Asked:
    """The step of a number: a prefill of 5 tokens, and then decodes."""
    return Asked(1, 0, PREFILL, 5) if step == 1 else Asked(step, step + 3, DECODE, 1)


async def expected_of(calls: Calls, address: str) -> list[bytes]:
    """What a sequence answers that nobody moves."""
    [one] = await calls.open(address)
    answers = [await one.send(asked(step + 1)) for step in range(NUM_STEPS)]
    await one.close()
    return [answer.hidden.inline for answer in answers]


class Servers:
    """A source and a target, processes, each of which comes back under its name after it was killed."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._folders = {name: folder_of(folder, name) for name in ("target", "source")}
        state = ("--state-dir", str(folder / "state"), "--state-dir-bytes", "16MiB")
        self._options = {"target": HOST, "source": (*HOST, *state)}
        self.processes, self.addresses = dict[str, ServerProcess](), dict[str, str]()

    async def start(self) -> None:
        await self._start("target", str(free_port()))
        self._options["source"] += ("--move-peers", self.addresses["target"])
        await self._start("source", str(free_port()))

    async def _start(self, name: str, port: str) -> None:
        server = ServerProcess(self._folders[name], *self._options[name], "--port", port)
        self.processes[name] = await self._stack.enter_async_context(server)
        self.addresses[name] = server.address

    async def kill(self, name: str) -> None:
        """Kill one; its successor serves on return."""
        self.processes[name].kill()
        await self._start(name, self.addresses[name].rpartition(":")[2])


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.sweep, pytest.mark.timeout(1800)])])
async def test_who_is_killed_leaves_at_most_one_owner(tmp_path: Path, rounds: int) -> None:
    random, lost, moved = Random(rounds), Counter[str](), Counter[str]()
    async with AsyncExitStack() as stack:
        servers, calls = Servers(tmp_path, stack), await stack.enter_async_context(Calls())
        await servers.start()
        expected = await expected_of(calls, servers.addresses["source"])
        for victim in ("caller", "source", "target") * rounds:
            opened = await calls.open(servers.addresses["source"], NUM_SEQUENCES)
            lives = [Life(one, expected) for one in opened]
            async with asyncio.TaskGroup() as tasks:
                for life in lives:
                    tasks.create_task(life.run())
                await until(lambda: all(life.num_steps > 2 for life in lives))  # noqa: B023
                await kill_while_moving(servers, lives, victim, random.uniform(0.0, 0.25))
                before = [life.num_steps for life in lives]
                await until(lambda: all(map(Life.went_on, lives, before)))  # noqa: B023
                for life in lives:
                    life.is_over = True
            await check_owners(lives, servers.addresses["target"])
            lost[victim] += sum(life.is_lost for life in lives)
            moved[victim] += sum(life.one.address == servers.addresses["target"] for life in lives)
            await asyncio.gather(*(life.one.close() for life in lives if not life.is_lost))
    print(f"of {rounds * NUM_SEQUENCES} by who was killed: went to the target {moved}, lost {lost}")
    assert lost["caller"] == 0


async def kill_while_moving(servers: Servers, lives: list[Life], victim: str, after_s: float) -> None:
    """Ask for all sequences to be moved, and kill somebody some time later."""
    first, target = [life.first for life in lives], servers.addresses["target"]
    command = [sys.executable, "-m", "rigs.move_caller", first[0].address, target, str(first[0].epoch)]
    command += [str(one.handle) for one in first]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    caller = await asyncio.create_subprocess_exec(*command, env=environ, stdout=subprocess.PIPE)
    assert caller.stdout is not None and await caller.stdout.readline() == b"asks\n"
    await asyncio.sleep(after_s)
    if victim == "caller":
        with suppress(ProcessLookupError):
            caller.kill()
    else:
        await servers.kill(victim)
    await caller.wait()


async def check_owners(lives: list[Life], target: str) -> None:
    """Each is owned where it was, or goes on at the target, or is lost, and its old place says no other."""
    for life in lives:
        was_at_target, (state, _) = life.one.address == target, await life.first.state()
        assert not (was_at_target or life.is_lost) or state != pb.SEQUENCE_STATE_OPEN
        if not life.is_lost:
            assert await life.answer(asked(life.num_steps + 1)) is not None
            assert life.one.address == target or state == pb.SEQUENCE_STATE_OPEN
