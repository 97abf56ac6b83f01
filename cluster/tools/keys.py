"""Makes, lists and revokes API keys in their file: what `drafthouse keys` does."""

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from cluster.config.keys import KeyConfig, KeysFile, LimitsConfig, hash_of, load_keys, new_key
from cluster.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """What a new key opens; None and nothing are no limit."""

    models: tuple[str, ...] = ()
    concurrent_requests: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    priority: int = 0
    weight: float = 1.0
    expires_days: float | None = None


def create_key(path: Path, tenant: str, options: KeyOptions) -> str:
    """Add a key to the file, which is made if there is none; returns the key, this once.

    Raises ConfigurationError naming what is wrong.
    """
    keys = load_keys(path).keys if path.exists() else ()
    key_id, key = new_key()
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        expires = None
        if options.expires_days is not None:
            expires = now + timedelta(days=options.expires_days)
        config = KeyConfig(
            id=key_id,
            sha256=hash_of(key),
            tenant=tenant,
            models=options.models,
            limits=LimitsConfig(
                concurrent_requests=options.concurrent_requests,
                requests_per_minute=options.requests_per_minute,
                tokens_per_minute=options.tokens_per_minute,
            ),
            priority=options.priority,
            weight=options.weight,
            created=now,
            expires=expires,
        )
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(_problem(error)) from None
    _write(path, KeysFile(keys=(*keys, config)))
    return key


def revoke_key(path: Path, key_id: str) -> None:
    """Make a key invalid for good. Raises ConfigurationError when there is no such key."""
    keys = load_keys(path).keys
    if key_id not in {key.id for key in keys}:
        raise ConfigurationError(f"{path} has no key {key_id!r}; see `drafthouse keys list`")
    revoked = tuple(
        key.model_copy(update={"revoked": True}) if key.id == key_id else key for key in keys
    )
    _write(path, KeysFile(keys=revoked))


def list_keys(path: Path) -> list[dict[str, object]]:
    """All keys as plain data, without their hashes, each with its state."""
    now = datetime.now(UTC)
    return [
        {
            "id": key.id,
            "tenant": key.tenant,
            "state": "revoked" if key.revoked else "expired" if key.expired(now) else "valid",
            "models": list(key.models),
            "limits": key.limits.model_dump(exclude_none=True),
            "priority": key.priority,
            "weight": key.weight,
            "created": key.created.isoformat(),
            "expires": key.expires.isoformat() if key.expires else None,
        }
        for key in load_keys(path).keys
    ]


def _write(path: Path, keys: KeysFile) -> None:
    """Replace the file at once, so that whoever reads it sees all of the old or all of the new."""
    text = yaml.safe_dump(keys.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    path = path.resolve()  # a link stays one
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def _problem(error: Exception) -> str:
    """A validation's first complaint, in a line."""
    lines = str(error).splitlines()
    return ": ".join(line.strip() for line in lines[1:3]) if len(lines) > 1 else lines[0]
