"""A complete small orchestrator: greedy generation for several prompts at once over deltaline servers.

    deltaline-server --model DIR &
    python examples/generate.py DIR --server 127.0.0.1:50051 --drafts 4 --compare

It keeps what is stateless (embedding, final norm, head); the server holds the decoder layers and their state. Several
servers may hold a range of the layers each: give --server once for each, in the order of their layers. What each
stream needs next becomes a row, all rows go in one step, and a stream that ends makes room for the next prompt. With
--drafts K a step verifies up to K tokens, looked up in the stream itself: the right ones cost no step of their own.

DIR is a checkpoint as transformers writes it, of a family whose layers are served whole and whose ends are an
embedding, a norm and a head: Qwen's and Mamba's are (make_checkpoint.py writes one of each kind), and others. Also with
residual streams: then whichever of the ends no server has is computed here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from deltaline_client import Client, DeltalineError, Row, StepTiming, TransportError
from deltaline_client import Sequence as ServerSequence

# Below this gap between the two best logits, the order of sums decides which token is greedy.
NEAR_TIE = 1e-3
# Seconds until a server that gives no answer counts as absent.
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the tensors of its ends: any of these; and its config the constant of their norm."""

    embedding: tuple[str, ...]
    norm: tuple[str, ...]
    epsilon: str


NAMES = Names(("embed_tokens.weight",), ("norm.weight", "final_layernorm.weight"), "rms_norm_eps")
# The second name is that of checkpoints which mamba_ssm wrote.
MAMBA_NAMES = Names(("embeddings.weight", "embedding.weight"), ("norm_f.weight",), "layer_norm_epsilon")


def find(tensors: dict[str, NDArray[Any]], names: tuple[str, ...], directory: Path) -> NDArray[Any]:
    """Return the tensor that has one of the names, whatever module it is in."""
    for name, tensor in tensors.items():
        if name.split(".", name.count(".") - 1)[-1] in names:
            return tensor
    raise ValueError(f"{directory}: no tensor is named {' or '.join(names)}")


