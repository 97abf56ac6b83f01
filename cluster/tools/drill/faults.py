"""What can go wrong on purpose, and the order in which it does."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import ConfigurationError


class Part(StrEnum):
    """What a fault happens to."""

    ENGINE = "engine"
    RANK = "rank"
    TARGET = "target"  # an engine's supervisor
    DRAFT = "draft worker"
    KEEPER = "draft supervisor"
    GATEWAY = "gateway"
    ROUTER = "router"
    CONTROLLER = "controller"  # Serve's
    CONTROL_SERVICE = "control service"  # Ray's, on the head node
    TARGET_NODE = "target node"
    EDGE_NODE = "edge node"  # with a gateway and a draft worker
    HEAD_NODE = "head node"


class Harm(StrEnum):
    """What happens to it."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, for good: somebody has to notice
    PAUSE = "pause"  # SIGSTOP, and SIGCONT some seconds later: nobody watches these
    REMOVE = "remove"  # all processes of a node at once


Census = Mapping[Part, int]  # how many there are of each

_TARGETS = (Part.ENGINE, Part.TARGET_NODE)
_GATEWAYS = (Part.GATEWAY,)


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault. Of each of `spares` there must be two, so that one is left.

    `cuts` says that connections of clients end with it, by nature: they have to come again.
    """

    part: Part
    harm: Harm
    spares: tuple[Part, ...] = ()
    cuts: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.part} {self.harm}"

    def possible(self, census: Census) -> bool:
        """Whether there is something to harm, and one of everything needed is left."""
        return census.get(self.part, 0) > 0 and all(census.get(part, 0) > 1 for part in self.spares)


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(Part.ENGINE, Harm.KILL, _TARGETS),
        Fault(Part.ENGINE, Harm.STOP, _TARGETS),
        Fault(Part.RANK, Harm.KILL, _TARGETS),
        Fault(Part.RANK, Harm.STOP, _TARGETS),
        Fault(Part.TARGET, Harm.KILL, _TARGETS),
        Fault(Part.TARGET, Harm.STOP, _TARGETS),
        Fault(Part.DRAFT, Harm.KILL),
        Fault(Part.DRAFT, Harm.STOP),
        Fault(Part.KEEPER, Harm.KILL),
        Fault(Part.GATEWAY, Harm.KILL, _GATEWAYS, cuts=True),
        Fault(Part.GATEWAY, Harm.STOP, _GATEWAYS, cuts=True),
        Fault(Part.ROUTER, Harm.KILL),
        Fault(Part.ROUTER, Harm.STOP),
        Fault(Part.CONTROLLER, Harm.KILL),
        Fault(Part.CONTROLLER, Harm.PAUSE),
        Fault(Part.CONTROL_SERVICE, Harm.PAUSE),
        Fault(Part.TARGET_NODE, Harm.REMOVE, _TARGETS),
        Fault(Part.EDGE_NODE, Harm.REMOVE, (*_GATEWAYS, Part.EDGE_NODE), cuts=True),
    )
}
LAST = Fault(Part.HEAD_NODE, Harm.KILL)  # nothing brings it back: a drill ends with it


def find(names: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of these names, all if there are none. Raises ConfigurationError."""
    known = FAULTS | {LAST.name: LAST}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(f"--kind: no fault {unknown[0]!r}; there are: {', '.join(known)}")
    return tuple(known[name] for name in names or known)


class Planner:
    """Draws faults: each kind that is possible once before any comes again, in random order."""

    def __init__(self, kinds: Sequence[Fault], *, seed: int) -> None:
        self._kinds = [kind for kind in kinds if kind is not LAST]
        self._random = random.Random(seed)
        self._bag: list[Fault] = []

    def draw(self, census: Census) -> tuple[Fault, int]:
        """What to do next, and to which one of its part. Raises ConfigurationError."""
        possible = [kind for kind in self._kinds if kind.possible(census)]
        if not possible:
            names = ", ".join(kind.name for kind in self._kinds) or "nothing"
            raise ConfigurationError(f"--kind: {names}: none of it can be done to this cluster")
        left = [kind for kind in self._bag if kind in possible]
        if not left:
            self._bag = left = list(self._kinds)
            left = possible
        kind = self._random.choice(left)
        self._bag.remove(kind)
        return kind, self._random.randrange(census[kind.part])
