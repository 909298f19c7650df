"""How a frame of `deltaline top` looks. Needs rich."""

from __future__ import annotations

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deltaline.sizes import readable_bytes
from deltaline_cli.text import plural
from deltaline_cli.top.frame import Frame, Rates
from deltaline_client import AdapterList, ServerLoad

KINDS, STAGES = ("decode", "verify", "prefill"), ("queue", "copy_in", "compute", "copy_out")
_STAGE_SECONDS = "deltaline_stage_seconds"
_SEQUENCES_OF = "deltaline_principal_sequences"
_BAR_CELLS, _MOST_ROWS = 20, 8
# Columns from which on panels stand side by side.
_WIDE = 110
# A share from which on a bar warns, and one from which on requests are about to be refused.
_WARN, _FULL = 0.75, 0.95


def render(frame: Frame, width: int) -> RenderableType:
    """Return a frame as rich renders it in so many columns."""
    parts: list[RenderableType] = [_head(frame)]
    if not isinstance(frame.rates, Rates):
        text = frame.rates or "no latencies and rates: give --metrics-url http://HOST:9464/metrics"
        parts += [_capacity(frame.load), Text(text, style="yellow" if frame.rates else "dim")]
    elif width < _WIDE:
        beside = Columns([_work(frame.rates), _refusals(frame.rates)], padding=(0, 1))
        parts += [_capacity(frame.load), _latency(frame.rates), beside]
    else:
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=2)
        grid.add_column(ratio=1)
        right = Group(_work(frame.rates), _refusals(frame.rates))
        grid.add_row(Group(_capacity(frame.load), _latency(frame.rates)), right)
        parts.append(grid)
    if isinstance(frame.rates, Rates) and len(frame.rates.labels(_SEQUENCES_OF, "principal")) > 1:
        parts.append(_principals(frame.rates))
    if frame.adapters is not None:
        parts.append(_adapters(frame.adapters, frame.rates))
    return Group(*parts)


def _head(frame: Frame) -> RenderableType:
    info = frame.info
    state = ("unreachable", "bold red") if frame.error else ("draining", "bold yellow") if frame.load.draining else None
    word, style = state or ("serving", "bold green")
    line = Text.assemble(
        (frame.address, "bold"),
        "  ",
        (word, style),
        f"  deltaline {info.version} on {info.device}, epoch {info.server_epoch:#x}",
    )
    layers = sum(span.count for span in info.spans)
    model = (
        f"{info.model_type}, {layers} {plural(layers, 'layer')} in {len(info.spans)} {plural(len(info.spans), 'span')}"
    )
    about = Text(f"{model} ({info.scope} scope), {info.dtype}, state in {info.state_dtype}", style="dim")
    return Group(line, about, *([Text(frame.error, style="red")] if frame.error else []))


def _capacity(load: ServerLoad) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)

    def row(name: str, used: int, limit: int, shown: bool = False) -> None:
        share = used / limit if limit else 0.0
        texts = [readable_bytes(number) if shown else f"{number:,}" for number in (used, limit)]
        table.add_row(name, _bar(share), f"{share:.0%}", texts[0], f"of {texts[1]}")

    row("state lines", load.lines_used, load.lines_total)
    if load.kv_pages_total:
        row("pages", load.kv_pages_used, load.kv_pages_total)
    row("queued rows", load.queued_rows, load.queued_rows_limit)
    row("queued bytes", load.queued_bytes, load.queued_bytes_limit, shown=True)
    row("kept replies", load.reply_bytes, load.reply_bytes_limit, shown=True)
    title = f"{load.sequences_open:,} {plural(load.sequences_open, 'sequence')} open"
    return Panel(table, title=title, title_align="left", padding=(0, 1))


def _bar(share: float) -> Text:
    cells = min(_BAR_CELLS, round(share * _BAR_CELLS))
    style = "red" if share >= _FULL else "yellow" if share >= _WARN else "green"
    return Text.assemble(("━" * cells, style), ("─" * (_BAR_CELLS - cells), "dim"))