class Ends:
    """What comes before and after the decoder layers: token ids to hidden states, hidden states to the greedy token."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
            raise ValueError(f"{directory}: no checkpoint: expected config.json and *.safetensors")
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config", config)
        is_mamba = config.get("model_type") in ("mamba", "falcon_mamba", "mamba2")
        tensors: dict[str, NDArray[Any]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "np") as file:
                names = [name for name in file.keys() if ".layers." not in name]  # noqa: SIM118 - not a dict
                tensors |= {name: file.get_tensor(name).astype(np.float32) for name in names}
        stored = MAMBA_NAMES if is_mamba else NAMES
        self.embedding = find(tensors, stored.embedding, directory)  # [vocabulary, hidden]
        # [hidden]; the checkpoints of Qwen store the distance from 1
        is_qwen = str(config.get("model_type")).startswith("qwen")
        self.norm = find(tensors, stored.norm, directory) + (1.0 if is_qwen else 0.0)
        self.head = tensors.get("lm_head.weight", self.embedding)  # [vocabulary, hidden]; absent when tied
        self.embedding = self.embedding * config.get("embedding_multiplier", 1.0)
        self.epsilon: float = config[stored.epsilon]
        self.num_layers: int = config["num_hidden_layers"]
        self.streams: int = config.get("hc_mult") or 0  # residual streams, 0 for one plain residual
        self.join: tuple[NDArray[Any], ...] | None
        if self.streams and str(config.get("model_type")).startswith("glm5_next"):
            self.join = None  # by their mean
        elif self.streams:
            fn, scale, base = (find(tensors, (f"hc_head.hc_{name}",), directory) for name in ("fn", "scale", "base"))
            self.join = fn, scale, base
            self.join_epsilon: float = config.get("hc_eps", 1e-6)
        eos = config.get("eos_token_id")
        self.end_tokens = set(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def embed(self, tokens: Sequence[int], streams: int = 0) -> NDArray[Any]:
        """Return the hidden states of n tokens: [n, hidden], or of each of the streams [n, streams, hidden]."""
        hidden: NDArray[Any] = self.embedding[np.asarray(tokens)]
        return np.repeat(hidden[:, np.newaxis], streams, axis=1) if streams else hidden

    def greedy(self, hidden: NDArray[Any]) -> list[int]:
        """Return the likeliest next token after each of the hidden states [n, hidden] or [n, streams, hidden]."""
        hidden = hidden.astype(np.float32)
        if hidden.ndim == 3 and self.join is None:
            hidden = hidden.mean(axis=1)
        elif hidden.ndim == 3 and self.join is not None:  # the head of hyper-connections: a weighted sum of the streams
            fn, scale, base = self.join
            flat = hidden.reshape(len(hidden), -1)
            mixes = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + self.epsilon) @ fn.T
            weights = 1 / (1 + np.exp(-(mixes * scale + base))) + self.join_epsilon
            hidden = np.einsum("ns,nsh->nh", weights, hidden)
        normed = hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + self.epsilon) * self.norm
        return [int(token) for token in np.argmax(normed @ self.head.T, axis=-1)]


@dataclass
class Prompt:
    """Token ids to continue, and by how many tokens at most."""

    tokens: list[int]
    max_new_tokens: int


@dataclass
class Stream:
    """One prompt on its way: its new tokens, the last of which no server has seen, and drafts being verified.

    sequences: one on each server, in the order of their layers.
    """

    prompt: Prompt
    sequences: list[ServerSequence]
    new_tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def next_tokens(self, num_drafts: int) -> list[int]:
        """Return the tokens that this stream needs computed next."""
        if not self.new_tokens:
            return self.prompt.tokens
        left = self.prompt.max_new_tokens - len(self.new_tokens)
        self.drafts = look_up(self.prompt.tokens + self.new_tokens, min(num_drafts, left - 1))
        return [self.new_tokens[-1], *self.drafts]

    def row(self, server: int, hidden: NDArray[Any]) -> Row:
        """Make the row of these tokens for one of the servers."""
        sequence = self.sequences[server]
        if not self.new_tokens:
            return Row.prefill(sequence, hidden)
        return Row.verify(sequence, hidden) if self.drafts else Row.decode(sequence, hidden)

    def take(self, predicted: list[int], end_tokens: set[int]) -> int:
        """Take in what the model says after each token of the row; return how many drafts were right."""
        if not self.new_tokens:
            predicted = predicted[-1:]  # a prefill: only what follows the whole prompt is new
        right = next((i for i, draft in enumerate(self.drafts) if draft != predicted[i]), len(self.drafts))
        if self.drafts:
            for sequence in self.sequences:
                sequence.commit(1 + right)  # rides on the stream's next step
        for token in predicted[: right + 1]:
            if not self.is_done(end_tokens):
                self.new_tokens.append(token)
        return right

    def is_done(self, end_tokens: set[int]) -> bool:
        """Tell whether the stream has all its tokens."""
        ended = bool(self.new_tokens) and self.new_tokens[-1] in end_tokens
        return ended or len(self.new_tokens) == self.prompt.max_new_tokens


def look_up(tokens: list[int], count: int, longest: int = 3) -> list[int]:
    """Guess the next tokens: those after the latest earlier occurrence of the last few tokens; [] for no idea."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if count > 0 and tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + count]
    return []


