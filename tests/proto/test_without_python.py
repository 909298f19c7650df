"""The messages on the page for other languages are messages of the contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import message_factory, text_format

from deltaline.v1 import layer_service_pb2, state_service_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "without-python.md").read_text(encoding="utf-8")
PROTOCOL = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
MESSAGES = [
    (name, re.sub(r"^ {4}", "", text, flags=re.M))
    for name, text in re.findall(r"^ {4}# deltaline\.v1\.(\w+)\n((?: {4}.*\n)+)", PAGE, re.M)
]
TYPES = {
    name: message_factory.GetMessageClass(descriptor)
    for module in (layer_service_pb2, state_service_pb2)
    for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
}


@pytest.mark.parametrize(("name", "text"), MESSAGES, ids=[f"{i} {name}" for i, (name, _) in enumerate(MESSAGES)])
def test_a_message_of_the_page_can_be_parsed(name: str, text: str) -> None:
    message = text_format.Parse(text, TYPES[name]())
    assert message.ByteSize() > 0


def test_the_page_shows_the_calls_of_a_sequence_s_life() -> None:
    assert {name for name, _ in MESSAGES} == {
        "OpenSequencesRequest",
        "OpenSequencesResponse",
        "StepRequest",
        "CommitSequencesRequest",
        "ForkSequencesRequest",
        "CloseSequencesRequest",
        "CloseSequencesResponse",
    }


def test_a_reason_is_in_the_group_of_what_the_protocol_says_to_do() -> None:
    part = PAGE.split("## Errors\n")[1].split("\n## ")[0]
    groups = [
        set(re.findall(r"\b[A-Z]+_[A-Z_]+\b|\bDRAINING\b|\bSTOPPING\b|\bBUG\b", one)) for one in part.split("\n- ")[1:]
    ]
    advice = dict(re.findall(r"^\| ([A-Z_]+) \| [A-Z_]+ \| (?:RPC|row|, )+ \| .* \| (.*) \|$", PROTOCOL, re.M))
    codes = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
    assert sum(map(len, groups)) == len(set().union(*groups)) and set().union(*groups) - codes <= advice.keys()
    for first, says in (
        ("SEQUENCE_UNKNOWN", "open anew"),
        ("QUEUE_DEADLINE", "send both again"),
        ("STEP_STALE", "two owners"),
    ):
        [group] = [group for group in groups if first in group]
        told = {reason for reason, what in advice.items() if says in what}
        assert told and told <= group, told - group
