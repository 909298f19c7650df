"""The messages on the page for other languages are messages of the contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import message_factory, text_format

from deltaline.v1 import layer_service_pb2, state_service_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "without-python.md").read_text(encoding="utf-8")
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
