"""The cluster under drill: who is there, how to harm it, and whether it is whole again."""

from typing import Protocol

from cluster.tools.drill.faults import Census, Fault


class Fleet(Protocol):
    """What a drill does to a cluster. The calls block, and belong into a thread."""

    def census(self) -> Census:
        """How many there are of each part."""
        ...

    def inject(self, fault: Fault, victim: int) -> None:
        """Do it, to that one of its part; a pause is over when this returns."""
        ...

    def missing(self) -> str | None:
        """What is not as it was in the beginning; None when the cluster is whole."""
        ...
