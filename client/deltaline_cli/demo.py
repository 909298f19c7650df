"""`deltaline demo`: a server of its own, driven by several clients, and checked against transformers.

The server, the writing of the checkpoint and the comparison are processes of their own: nothing here imports torch.
They are sessions of their own as well: Ctrl-C reaches this process alone, and it ends the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deltaline_cli.bench.command import bench
from deltaline_cli.bench.options import BenchOptions, Lengths
from deltaline_client import Client, Retry, TransportError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 5.0
_LOG_LINES = 20
SERVER_NEEDS = ("torch", "safetensors", "re2", "grpc_health", "grpc_reflection", "prometheus_client")
_LOAD = BenchOptions(clients=4, rows=6, steps=240, prefill_tokens=Lengths(16, 64), ramp_up_s=0.5)

# What is served where transformers is not there to write a checkpoint.
_CONFIG = {
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


class DemoError(RuntimeError):
    """The demo can't go on; the message is for the person who started it."""


def demo(*, keep: bool) -> int:
    """Run the demo; 0 if all went well and the tokens are those of transformers, else 1."""
    missing = missing_packages()
    if missing:
        raise DemoError(f"the server needs {', '.join(missing)}: pip install 'deltaline[server]'")
    with tempfile.TemporaryDirectory(prefix="deltaline-demo-") as folder:
        directory = Path(folder)
        checkpoint = _write_checkpoint(directory / "checkpoint", directory / "checkpoint.log")
        if checkpoint is None:
            config = directory / "config.json"
            config.write_text(json.dumps(_CONFIG))
            model = ["--random-init", str(config), "--dtype", "float32"]
        else:
            model = ["--model", str(checkpoint)]
        with _server(model, directory / "server.log") as address:
            _say(f"{_LOAD.clients} clients step {_LOAD.rows} sequences each, all kinds of steps side by side")
            code = bench(address, _LOAD)
            print("The stages of a step that was cut into several batches are sums: they can exceed the total.")
            if checkpoint is not None and code == 0:
                code = _generate(checkpoint, address)
            if keep:
                _say(f"the server stays on {address} until Ctrl-C; try: deltaline bench {address}")
                _wait_for_interrupt()
    return code


def missing_packages() -> list[str]:
    """Return the packages that a server needs and that are not installed."""
    return [name for name in SERVER_NEEDS if importlib.util.find_spec(name) is None]


def _write_checkpoint(directory: Path, log: Path) -> Path | None:
    """Have transformers write a small checkpoint; None where it or the example is not installed."""
    script = EXAMPLES / "make_checkpoint.py"
    if not script.exists() or importlib.util.find_spec("transformers") is None:
        _say("no transformers, or no examples beside the client: random weights, and no comparison")
        return None
    _say("transformers writes a small checkpoint with random weights")
    command = [sys.executable, str(script), str(directory)]
    with log.open("w") as output, _started(command, stdout=output, stderr=output) as process:
        if process.wait():
            raise DemoError(f"make_checkpoint.py failed:\n{_tail(log.read_text())}")
    return directory


@contextmanager
def _server(model: list[str], log: Path) -> Iterator[str]:
    """Start a server process, yield its address once it is ready, and stop it at the end."""
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "deltaline_server", *model, "--port", address.rpartition(":")[2]]
    _say("the server starts: " + " ".join(["deltaline-server", *command[3:]]))
    command += ["--metrics-port", "-1", "--drain-timeout-s", "1"]
    with log.open("w") as output, _started(command, stdout=output, stderr=output) as process:
        _wait_until_ready(process, address, log)
        yield address


@contextmanager
def _started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, with these options of Popen, and end it with the block."""
    with _interrupts_held() as release:
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            release()
            yield process
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
            finally:  # also after a second Ctrl-C
                process.kill()
                process.wait()


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold KeyboardInterrupt back until what is yielded is called: a process that starts must not be lost by one."""
    handler = signal.default_int_handler
    held = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is handler]
    noted: list[int] = []
    for number in held:
        signal.signal(number, lambda number, _: noted.append(number))

    def let() -> None:
        for number in held:
            signal.signal(number, handler)

    def release() -> None:
        let()
        if noted:
            raise KeyboardInterrupt

    try:
        yield release
    finally:
        let()


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    begin_s = time.monotonic()
    with Client(address, timeout=2.0, retry=Retry(max_attempts=1)) as client:
        while True:
            try:
                info = client.info()
                break
            except TransportError as error:
                took_s = time.monotonic() - begin_s
                if process.poll() is not None:
                    raise DemoError(f"the server ended while it started:\n{_tail(log.read_text())}") from error
                if took_s > _START_TIMEOUT_S:
                    raise DemoError(
                        f"the server is not ready after {took_s:.0f} s:\n{_tail(log.read_text())}"
                    ) from error
                print(".", end="", file=sys.stderr, flush=True)
                time.sleep(0.5)
    print(file=sys.stderr)
    took_s = time.monotonic() - begin_s
    _say(f"ready after {took_s:.1f} s: {info.model_type} on {info.device}, {info.dtype}, {info.spans[0].count} layers")


def _generate(checkpoint: Path, address: str) -> int:
    """Run the example orchestrator, plain and speculative, and its comparison; return its exit code."""
    _say("examples/generate.py continues 8 prompts, plain and speculatively; transformers then does the same")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # of transformers: small operations, faster on one core
    command = [sys.executable, str(EXAMPLES / "generate.py"), str(checkpoint), "--server", address, "--compare"]
    with _started(command, env=environment) as process:
        code = process.wait()
    print("Speculation pays where memory bounds a step, as on a GPU with a large model; a small model on a CPU gains")
    print("little or nothing.")
    return code


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        _say("stopping")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LOG_LINES:])


def _say(text: str) -> None:
    print(f"-- {text}", flush=True)