@dataclass
class Report:
    """What a run made, and where its time went.

    tokens: the new tokens per prompt. ended_at: the step, counted from 1, that ended it. timings: of each step on each
    server.
    """

    tokens: list[list[int]]
    ended_at: list[int]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    total_s: float = 0.0
    timings: list[StepTiming] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Share of the guessed tokens that were right; 0 when none was guessed."""
        return self.accepted / self.drafted if self.drafted else 0.0


def generate(
    clients: Sequence[Client], ends: Ends, prompts: Sequence[Prompt], num_drafts: int, concurrency: int
) -> Report:
    """Continue all prompts greedily, `concurrency` of them at a time, with up to `num_drafts` guesses per step.

    clients: of the servers, in the order of their layers.
    """
    num_drafts = min(num_drafts, *(client.info().max_draft_tokens - 1 for client in clients))
    residuals = clients[0].info().spans[0].input_streams  # those that the first server wants to be given
    report = Report(tokens=[[] for _ in prompts], ended_at=[0] * len(prompts))
    waiting, streams = deque(enumerate(prompts)), dict[int, Stream]()
    begin_s = time.perf_counter()
    while waiting or streams:
        # At most one new prompt per step: prefills then share batches with the others' decodes.
        if waiting and len(streams) < concurrency:
            index, prompt = waiting.popleft()
            streams[index] = Stream(prompt, [client.open() for client in clients])
        hidden = [ends.embed(stream.next_tokens(num_drafts), residuals) for stream in streams.values()]
        for server, client in enumerate(clients):  # what leaves one server's layers enters the next one's
            rows = [stream.row(server, own) for stream, own in zip(streams.values(), hidden, strict=True)]
            result = client.step(rows)
            hidden = list(result.outputs)
            report.timings.append(result.timing)
        report.steps += 1
        for (index, stream), output in zip(list(streams.items()), hidden, strict=True):
            report.drafted += len(stream.drafts)
            report.accepted += stream.take(ends.greedy(output), ends.end_tokens)
            if stream.is_done(ends.end_tokens):
                report.tokens[index], report.ended_at[index] = stream.new_tokens, report.steps
                for client, sequence in zip(clients, streams.pop(index).sequences, strict=True):
                    client.close([sequence])
    report.total_s = time.perf_counter() - begin_s
    return report


def token_ids(text: str) -> list[int]:
    """Read the token ids of a prompt. Raises ArgumentTypeError."""
    try:
        return [int(token) for token in text.split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected token ids with spaces between, got {text!r}") from error


def random_prompts(vocab_size: int, count: int, max_new_tokens: int, seed: int, length: int = 12) -> list[Prompt]:
    """Make prompts of `length` random tokens."""
    rng = np.random.default_rng(seed)
    return [Prompt(rng.integers(0, vocab_size, length).tolist(), max_new_tokens) for _ in range(count)]


def expected_tokens(directory: Path, prompts: Sequence[Prompt], end_tokens: set[int]) -> list[list[int]]:
    """Generate greedily with transformers, without a cache; prompts of one length go in one batch.

    The tokens of a prompt end before the first near tie: from there on either of two tokens could be greedy.
    """
    import torch  # only the comparison needs them
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    run_path(str(Path(__file__).with_name("streams.py")))["load_streams"](model, directory)
    model.eval()
    expected: dict[int, list[int]] = {}
    for length in sorted({len(prompt.tokens) for prompt in prompts}):
        group = [index for index, prompt in enumerate(prompts) if len(prompt.tokens) == length]
        answer = model.generate(
            torch.tensor([prompts[index].tokens for index in group]),
            max_new_tokens=max(prompts[index].max_new_tokens for index in group),
            do_sample=False,
            use_cache=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(answer.logits).topk(2).values  # [new tokens, prompts, 2]
        near_tie = (best[..., 0] - best[..., 1] < NEAR_TIE).T.tolist()  # [prompts, new tokens]
        for row, index in enumerate(group):
            expected[index] = []
            tokens = answer.sequences[row, length : length + prompts[index].max_new_tokens].tolist()
            for token, is_near_tie in zip(tokens, near_tie[row], strict=False):
                if is_near_tie or expected[index][-1:] in [[end] for end in end_tokens]:
                    break
                expected[index].append(token)
    return [expected[index] for index in range(len(prompts))]


def print_table(reports: dict[str, Report]) -> None:
    """Print one line per run: its speed, how good the guesses were, and the server's time per step by stage."""
    stages = ("queue", "copy_in", "compute", "copy_out")
    heads = ("tokens", "steps", "tokens/s", "accepted", *(f"{stage.replace('_', ' ')} ms" for stage in stages))
    print(" " * 12 + "".join(f"{head:>13}" for head in heads))
    for name, report in reports.items():
        num_tokens = sum(map(len, report.tokens))
        accepted = f"{report.acceptance:.0%}" if report.drafted else "-"
        means_s = [sum(getattr(timing, f"{stage}_s") for timing in report.timings) / report.steps for stage in stages]
        print(f"{name:12}{num_tokens:13}{report.steps:13}{num_tokens / report.total_s:13.1f}{accepted:>13}", end="")
        print("".join(f"{mean_s * 1e3:13.3f}" for mean_s in means_s))


