"""Whether a gateway serves, for a probe that has to speak TLS: `python -m deployments.grpc_probe`.

Ends with 0 when grpc.health.v1 says SERVING, else with 1.
"""

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 4.0


def serving(address: str, *, ca: Path | None = None, server_name: str | None = None) -> bool:
    """Whether the gateway at `host:port` takes requests.

    With a `ca` it must show a certificate that one signed, for `server_name` where that is given.
    """
    if ca is None:
        channel = grpc.insecure_channel(address)
    else:
        name = [] if server_name is None else [("grpc.ssl_target_name_override", server_name)]
        channel = grpc.secure_channel(
            address, grpc.ssl_channel_credentials(ca.read_bytes()), options=name
        )
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    """Ask once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--ca", type=Path, help="PEM file of who signed the certificate")
    parser.add_argument("--server-name", help="the name in the certificate")
    options = parser.parse_args()
    sys.exit(not serving(options.address, ca=options.ca, server_name=options.server_name))


if __name__ == "__main__":
    main()
