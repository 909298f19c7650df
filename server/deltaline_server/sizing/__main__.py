"""`python -m deltaline_server.sizing`, which `deltaline size` calls: prints what a server with given options takes.

Takes the server's own options, so that a command that was sized can be started.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from deltaline.sizes import readable_bytes
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config, ConfigError, flag
from deltaline_server.errors import shown
from deltaline_server.front.ends.memory import link_bytes, most_bytes
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES
from deltaline_server.front.link.held import most_bytes as held_bytes
from deltaline_server.front.port.memory import most_bytes as port_bytes
from deltaline_server.front.port.memory import most_half_sent_bytes
from deltaline_server.layers.kv_cache import COPIES
from deltaline_server.local_socket import OFF
from deltaline_server.sizing.host import on_host, ranks_on_host
from deltaline_server.sizing.sizes import LayerSize, Sizes, size

_CONTEXT_DIGITS = 12
_ABOUT = """\
Tells what a server takes on its device, and how many sequences a budget of memory holds, from the checkpoint's config
and the names of its tensors: no weight is read, nothing is allocated, no GPU is needed.

  deltaline size --model DIR                                      with the server's defaults
  deltaline size --model DIR --state-bytes 40GiB --context 8192   how many sequences of 8,192 tokens go into 40 GiB
  deltaline size --random-init config.json --layers 0:16          of a config alone, and of a part of its layers

It takes every option of deltaline-server, in the environment and a --config file as well; those that change nothing of
this are ignored.
"""


def main() -> int:
    """Print the sizes; 0, or 1 where --state-bytes is too little, and after an error, which is one line."""
    try:
        config, context = _parse(sys.argv[1:])
        sizes = size(config, context)
        print(report(sizes, config, on_host(config)), flush=True)
        return int(not sizes.fits)
    except OSError as error:  # of the output: a full disk, for example, which is not tried once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"deltaline: error: {error}", file=sys.stderr)
        return 1
    except (ConfigError, ModelError, ValueError) as error:
        print(f"deltaline: error: {error}", file=sys.stderr)
        return 1


def report(sizes: Sizes, config: Config, host_bytes: int | None) -> str:
    """Return the sizes as a page of text. host_bytes: of the host's memory where the server computes in it."""
    plan, state = sizes.plan, sizes.state
    spans, ranks = ", ".join(f"{span.start}:{span.stop}" for span in plan.spans), config.tensor_parallel
    dtype = str(plan.layout.placement.dtype).removeprefix("torch.")
    lines = [
        f"{plan.config.model_type}, {config.scope} scope, spans {spans}, {dtype}, state in {config.state_dtype}",
        *([f"left to the orchestrator: {plan.left_out}"] if plan.left_out else []),
        "",
    ]
    parts = list(dict.fromkeys(part for layer in sizes.layers for part in layer.line))
    heads = (
        "of each layer" if ranks == 1 else "a rank's share of each layer",
        "layers",
        "weights",
        *(_PART_NAMES[part] for part in parts),
        "a token in pages",
    )
    lines += _table([heads, *(_row(layer, parts) for layer in sizes.layers)])
    weights = sizes.weight_bytes
    rows = [
        ("on the device" if ranks == 1 else f"on each of {ranks} devices", "bytes", ""),
        ("weights", _number(weights), readable_bytes(weights)),
        (f"lines of {sizes.options.counted_lines}", *_both(_lines_bytes(sizes))),
    ]
    if state.kv is not None:
        kv = state.kv
        rows.append((f"{kv.num_pages} pages of {kv.page_size} tokens, and the null page", *_both(kv.total_bytes)))
        rows.append((f"{COPIES} more, through which pages are copied", *_both(kv.copy_bytes)))
    if sizes.transfer_bytes:
        rows.append(("what stored states are copied through", *_both(sizes.transfer_bytes)))
    if sizes.adapter_bytes:
        rows.append((f"{config.adapter_slots} adapter slots", *_both(sizes.adapter_bytes)))
    if sizes.peer_bytes:
        rows.append(("what the ranks sum through", *_both(sizes.peer_bytes)))
    rows.append(("together, beside what batches need", *_both(sizes.total_bytes)))
    lines += ["", *_table(rows)]
    if host_bytes is not None:
        taken_bytes = ranks_on_host(sizes) * sizes.total_bytes + config.host_state_bytes
        room = "too little" if taken_bytes > host_bytes else "room"
        lines.append(f"this host has {_exact(host_bytes)} of memory: {room} for this server on its CPU")
    lines.append("")
    if config.host_state_bytes:
        lines.append(f"on the host, pinned, for stored states: {_exact(config.host_state_bytes)}")
    if config.link not in (None, OFF):
        lines.append(f"on the host, for the local link's clients, at most: {_exact(config.link_memory_bytes)}")
    if config.link not in (None, OFF) or config.front_ends:
        held = _exact(held_bytes(config.queue_bytes))
        lines.append(f"on the host, for messages and replies of link and front ends, at most: {held}")
    message_bytes = config.inline_limit_bytes + MESSAGE_SLACK_BYTES
    if not config.front_ends or config.uds is not None:
        half_sent = (
            f"beside them {readable_bytes(most_half_sent_bytes(message_bytes))} of streams' messages that are half sent"
        )
        lines.append(f"on the host, for gRPC's clients, at most: {_exact(port_bytes(message_bytes))}; {half_sent}")
    if config.front_ends:
        bound = most_bytes(message_bytes) + link_bytes(message_bytes)
        lines.append(f"on the host, for each of {_plural(config.front_ends, 'front end')}, at most: {_exact(bound)}")
    lines += [f"a line of all layers: {_exact(state.line_bytes)}"]
    if state.kv is not None:
        pages = _plural(sizes.pages_per_sequence, "page")
        lines.append(f"a sequence of {_plural(sizes.context, 'token')}: {_exact(sizes.sequence_bytes)}, {pages}")
        held = _plural(sizes.sequences_by_pages or 0, "such sequence")
        lines.append(f"pages are for {held}; at most {state.kv.max_context} tokens each")
    if config.state_bytes and sizes.sequence_bytes:
        count = sizes.sequences_in(config.state_bytes)
        each = f" of {_plural(sizes.context, 'token')} each" if state.kv is not None else ""
        lacks = "" if sizes.fits else f"too little for --max-sequences {config.max_sequences}; "
        lines.append(f"--state-bytes {config.state_bytes}: {lacks}room for --max-sequences {count}{each}")
    return "\n".join(line.rstrip() for line in lines)


