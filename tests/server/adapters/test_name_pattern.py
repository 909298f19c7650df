"""Patterns mean what Python's own mean, and cost little whatever they are."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaline_server.adapters.name_pattern import MAX_CHARS, STEPS_PER_TURN, NamePattern, Work
from deltaline_server.checkpoints.config_reader import ModelError

STEPS = 1 << 20
NAMES = ["model.layers.0.mlp.up_proj", "model.layers.11.linear_attn.in_proj_qkvz", "layers.1.self_attn.q_proj", "", "a"]


@pytest.mark.parametrize(
    "text",
    [
        r".*\.(q|k|v)_proj",
        r".*(linear_attn|mlp).*",
        r"model\.layers\.\d+\.mlp\.(?:up|down|gate)_proj",
        r"^model.layers.(0|11)\..*$",
        r"(.*\.)?(^model.layers.0.mlp.up_proj$)",
        r"(?P<stem>model\.)layers\.[0-9]{1,2}\.[^.]+\.in_proj_[a-z]{2,}",
        r"layers\.[^02-9]\.\w+\.\w*?_proj",
        r"[a\]x-]?",
        r"(|a)",
        r"a{,1}",
        r"a{1}?",
        r"\S+up_proj",
        r"[\w.]+q_proj",
        r"a|^|$",
        r"x^a",
        r"a$b",
        r"]",
        r"[]a]",
        r"[\w-]+(\.[\w-]+)*",
        r"\$*a\^?[{,}]*",
        r"\{,a}?|[a{,]{,2}",
        r".{999}|.{,30}",
        "(" * 100 + "a" + ")" * 100,
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_means_what_pythons_means(text: str, name: str) -> None:
    assert NamePattern(text, Work(STEPS)).matches(name) == bool(re.fullmatch(text, name))


ATOMS = ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "[0-1b]", "^", "$", r"\D"]
SUFFIXES = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?"]


@given(
    st.recursive(
        st.sampled_from(ATOMS),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            st.tuples(inner, st.sampled_from(SUFFIXES)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        ),
        max_leaves=12,
    ),
    st.lists(st.text("ab.1_", max_size=8), min_size=1, max_size=8),
)
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_pattern_means_what_pythons_means(text: str, names: list[str]) -> None:
    pattern, python = NamePattern(text, Work(STEPS)), re.compile(text)
    assert [pattern.matches(name) for name in names] == [bool(python.fullmatch(name)) for name in names]


@pytest.mark.parametrize(
    "text",
    [
        "(a)\\1",
        "(?=a)",
        "(?<!a)b",
        "(?i)a",
        "(?>a)",
        "(?P=x)",
        "(?P<1>a)",
        r"\bq",
        r"\x41",
        r"\Aa",
        "a++",
        "a**",
        "^*",
        "*a",
        "a{2",
        "a{2,1}",
        "a{x}",
        "a{,}",
        "a{1}{2}",
        "a{1001}",
        "a{800}{,}",
        "(a{40}){40}",
        r"\Qa\E",
        r"\pL",
        r"a\z",
        "[[:alpha:]]",
        "(?<x>a)",
        "(?s:.)",
        "(a",
        "a)",
        "a)|(b",
        "[a",
        "[b-a]",
        r"[\d-z]",
        "a\\",
        "a\nb",
        "ä",
        "a" * (MAX_CHARS + 1),
    ],
)
def test_what_is_not_supported_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"^pattern: expected"):
        NamePattern(text, Work(STEPS))


@pytest.mark.parametrize(
    "text",
    [
        "(a*)*b",
        "(a|a)*b",
        "(a|aa)+$b",
        "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x",
        "((a?){200})a{200}",
        "(((a{0,255}){0,255}){0,255})",
        "((((){255}){255}){255}){255}",
        ".*a.{200}b",
        "(.*a.{10}|.*b.{11}|.*c.{12}){15}",
        "[]a]" * 250 + "(",
        "[^]a]" * 200 + "{",
    ],
)
def test_the_work_of_a_hostile_pattern_is_bounded(text: str) -> None:
    names = [f"{'ab' * 40}{i}{'a' * 60}" for i in range(2000)]
    begin_s = time.thread_time()
    try:
        pattern = NamePattern(text, Work(STEPS))
        assert not any(pattern.matches(name) for name in names)
    except ModelError as error:
        assert re.search("too many steps|written out|single repetitions", str(error))
    assert time.thread_time() - begin_s < 10.0  # without a bound minutes


def test_names_with_other_characters_match_nothing_but_are_no_error() -> None:
    assert not NamePattern(r"[^x]+", Work(STEPS)).matches("ä")


def test_work_is_shared_by_the_patterns_of_a_file() -> None:
    work = Work(60)
    patterns = [NamePattern("a*b", work) for _ in range(2)]
    with pytest.raises(ModelError, match="too many steps"):
        [pattern.matches("a" * 300) for pattern in patterns for _ in range(3)]


def test_the_thread_rests_between_turns_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that serves gives up the interpreter at every operation of the device, and has to get it back."""
    left, rests, work = STEPS, list[int](), Work(STEPS)
    monkeypatch.setattr(time, "sleep", lambda _: rests.append(left))
    while left:
        left -= 512
        work.spend(512)
    turns = [before - after for before, after in pairwise([STEPS, *rests])]
    assert turns and max(turns) <= STEPS_PER_TURN + 512
