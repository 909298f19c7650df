"""The tree of exceptions mirrors the reasons of the service."""

from __future__ import annotations

import re
import sys

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

import deltaline_client
from deltaline_client import (
    CapacityError,
    ConflictError,
    DeltalineError,
    RequestError,
    ServerError,
    StateError,
    StepError,
    TransportError,
)
from deltaline_client._exceptions import BY_REASON
from deltaline_client._transport.statuses import from_status
from deltaline_server.errors import Reason


def _status(code: int, reason: str = "", domain: str = "deltaline") -> status_pb2.Status:
    status = status_pb2.Status(code=code, message="why")
    if reason:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    return status


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: str(reason.name))
def test_every_reason_has_an_exception(reason: Reason) -> None:
    error = from_status(_status(reason.code, reason.name))
    assert type(error).__name__ == "".join(word.capitalize() for word in reason.name.split("_"))
    assert error.reason == reason.name
    assert getattr(deltaline_client, type(error).__name__) is type(error)


def test_every_exception_has_a_reason_of_the_service() -> None:
    assert set(BY_REASON) == {reason.name for reason in Reason}


@pytest.mark.parametrize(
    ("code", "family"),
    [
        (code_pb2.RESOURCE_EXHAUSTED, CapacityError),
        (code_pb2.NOT_FOUND, StateError),
        (code_pb2.DATA_LOSS, StateError),
        (code_pb2.INVALID_ARGUMENT, RequestError),
        (code_pb2.FAILED_PRECONDITION, ConflictError),
        (code_pb2.OUT_OF_RANGE, ConflictError),
        (code_pb2.ABORTED, ConflictError),
        (code_pb2.INTERNAL, ServerError),
    ],
)
def test_a_reason_of_a_later_server_falls_into_its_family(code: int, family: type[DeltalineError]) -> None:
    error = from_status(_status(code, "FROM_THE_FUTURE"))
    assert type(error) is family
    assert error.reason == "FROM_THE_FUTURE"


def test_another_domains_reason_is_an_error_of_transport() -> None:
    assert isinstance(from_status(_status(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", "proxy.example")), TransportError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    tree = (sys.modules[DeltalineError.__module__].__doc__ or "").split("\n\n")[-1]
    families = re.findall(r"^[├└]── (\w+).*\n((?:│   .*\n)*)", tree, re.M)
    drawn = [(family, re.findall(r"\w+", leaves)) for family, leaves in families]
    kinds = DeltalineError.__subclasses__()
    assert drawn == [(kind.__name__, [leaf.__name__ for leaf in kind.__subclasses__()]) for kind in kinds]
    assert issubclass(StepError, DeltalineError)