def _latency(rates: Rates) -> RenderableType:
    """Median and 99th percentile of the stages, a column for each kind of row that there was."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("stage")
    kinds = [kind for kind in KINDS if rates.grown(f"{_STAGE_SECONDS}_count", kind=kind)]
    for kind in kinds:
        table.add_column(f"{kind} p50", justify="right", no_wrap=True)
        table.add_column("p99", justify="right", no_wrap=True)
    for stage in STAGES:
        quantiles = (
            rates.quantile(share, _STAGE_SECONDS, stage=stage, kind=kind) for kind in kinds for share in (0.5, 0.99)
        )
        table.add_row(stage, *(_time(quantile) for quantile in quantiles))
    body: RenderableType = table if kinds else Text("no batch in this time", style="dim")
    return Panel(body, title=f"latency, last {rates.seconds:.1f} s", title_align="left", padding=(0, 1))


def _work(rates: Rates) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    batches = rates.grown("deltaline_batch_rows_count")
    of_rows = f" of {rates.grown('deltaline_batch_rows_sum') / batches:.1f} rows" if batches else ""
    drafts = rates.grown("deltaline_draft_tokens_total")
    table.add_row("device busy", f"{min(1.0, rates.rate('deltaline_device_busy_seconds_total')):.0%}")
    table.add_row("batches", f"{batches / rates.seconds:,.0f}/s{of_rows}")
    table.add_row("tokens", f"{rates.rate('deltaline_batch_tokens_sum'):,.0f}/s")
    for outcome in ("executed", "replayed", "joined"):
        table.add_row(f"rows {outcome}", f"{rates.rate('deltaline_steps_total', outcome=outcome):,.0f}/s")
    if drafts:
        table.add_row("drafts accepted", f"{rates.grown('deltaline_draft_tokens_accepted_total') / drafts:.0%}")
    table.add_row("leases run out", f"{rates.rate('deltaline_sequences_expired_total'):,.1f}/s")
    stalls = sum(
        rates.grown(f"deltaline_{what}_total") for what in ("compilations", "graph_captures", "device_allocations")
    )
    table.add_row("stalls", Text(f"{stalls:,.0f}", style="red" if stalls else ""))
    return Panel(table, title="work", title_align="left", padding=(0, 1))


def _refusals(rates: Rates) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    found = rates.by("deltaline_refused_total", "reason")
    for reason, count in list(found.items())[:_MOST_ROWS]:
        table.add_row(reason, f"{count / rates.seconds:,.1f}/s")
    body: RenderableType = table if found else Text("none", style="dim")
    return Panel(body, title="refused", title_align="left", padding=(0, 1))


def _principals(rates: Rates) -> RenderableType:
    """The principals that have had most of the device."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("principal", overflow="ellipsis", no_wrap=True, max_width=40)
    for name in ("tokens/s", "rows/s", "queued rows", "sequences"):
        table.add_column(name, justify="right", no_wrap=True)

    def tokens(name: str) -> float:
        return rates.rate("deltaline_principal_tokens_total", principal=name)

    names = sorted(rates.labels(_SEQUENCES_OF, "principal"), key=lambda name: (-tokens(name), name))
    for name in names[:_MOST_ROWS]:
        rows = rates.rate("deltaline_principal_rows_total", principal=name)
        queued, held = (rates.gauge(of, principal=name) for of in ("deltaline_principal_queue_rows", _SEQUENCES_OF))
        table.add_row(Text(name), f"{tokens(name):,.0f}", f"{rows:,.0f}", f"{queued:,.0f}", f"{held:,.0f}")
    if len(names) > _MOST_ROWS:
        table.add_row(Text(f"and {len(names) - _MOST_ROWS} more", style="dim"))
    return Panel(table, title=f"{len(names)} principals", title_align="left", padding=(0, 1))


def _adapters(listed: AdapterList, rates: Rates | str | None) -> RenderableType:
    """The adapters that most sequences have."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("adapter", overflow="ellipsis", no_wrap=True, max_width=40)
    table.add_column("where")
    for name in ("sequences", "rank", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(listed.adapters, key=lambda adapter: (-adapter.sequences, adapter.name))
    for adapter in ordered[:_MOST_ROWS]:
        size = readable_bytes(adapter.size_bytes)
        table.add_row(Text(adapter.name), adapter.state.name.lower(), f"{adapter.sequences:,}", str(adapter.rank), size)
    texts = [
        f"{len(ordered)} {plural(len(ordered), 'adapter')}",
        f"{listed.slots_used} of {listed.slots_total} {plural(listed.slots_total, 'slot')}",
        f"{readable_bytes(listed.used_bytes)} of {readable_bytes(listed.limit_bytes)}",
    ]
    if isinstance(rates, Rates):
        texts.append(f"{rates.gauge('deltaline_adapter_rows_waiting'):,.0f} rows wait")
        texts.append(f"{rates.rate('deltaline_adapter_slot_copies_total'):,.1f} copies/s")
    if len(ordered) > _MOST_ROWS:
        table.add_row(Text(f"and {len(ordered) - _MOST_ROWS} more", style="dim"))
    body: RenderableType = table if ordered else Text("none", style="dim")
    return Panel(body, title=", ".join(texts), title_align="left", padding=(0, 1))


def _time(seconds: float | None) -> str:
    """A time with three digits and its unit."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"
