"""The Go package that every file of the contract says: without one the Go compiler of protobuf takes none of them."""

from __future__ import annotations

from deltaline.v1 import (
    adapter_service_pb2,
    admin_service_pb2,
    layer_service_pb2,
    prefix_pb2,
    state_service_pb2,
    tensor_pb2,
)

FILES = (adapter_service_pb2, admin_service_pb2, layer_service_pb2, prefix_pb2, state_service_pb2, tensor_pb2)


def test_all_files_have_one_go_package() -> None:
    [package] = {file.DESCRIPTOR.GetOptions().go_package for file in FILES}
    assert package == "github.com/deltaline/deltaline/proto/deltaline/v1;deltalinev1"
