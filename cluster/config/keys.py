"""The file of API keys: what each opens, and a hash of it. The key itself is in no file.

A key is `dh-ID-SECRET`. The secret has 256 random bits, so one round of SHA-256 keeps it.
"""

import secrets
from collections import Counter
from datetime import datetime
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Self

import yaml
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from cluster.config.base import Config
from cluster.errors import ConfigurationError
from cluster.tenant import Tenant, TenantLimits

PREFIX = "dh"
ID_BYTES = 5
SECRET_BYTES = 32
HIGHEST_PRIORITY = 100


class LimitsConfig(Config):
    """See TenantLimits; what is absent is not limited."""

    concurrent_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class KeyConfig(Config):
    """One key. A tenant may have several: those of equal limits share them."""

    id: str = Field(pattern=r"^[0-9a-f]{10}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # of the whole key
    tenant: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    models: tuple[str, ...] = ()  # none: all
    limits: LimitsConfig = LimitsConfig()
    priority: int = Field(default=0, ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: bool = False

    def opens_with(self, key: str) -> bool:
        """Whether this is the key; it takes the same time whichever part is wrong."""
        return compare_digest(self.sha256, hash_of(key))

    def expired(self, now: datetime) -> bool:
        """Whether its time is over."""
        return self.expires is not None and now >= self.expires

    def as_tenant(self) -> Tenant:
        """Whose key it is."""
        return Tenant(
            name=self.tenant,
            models=self.models,
            limits=TenantLimits(**self.limits.model_dump()),
            priority=self.priority,
            weight=self.weight,
        )


class KeysFile(Config):
    """All keys, by distinct ids."""

    keys: tuple[KeyConfig, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        counts = Counter(key.id for key in self.keys)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"keys: {', '.join(twice)} is there twice")
        return self


def new_key() -> tuple[str, str]:
    """A key's id, and the key."""
    key_id = secrets.token_hex(ID_BYTES)
    return key_id, f"{PREFIX}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"


def id_of(key: str) -> str:
    """The id a key names; of what is no key, whatever stands there."""
    _, _, rest = key.partition("-")
    return rest.partition("-")[0]


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def load_keys(path: Path) -> KeysFile:
    """Read a YAML or JSON file. Raises ConfigurationError, which tells of no key."""
    try:
        data = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        return KeysFile.model_validate({} if data is None else data)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in wrong["loc"]) or "the whole"
        raise ConfigurationError(f"gateway.keys: {path}: {place}: {wrong['msg']}") from None
    except OSError as error:
        raise ConfigurationError(f"gateway.keys: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigurationError(f"gateway.keys: {path}: is no YAML") from None