_PART_NAMES = {"conv": "conv line", "recurrent": "recurrent line", "drafts": "drafts of a line"}


def _parse(arguments: Sequence[str]) -> tuple[Config, int | None]:
    """Read this command's own option, and the server's. Raises ConfigError; SystemExit(0) after --help."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "deltaline size [--context N] [options of deltaline-server]"
    parser = argparse.ArgumentParser(
        prog="deltaline size", usage=usage, description=_ABOUT, formatter_class=raw, allow_abbrev=False
    )
    text = "tokens of a sequence that is counted with; default the most that one may have"
    parser.add_argument("--context", metavar="N", help=text)
    own, rest = parser.parse_known_args(arguments)
    if own.context is not None and not (own.context.isdecimal() and len(own.context) <= _CONTEXT_DIGITS):
        raise ConfigError(f"{flag('context')}: expected a whole number, got {shown(own.context)}")
    return Config.parse(rest, os.environ), None if own.context is None else int(own.context)


def _row(layer: LayerSize, parts: Sequence[str]) -> tuple[str, ...]:
    """A row of the table of layers."""
    line = (_number(layer.line[part]) if part in layer.line else "-" for part in parts)
    token = _number(layer.token_bytes) if layer.token_bytes else "-"
    return layer.kind, str(len(layer.layers)), _number(layer.weight_bytes), *line, token


def _lines_bytes(sizes: Sizes) -> int:
    return sizes.state.line_bytes * (sizes.options.total_lines + 1)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows whose columns line up: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _both(count: int) -> tuple[str, str]:
    return _number(count), readable_bytes(count)


def _exact(count: int) -> str:
    return f"{_number(count)} bytes ({readable_bytes(count)})" if count >= 1024 else f"{count} bytes"


def _number(count: int) -> str:
    return f"{count:,}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody who reads: no traceback
    sys.exit(main())
