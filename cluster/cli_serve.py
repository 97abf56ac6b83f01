"""`drafthouse serve`: the whole cluster, for as long as the command runs."""

import math
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from cluster.config import (
    DrafthouseConfig,
    GatewayConfig,
    draft_models,
    drafter_from_flag,
    drafters_beside,
    load_config,
    parse_config,
    prepare_ray_environment,
    speculation_from_flag,
)
from cluster.config.keys import load_keys
from cluster.config.security import check_certificates
from cluster.errors import ConfigurationError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

ROOM_CPUS = 0.5  # gateway's, router's and supervisors' small shares, beside targets and drafts
POLL_SECONDS = 0.2

Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes any free port.")]


def serve(  # noqa: PLR0913 - one parameter an option
    config: Annotated[Path | None, typer.Argument(help="A YAML file; see local.yaml.")] = None,
    *,
    target: Annotated[str | None, typer.Option(help="Model reference of the target.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="off, ngram, ngram:TABLE, a model REF, or ngram+REF.")
    ] = None,
    num_speculative_tokens: Annotated[
        str | None, typer.Option(metavar="K|auto", help="Drafts per step: always K, or what pays.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Processes that hold the target together.")
    ] = None,
    grpc_port: Port = None,
    http_port: Port = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plaintext also outside this machine.")
    ] = False,
    address: Annotated[str | None, typer.Option(help="Join this Ray cluster.")] = None,
) -> None:
    """Serve over gRPC and HTTP until Ctrl-C, on a Ray of its own or one that runs already."""
    settings = _settings(
        load_config(config) if config else DrafthouseConfig(),
        target=target,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
        tensor_parallel_size=tensor_parallel_size,
        grpc_port=grpc_port,
        http_port=http_port,
        insecure=insecure or None,
    )
    settings.gateway.check_exposure()
    end = _End()
    try:
        with Console(stderr=True).status("loading") as status:
            _serve(settings, address, status, end)
    except KeyboardInterrupt:
        return


class _End:
    """Ctrl-C or SIGTERM: raised as KeyboardInterrupt at once, or later where Ray must not be torn.

    An exception in the middle of Ray's own code leaves it in a state that it does not survive.
    """

    def __init__(self) -> None:
        self._asked = False
        self._later = False
        self._catch()

    def only_at_checks(self) -> None:
        """From now on raise in `check` only. Call it again after Ray has put its own handlers."""
        self._later = True
        self._catch()

    def check(self) -> None:
        """Raises KeyboardInterrupt when the command was asked to end."""
        if self._asked:
            raise KeyboardInterrupt

    def _catch(self) -> None:
        # Also where a shell made a background command ignore Ctrl-C.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        del number, frame
        self._asked = True
        if not self._later:
            raise KeyboardInterrupt


def _serve(config: DrafthouseConfig, address: str | None, status: Status, end: _End) -> None:
    prepare_ray_environment(joining=address is not None)
    if address is None:
        status.update("checking the models")
        _check_files(config.gateway)
        _check_models(config)
    status.update("loading Ray")
    from cluster.actors import session

    cluster: AbstractContextManager[None]
    if address is None:
        config = _with_ports(config)
        status.update("starting Ray")
        cluster = session.local_ray(_num_cpus(config), config.gateway)
    else:
        if config.gateway.http_port == 0:
            raise ConfigurationError("gateway.http_port: 0 is only for a Ray of this command's own")
        status.update(f"joining Ray at {address}")
        cluster = session.joined_ray(address, config.gateway)
    end.only_at_checks()
    with cluster:
        end.only_at_checks()

        def progress(text: str) -> None:
            end.check()
            status.update(text)

        progress("deploying")
        grpc_port = session.await_ready(session.deploy(config), progress=progress)
        status.stop()
        host = config.gateway.host
        print(  # noqa: T201 - a line for programs, whatever the terminal is
            f"ready grpc={host}:{grpc_port} http={host}:{config.gateway.http_port}", flush=True
        )
        while True:
            end.check()
            time.sleep(POLL_SECONDS)


