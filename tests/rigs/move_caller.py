"""A process that asks for moves, which a test may kill: python -m rigs.move_caller ADDRESS TARGET EPOCH HANDLE ..."""

from __future__ import annotations

import secrets
import sys
from typing import Any

import grpc

from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.state_service_pb2_grpc import StateServiceStub


def main(address: str, target: str, epoch: str, *handles: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = StateServiceStub(channel)
        print("asks", flush=True)
        stub.MoveSequences(
            pb.MoveSequencesRequest(
                request_id=secrets.token_bytes(16),
                server_epoch=int(epoch),
                sequence=map(int, handles),
                target=target,
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
