"""The sum of the ranks' summands in graphs: by each way there is, alone, and with residual and norm behind it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from deltaline_bench.ranks.figures import Figures
from deltaline_bench.ranks.graph import captured
from deltaline_kernels import rms_norm
from deltaline_server.ranks.group import Group
from deltaline_server.ranks.peer_memory import PeerMemory
from deltaline_server.ranks.ways import Ranks

HIDDEN, EPS = 5120, 1e-6
ROWS = {"10 KiB": 1, "640 KiB": 64, "20 MiB": 2048, "80 MiB": 8192}
CALLS, ROUNDS = 20, 25
ALTERNATIONS = 300

Way = Callable[[Tensor], Tensor]


def measure(group: Group, device: torch.device) -> int:
    """Measure and check; how many checks failed."""
    figures, world = Figures("sums", group), dist.group.WORLD
    assert world is not None
    memory = PeerMemory(world, max(ROWS.values()) * HIDDEN * 2, device)
    ways: dict[str, Way] = {
        "gathered, added in fp32": Ranks(world).sum,
        "NCCL all_reduce": lambda x: _reduced(x, world),
        "symmetric memory, one shot": memory.one_shot,
        "symmetric memory, two shots": memory.two_shot,
    }
    for size, rows in ROWS.items():
        _one_size(figures, group, ways, size, rows, device)
    _joined(figures, group, memory, ways, device)
    _alternate(figures, group, ways, device)
    return figures.num_wrong


def _reduced(x: Tensor, world: dist.ProcessGroup) -> Tensor:
    y = x.clone()
    dist.all_reduce(y, group=world)
    return y


def _one_size(
    figures: Figures, group: Group, ways: Mapping[str, Way], size: str, rows: int, device: torch.device
) -> None:
    x = _drawn(group, rows, device)
    residual, weight = torch.zeros_like(x), torch.ones(HIDDEN, device=device)
    expected = Ranks(dist.group.WORLD).sum(x)  # type: ignore[arg-type]
    for name, way in ways.items():
        if name.endswith("one shot") and rows > 2048:
            continue
        try:
            first, again = way(x), way(x)
            moved = way(x.roll(1, 0)).roll(-1, 0)
            torch.cuda.synchronize(device)
            alone = _time(group, lambda: way(x))  # noqa: B023 - called before the next turn
            behind = _time(group, lambda: rms_norm(residual + way(x), weight, EPS))  # noqa: B023
        except Exception as error:
            figures.check(f"{size}: {name}", False, f"{type(error).__name__}: {str(error)[:150]}")
            continue
        same = _is_same_on_all(group, first)
        holds = torch.equal(first, again) and torch.equal(first, moved) and same
        # Of more than two ranks torch's kernels round at every addition.
        wrong = float((first.float() - expected.float()).abs().max() / expected.float().abs().max())
        figures.tell(f"{size}: {name}", f"{alone:.1f} us", f"{behind:.1f} us with residual and norm")
        figures.check(
            f"{size}: {name}: repeats, ranks and places alike",
            holds and wrong < 0.05,
            f"off the fp32 sum by {wrong:.4f}",
        )


def _joined(figures: Figures, group: Group, memory: PeerMemory, ways: Mapping[str, Way], device: torch.device) -> None:
    """The launch that a branch's end takes in place of three."""
    weight = torch.randn(HIDDEN, device=device, generator=torch.Generator(device).manual_seed(5))
    for rows in (1, 7, 64, 256):
        x, residual = _drawn(group, rows, device), torch.randn(rows, HIDDEN, device=device).bfloat16()
        dist.broadcast(residual, 0)
        summed, normed = memory.join(x, residual, weight, EPS, 1.0)
        expected = residual + ways["gathered, added in fp32"](x)
        exact = torch.equal(summed, expected)
        off = float((normed.float() - rms_norm(expected, weight, EPS).float()).abs().max())
        again = memory.join(x, residual, weight, EPS, 1.0)
        took = _time(group, lambda: memory.join(x, residual, weight, EPS, 1.0))  # noqa: B023 - called before the next turn
        figures.tell(f"{rows} rows: one launch for sum, residual and norm", f"{took:.1f} us")
        holds = exact and off < 0.1 and torch.equal(again[1], normed) and _is_same_on_all(group, normed)
        figures.check(f"{rows} rows: the same, right", holds, f"sum equal {exact}, norm off by {off:.4f}")


def _alternate(figures: Figures, group: Group, ways: Mapping[str, Way], device: torch.device) -> None:
    """Replays between waits of the host, which one rank delays: whether none stalls; the part has a time limit."""
    x = _drawn(group, 64, device)
    for name, way in ways.items():
        graph = captured(lambda: way(x))  # noqa: B023 - called before the next turn
        before = graph.made.clone()
        begin_s = time.monotonic()
        for turn in range(ALTERNATIONS):
            if turn % 50 == 7 * (group.place.rank + 1):
                time.sleep(0.02)
            graph.replay()
            torch.cuda.synchronize(device)
        took_s = time.monotonic() - begin_s
        figures.check(
            f"{ALTERNATIONS} replays between waits: {name}", torch.equal(graph.made, before), f"{took_s:.2f} s"
        )


def _drawn(group: Group, rows: int, device: torch.device) -> Tensor:
    source = torch.Generator(device).manual_seed(100 + group.place.rank)
    return torch.randn(rows, HIDDEN, device=device, generator=source).bfloat16()


def _is_same_on_all(group: Group, made: Tensor) -> bool:
    parts = Ranks(dist.group.WORLD).gather(made.contiguous())  # type: ignore[arg-type]
    return all(torch.equal(part, parts[0]) for part in parts)


def _time(group: Group, call: Callable[[], object]) -> float:
    """Microseconds of a call, the median of replays of CALLS of them."""
    graph = captured(call, CALLS)
    took: list[float] = []
    for _ in range(ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(took)