def _with_ports(config: DrafthouseConfig) -> DrafthouseConfig:
    """Ports that are free now; where any would do, one that a restarted gateway comes back on."""
    from cluster.actors.ports import check_free, free_ports

    gateway = config.gateway
    check_free(gateway.host, gateway.grpc_port, field="gateway.grpc_port")
    check_free(gateway.host, gateway.http_port, field="gateway.http_port")
    grpc_port, http_port = free_ports(gateway.host, 2)
    ports = {
        "grpc_port": gateway.grpc_port or grpc_port,
        "http_port": gateway.http_port or http_port,
    }
    return _changed(config, gateway=ports)


def _settings(
    config: DrafthouseConfig,
    *,
    target: str | None,
    draft: str | None,
    num_speculative_tokens: str | None,
    tensor_parallel_size: int | None,
    grpc_port: int | None,
    http_port: int | None,
    insecure: bool | None,
) -> DrafthouseConfig:
    """The configuration with what the options say in its place."""
    changes: dict[str, Any] = {
        "target": {"model": target, "tensor_parallel_size": tensor_parallel_size},
        "speculation": {}
        if num_speculative_tokens is None
        else speculation_from_flag(num_speculative_tokens),
        "gateway": {"grpc_port": grpc_port, "http_port": http_port, "insecure": insecure},
    }
    config = _changed(config, **changes)
    if target is not None:
        config = parse_config(config.model_dump() | {"name": target})
    if draft is not None:
        drafter = drafter_from_flag(draft, kind_of=_kind_of, placement="worker")
        config = parse_config(config.model_dump() | {"drafter": drafter.model_dump()})
    return config


def _kind_of(reference: str) -> str:
    """The kind of a draft, and a model where it is not here: then it may be on the cluster."""
    from cluster.drafters.heads.kinds import kind_of

    try:
        return kind_of(reference)
    except ConfigurationError:
        return "model"  # if it is nowhere, checking the models says so


def _changed(config: DrafthouseConfig, **sections: dict[str, Any]) -> DrafthouseConfig:
    """A copy with some fields of some sections changed; None leaves a field as it is."""
    data = config.model_dump()
    for section, fields in sections.items():
        data[section] |= {name: value for name, value in fields.items() if value is not None}
    return parse_config(data)


def _check_files(gateway: GatewayConfig) -> None:
    """Refuse here what the gateway would refuse after starting up."""
    if gateway.keys is not None:
        load_keys(gateway.keys)
    if (tls := gateway.tls) is not None:
        check_certificates(
            "gateway.tls", certificate=tls.certificate, key=tls.key, authority=tls.client_ca
        )


def _check_models(config: DrafthouseConfig) -> None:
    """Refuse here, in a second, what the cluster would refuse after starting up."""
    from cluster.drafters.vocabulary import check_same_tokenizer
    from cluster.models.reference import resolve

    folder = resolve(config.target.model)
    for model in draft_models(config.drafter):
        check_same_tokenizer(folder, resolve(model.model))
    if beside := drafters_beside(config.drafter):
        from cluster.local_drafter import check_beside

        check_beside(beside, config.target, folder)
    if config.target.tensor_parallel_size > 1:
        from cluster.models.shard import check_split
        from cluster.models.spec import load_spec

        check_split(load_spec(folder), config.target.tensor_parallel_size)


def _num_cpus(config: DrafthouseConfig) -> int:
    """Logical CPUs for Ray to count with: they only say who fits where, not what may be used."""
    replica = sum(bundle.get("CPU", 0.0) for bundle in config.target.bundles)
    needed = config.target.num_replicas * replica + ROOM_CPUS
    needed += config.gateway.num_replicas * config.gateway.resources.get("CPU", 0.0)
    for model in draft_models(config.drafter):
        if model.in_workers:
            beside = config.target.num_replicas if model.placement == "colocated" else 1
            needed += beside * model.num_replicas * model.resources.get("CPU", 0.0)
    return max(2, math.ceil(needed))
