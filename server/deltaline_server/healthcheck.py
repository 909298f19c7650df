"""`python -m deltaline_server.healthcheck [address]`: exits 0 if the server at the address is ready, else 1.

For container health checks. Knows grpc.health.v1 only; the default address is this machine's, with DELTALINE_PORT.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltaline.v1 import layer_service_pb2
from deltaline_server.config import local_address

TIMEOUT_S = 3.0
SERVICE = layer_service_pb2.DESCRIPTOR.services_by_name["LayerService"].full_name


def main() -> int:
    """Ask once; print the answer."""
    address = sys.argv[1] if len(sys.argv) > 1 else local_address(os.environ)
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}")
            return 1
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}")
    return int(response.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main())
