"""Where the launchers of one job meet, from torchrun's options. Values in, values out."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

C10D_PORT = 29400
STATIC_PORT = 29500
LOOPBACK = "127.0.0.1"


class RendezvousError(ValueError):
    """An option is not accepted; the message names it and what is."""


class Hosting(enum.Enum):
    """Who runs the Coordinator."""

    HERE = "here"
    ELSEWHERE = "elsewhere"
    WHERE_THE_ENDPOINT_IS = "endpoint"
    """Here if the endpoint's host is this one, and no other launcher of this host is first."""


@dataclass(frozen=True)
class RendezvousConf:
    """What ``--rdzv-conf`` says that means something here; seconds."""

    is_host: bool | None = None
    join_timeout_s: float = 300.0
    """How long to wait for the first, or for enough, nodes."""
    connect_wait_s: float = 120.0
    """How long a node tries to reach the Coordinator."""
    replacement_group_size: int = 1
    """Nodes that train only together."""


@dataclass(frozen=True)
class Rendezvous:
    """Where, under which name, and who is the host."""

    host: str
    port: int
    """0: a free one; then all is on this node."""
    run_id: str
    hosting: Hosting
    conf: RendezvousConf
    place: int | None
    """Of this node among the others, if it has been told one."""


@dataclass(frozen=True)
class RendezvousOptions:
    """torchrun's options as they were given."""

    backend: str
    """Empty: c10d if there is an endpoint and no ``--node-rank``, else static."""
    endpoint: str
    run_id: str
    conf: str
    standalone: bool
    max_nodes: int
    node_rank: int | None
    master_addr: str
    master_port: int | None
    environ: Mapping[str, str] = field(default_factory=dict)


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port of ``host[:port]``; an IPv6 address stands in brackets.

    Raises:
        RendezvousError
    """
    accepted = f"--rdzv-endpoint: {text!r}: host, host:port or [IPv6]:port is accepted"
    host, colon, port = text.strip().rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text.strip(), str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise RendezvousError(accepted)
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise RendezvousError(accepted)
    return host, int(port)


_NO_MEANING = {
    "rank": "--node-rank says it",
    "read_timeout": "nothing is read from a store",
    "close_timeout": "nothing is closed with a store",
    "last_call_timeout": "a node that is slow to stop keeps its place",
    "use_libuv": "torch decides that for the store of the ranks",
    "replacement_group_size": "",
    "store_connect_wait_seconds": "",
    "join_timeout": "",
    "timeout": "",
    "is_host": "",
}
"""Accepted keys, and for those without effect the reason."""


def keys_without_effect() -> Mapping[str, str]:
    """Return the accepted keys that say nothing here, and why."""
    return {key: why for key, why in _NO_MEANING.items() if why}


def parse_conf(text: str) -> tuple[RendezvousConf, list[str]]:
    """Read ``key=value,…``; return it, and a note for each key that has no effect here.

    Raises:
        RendezvousError: an unknown key or a value that is not accepted.
    """
    values: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (word.strip() for word in pair.partition("="))
        if not equals or not key or not value:
            raise RendezvousError(f"--rdzv-conf: {pair!r}: key=value,key=value is accepted")
        if key not in _NO_MEANING:
            accepted = ", ".join(sorted(_NO_MEANING))
            raise RendezvousError(f"--rdzv-conf: unknown key {key!r}; accepted: {accepted}")
        values[key] = value
    conf = RendezvousConf(
        is_host=_switch("is_host", values["is_host"]) if "is_host" in values else None,
        join_timeout_s=_seconds(values, ("join_timeout", "timeout"), RendezvousConf.join_timeout_s),
        connect_wait_s=_seconds(values, ("store_connect_wait_seconds",), RendezvousConf.connect_wait_s),
        replacement_group_size=_count("replacement_group_size", values.get("replacement_group_size", "1")),
    )
    return conf, [f"--rdzv-conf {key}: {_NO_MEANING[key]}" for key in values if _NO_MEANING[key]]


def _switch(key: str, text: str) -> bool:
    accepted = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return accepted[text.lower()]
    except KeyError:
        raise RendezvousError(f"--rdzv-conf {key}: {text!r}: {', '.join(accepted)} are accepted") from None


def _count(key: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return int(text)
    raise RendezvousError(f"--rdzv-conf {key}: {text!r}: a number above 0 is accepted")


def _seconds(values: Mapping[str, str], keys: tuple[str, ...], default: float) -> float:
    for key in keys:
        if key in values:
            try:
                seconds = float(values[key])
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < float("inf"):
                raise RendezvousError(f"--rdzv-conf {key}: {values[key]!r}: seconds above 0 are accepted")
            return seconds
    return default


def plan_rendezvous(options: RendezvousOptions) -> tuple[Rendezvous, list[str]]:
    """Decide where to meet; return it, and notes for the user.

    Raises:
        RendezvousError
    """
    conf, notes = parse_conf(options.conf)
    if options.backend not in ("", "c10d", "static"):
        raise RendezvousError(
            f"--rdzv-backend: {options.backend!r}: c10d and static are accepted, and both mean the same: "
            "the nodes meet at nvrx-launch's own Coordinator"
        )
    static = options.backend == "static" or (
        not options.backend and (not options.endpoint or options.node_rank is not None)
    )
    nowhere = static and not options.endpoint and options.master_port is None
    if options.standalone or (nowhere and options.max_nodes == 1):
        if options.max_nodes > 1:
            raise RendezvousError("--standalone is for one node, but --nnodes allows more")
        run_id = str(uuid.uuid4())
        return Rendezvous(LOOPBACK, 0, run_id, Hosting.HERE, conf, None), notes
    default_port = (options.master_port or STATIC_PORT) if static else C10D_PORT
    if options.endpoint:
        host, port = parse_endpoint(options.endpoint, default_port)
    elif static:
        host, port = parse_endpoint(f"{_bracketed(options.master_addr)}:{default_port}", default_port)
    else:
        raise RendezvousError("--rdzv-endpoint is missing: host:port of the node that coordinates the job")
    if port == 0 and options.max_nodes > 1:
        raise RendezvousError("--rdzv-endpoint: port 0 is a free one, which the other nodes cannot know")
    hosting = _hosting(options, conf, static, port)
    return Rendezvous(host, port, options.run_id, hosting, conf, _place(options, static)), notes


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _hosting(options: RendezvousOptions, conf: RendezvousConf, static: bool, port: int) -> Hosting:
    if conf.is_host is not None:
        return Hosting.HERE if conf.is_host else Hosting.ELSEWHERE
    if port == 0:
        return Hosting.HERE
    if static:
        return Hosting.ELSEWHERE if options.node_rank else Hosting.HERE
    return Hosting.WHERE_THE_ENDPOINT_IS


def _place(options: RendezvousOptions, static: bool) -> int | None:
    """``--node-rank`` or, without it, the node's number with srun or an outer launcher."""
    if static:
        return options.node_rank or 0
    for name in ("SLURM_PROCID", "GROUP_RANK"):
        number = options.environ.get(name, "")
        if number.isascii() and number.isdigit():
            return int(number)
    return None