def check_servers(addresses: Sequence[str], num_layers: int, streams: int) -> None:
    """Raise SystemExit, with what to do, when no server answers; ValueError unless they hold all layers, in order, of a
    model with as many residual streams."""
    layers: list[int] = []
    for address in addresses:
        try:
            with Client(address, timeout=ANSWER_TIMEOUT_S) as client:
                info = client.info()
        except TransportError as error:
            why = f"no server answers at {address}: start one with `deltaline-server --model DIR`"
            raise SystemExit(why) from error
        if len(info.spans) != 1 or info.scope != "block":
            raise ValueError(f"{address}: expected a server of one span of whole layers, got {len(info.spans)} spans")
        span = info.spans[0]
        if served := {span.input_streams, span.output_streams} - {0, streams}:
            raise ValueError(
                f"{address}: serves {max(served)} residual streams, the checkpoint has {streams or 'none'}"
            )
        layers += range(span.first, span.first + span.count)
    if layers != list(range(num_layers)):
        raise ValueError(f"the servers hold layers {layers}, in this order; expected 0 to {num_layers - 1}")


def main() -> int:
    """Print what came of a run; return 1 after an error, or if the results are not what they should be."""
    try:
        return run()
    except (DeltalineError, OSError, SafetensorError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run() -> int:
    """Run plain and speculative generation and print what came of it; 1 if the results are not what they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="checkpoint that the server serves")
    parser.add_argument(
        "--server",
        action="append",
        help="address of the server [127.0.0.1:50051]; of several, one by one, where each holds a range of the layers",
    )
    parser.add_argument(
        "--prompt", type=token_ids, action="append", help="token ids with spaces between; may be repeated"
    )
    parser.add_argument("--prompts", type=int, default=8, help="random prompts when none is given [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts [%(default)s]")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt [%(default)s]")
    parser.add_argument("--drafts", type=int, default=4, help="most guessed tokens per step; 0 for none [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=6, help="streams at a time [%(default)s]")
    parser.add_argument("--compare", action="store_true", help="check the tokens against transformers")
    options = parser.parse_args()
    ends = Ends(options.directory)
    prompts = [Prompt(tokens, options.max_new_tokens) for tokens in options.prompt or []]
    prompts = prompts or random_prompts(len(ends.embedding), options.prompts, options.max_new_tokens, options.seed)
    addresses = options.server or ["127.0.0.1:50051"]
    check_servers(addresses, ends.num_layers, ends.streams)
    runs = {"plain": 0} | ({"speculative": options.drafts} if options.drafts else {})
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(address)) for address in addresses]
        reports = {name: generate(clients, ends, prompts, runs[name], options.concurrency) for name in runs}
    print_table(reports)
    if not options.compare:
        return 0
    print("transformers now does the same, without a cache: seconds on a CPU, minutes on a busy one", flush=True)
    failed, expected = False, expected_tokens(options.directory, prompts, ends.end_tokens)
    for name, report in reports.items():
        wrong = [i for i, tokens in enumerate(report.tokens) if tokens[: len(expected[i])] != expected[i]]
        compared, made = sum(map(len, expected)), sum(map(len, report.tokens))
        verdict = f"prompts {wrong} differ" if wrong else "all equal"
        rest = " (the others follow a near-tie of transformers' logits)" if compared < made else ""
        print(f"{name}: {compared} of {made} tokens compared, {verdict}{rest}")
        failed |= bool(wrong)
    if failed:
        print(f"if all differ, other weights are served than those of {options.directory}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
