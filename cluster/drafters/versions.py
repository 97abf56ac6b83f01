"""What became of the drafts of each version of a draft model's weights."""

from dataclasses import dataclass

from cluster.messages import VersionGrade

LATEST = 4096  # verified positions that are counted in full; before that they fade
MOST_VERSIONS = 8


@dataclass(slots=True)
class _Count:
    num_verified: int = 0
    num_accepted: int = 0


class VersionTally:
    """Counts for the version that drafts now; those before keep what they had at their end."""

    def __init__(self) -> None:
        self._version = 0
        self._counts = {0: _Count()}

    @property
    def version(self) -> int:
        """What drafts now."""
        return self._version

    @property
    def grades(self) -> tuple[VersionGrade, ...]:
        """Of the latest versions."""
        return tuple(
            VersionGrade(
                version=version,
                num_verified=count.num_verified,
                num_accepted=count.num_accepted,
            )
            for version, count in self._counts.items()
        )

    def begin(self, version: int) -> None:
        """All that is drafted from now on is of this version."""
        self._version = version
        self._counts[version] = self._counts.pop(version, _Count())
        if len(self._counts) > MOST_VERSIONS:
            del self._counts[next(iter(self._counts))]

    def observe(self, *, num_right: int, num_known: int) -> None:
        """Of a tail so many tokens were right, of those whose place is committed now."""
        count = self._counts[self._version]
        count.num_verified += min(num_right + 1, num_known)
        count.num_accepted += num_right
        if count.num_verified > LATEST:
            count.num_verified //= 2
            count.num_accepted //= 2
