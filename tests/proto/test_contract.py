"""Rules of the contract that protoc does not check: comments, names of messages, numbers of fields and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from deltaline.v1 import (
    adapter_service_pb2,
    admin_service_pb2,
    layer_service_pb2,
    prefix_pb2,
    state_service_pb2,
    tensor_pb2,
)

ROOT = Path(__file__).parents[2] / "proto"
FILES = [
    module.DESCRIPTOR
    for module in (
        tensor_pb2,
        prefix_pb2,
        layer_service_pb2,
        state_service_pb2,
        admin_service_pb2,
        adapter_service_pb2,
    )
]
METHODS = [m for file in FILES for service in file.services_by_name.values() for m in service.methods]


def files() -> list[descriptor_pb2.FileDescriptorProto]:
    """The contract as protobuf describes it, without comments."""
    found = []
    for file in FILES:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        found.append(proto)
    return found


def documented(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, list[int]]]:
    """The name and path of everything in a file that must have a comment."""

    def message_parts(message: Any, path: list[int]) -> Iterator[tuple[str, list[int]]]:
        if message.options.map_entry:
            return
        yield message.name, path
        yield from ((f"{message.name}.{field.name}", [*path, 2, i]) for i, field in enumerate(message.field))
        yield from ((f"{message.name}.{one.name}", [*path, 8, i]) for i, one in enumerate(message.oneof_decl))
        for i, nested in enumerate(message.nested_type):
            yield from message_parts(nested, [*path, 3, i])

    for i, message in enumerate(file.message_type):
        yield from message_parts(message, [4, i])
    for i, enum in enumerate(file.enum_type):
        yield enum.name, [5, i]
        yield from ((value.name, [5, i, 2, j]) for j, value in enumerate(enum.value))
    for i, service in enumerate(file.service):
        yield service.name, [6, i]
        yield from ((f"{service.name}.{method.name}", [6, i, 2, j]) for j, method in enumerate(service.method))


def test_everything_has_a_comment(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools, which has protoc, is not installed")
    resources = Path(pytest.importorskip("google.rpc.status_pb2").__file__).parents[2]
    output = tmp_path / "contract.binpb"
    sources = sorted(str(path) for path in ROOT.glob("deltaline/v1/*.proto"))
    includes = [f"-I{ROOT}", f"-I{resources}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    assert protoc.main(["protoc", *includes, "--include_source_info", f"-o{output}", *sources]) == 0
    contract = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    assert len(contract.file) == len(FILES)
    missing = []
    for file in contract.file:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        missing += [name for name, path in documented(file) if not comments.get(tuple(path), "").strip()]
    assert missing == []


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.full_name))
def test_each_method_has_its_own_request_and_response(method: Any) -> None:
    assert (method.input_type.name, method.output_type.name) == (f"{method.name}Request", f"{method.name}Response")


def test_file_names_and_packages_agree() -> None:
    expected = [("deltaline.v1", "deltaline/v1")] * len(FILES)
    assert [(file.package, file.name.rsplit("/", 1)[0]) for file in files()] == expected


def test_enum_values_are_named_after_their_enum_and_start_unspecified() -> None:
    for file in files():
        for enum in file.enum_type:
            prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
            assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}_UNSPECIFIED", 0)
            assert [value.name for value in enum.value if not value.name.startswith(f"{prefix}_")] == []


def test_numbers_are_used_once_and_without_gaps() -> None:
    """A number that was in use and is not any more must be reserved, so that it never means something else."""
    for file in files():
        for message in file.message_type:
            reserved = [number for span in message.reserved_range for number in range(span.start, span.end)]
            numbers = sorted([field.number for field in message.field] + reserved)
            assert numbers == list(range(1, len(numbers) + 1)), message.name
        for enum in file.enum_type:
            assert [value.number for value in enum.value] == list(range(len(enum.value))), enum.name


def test_numeric_arrays_have_fixed_width() -> None:
    """Varints would make a step's size depend on its values and its parsing slow; shapes and enums are short."""
    fixed = {"FIXED32", "FIXED64", "SFIXED32", "SFIXED64", "ENUM", "MESSAGE", "BYTES"}
    for file in files():
        for message in file.message_type:
            for field in message.field:
                name = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_")
                if field.label == field.LABEL_REPEATED and message.name != "Tensor":
                    assert name in fixed, f"{message.name}.{field.name}"
