"""The keys a gateway knows, by id: it looks again every second whether their file has changed."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from cluster.config.keys import KeyConfig, hash_of, id_of, load_keys
from cluster.errors import Unauthenticated
from cluster.tenant import Tenant
from deployments.watched import Watched


class KeyRing:
    """Raises ConfigurationError when the file cannot be read at the start."""

    def __init__(
        self, path: Path, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._clock = clock
        self.file: Watched[Mapping[str, KeyConfig]] = Watched(
            (path,), lambda: {key.id: key for key in load_keys(path).keys}
        )

    def tenant_of(self, key: str) -> Tenant:
        """Whose key it is. Raises Unauthenticated.

        One hash and one comparison, which takes the same time for any two hashes, are made in
        every case: what it takes tells nothing but whether an id exists, and ids are no secret.
        """
        found = self.file.value.get(id_of(key))
        if found is None:
            hash_of(key)
            raise Unauthenticated("unknown")
        if not found.opens_with(key):
            raise Unauthenticated("unknown")
        if found.revoked:
            raise Unauthenticated("revoked")
        if found.expired(self._clock()):
            raise Unauthenticated("expired")
        return found.as_tenant()
