"""The file of keys: what is in it, who gets in, and what becomes of it while it is used."""

import logging
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.keys import KeysFile, load_keys
from cluster.errors import ConfigurationError, Unauthenticated
from cluster.tools.keys import KeyOptions, create_key, list_keys, revoke_key
from deployments.auth import Authenticator
from deployments.keys import KeyRing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the keys are to be."""
    return tmp_path / "keys.yaml"


def reason_of(ring: KeyRing, key: str) -> str:
    """Why a key does not open; it must not."""
    with pytest.raises(Unauthenticated) as raised:
        ring.tenant_of(key)
    return raised.value.reason


def test_a_key_opens_what_it_was_made_for(path: Path) -> None:
    """Tenant, models, limits, priority and weight come out as they went in."""
    options = KeyOptions(
        models=("small",),
        concurrent_requests=3,
        tokens_per_minute=500.0,
        priority=-2,
        weight=2.5,
    )
    key = create_key(path, "acme", options)
    tenant = KeyRing(path).tenant_of(key)
    assert (tenant.name, tenant.models, tenant.priority, tenant.weight) == (
        "acme",
        ("small",),
        -2,
        2.5,
    )
    assert tenant.limits.concurrent_requests == 3
    assert tenant.limits.requests_per_minute is None
    assert tenant.limits.tokens_per_minute == 500.0
    assert tenant.may_ask("small")
    assert not tenant.may_ask("large")


def test_the_key_is_in_no_file_and_nobody_else_reads_it(path: Path) -> None:
    """What is stored is a hash, in a file of its owner's, and no list shows it."""
    key = create_key(path, "acme", KeyOptions())
    secret = key.split("-", 2)[2]
    assert len(secret) >= 43  # 256 bits
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    [listed] = list_keys(path)
    assert listed["state"] == "valid"
    assert not {key, secret, load_keys(path).keys[0].sha256} & set(map(str, listed.values()))


def test_revoked_expired_and_unknown_keys_are_told_alike(path: Path) -> None:
    """They do not open, and the caller does not learn which they were."""
    revoked, expiring, good = (
        create_key(path, "acme", KeyOptions(expires_days=days)) for days in (None, 1.0, None)
    )
    revoke_key(path, revoked.split("-")[1])
    later = datetime.now(UTC) + timedelta(days=2)
    ring = KeyRing(path, clock=lambda: later)
    assert ring.tenant_of(good).name == "acme"
    assert [reason_of(ring, key) for key in (revoked, expiring, good[:-1], "dh-0-x")] == [
        "revoked",
        "expired",
        "unknown",
        "unknown",
    ]
    assert len({str(Unauthenticated(reason)) for reason in ("revoked", "expired", "unknown")}) == 1
    assert KeyRing(path).tenant_of(expiring).name == "acme"
    states = {entry["id"]: entry["state"] for entry in list_keys(path)}
    assert states[revoked.split("-")[1]] == "revoked"


@pytest.fixture(scope="module")
def authenticator(tmp_path_factory: pytest.TempPathFactory) -> Authenticator:
    """One for all examples."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    create_key(path, "acme", KeyOptions())
    return Authenticator(KeyRing(path))


@given(shown=st.text(max_size=300))
def test_whatever_is_shown_is_a_tenant_or_unauthenticated(
    authenticator: Authenticator, shown: str
) -> None:
    """No header does anything else, also none of surrogates and control characters."""
    for header in (shown, f"Bearer {shown}", f"Bearer dh-{shown}"):
        with pytest.raises(Unauthenticated):
            authenticator.tenant_of(header)


def test_the_file_is_read_again_when_it_changes(path: Path) -> None:
    """Also when a link to it is turned to another one of equal age and size, as volumes do."""
    first, second = path.with_name("first"), path.with_name("second")
    keys = [create_key(each, "acme", KeyOptions()) for each in (first, second)]
    for each in (first, second):
        os.utime(each, ns=(10**18, 10**18))
    path.symlink_to(first)
    ring = KeyRing(path)
    assert not ring.file.refresh()
    assert ring.tenant_of(keys[0]).name == "acme"
    link = path.with_name("link")
    link.symlink_to(second)
    link.replace(path)
    assert ring.file.refresh()
    assert ring.tenant_of(keys[1]).name == "acme"
    assert reason_of(ring, keys[0]) == "unknown"


def test_a_broken_file_leaves_the_last_good_one(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is complained of once, and forgotten when the file is good again."""
    key = create_key(path, "acme", KeyOptions())
    good = path.read_text()
    ring = KeyRing(path)
    with caplog.at_level(logging.ERROR):
        path.write_text("keys: [{id: x}]")
        assert [ring.file.refresh() for _ in range(3)] == [False] * 3
        path.unlink()
        assert not ring.file.refresh()
    assert ring.tenant_of(key).name == "acme"
    assert len(caplog.records) == 2
    path.write_text(good.replace("acme", "other"))
    assert ring.file.refresh()
    assert ring.tenant_of(key).name == "other"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keys: {", "is no YAML"),
        ("keys: [{sha256: 5}]", "keys.0.id"),
        ("keyz: []", "keyz"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start(path: Path, text: str | None, problem: str) -> None:
    """The error names the file and the key, and shows no hash."""
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        KeyRing(path)


def test_what_cannot_be_made_is_named(path: Path) -> None:
    """A tenant with a space, a weight of nothing, a key that is not there."""
    with pytest.raises(ConfigurationError, match="tenant"):
        create_key(path, "a b", KeyOptions())
    with pytest.raises(ConfigurationError, match="weight"):
        create_key(path, "acme", KeyOptions(weight=0.0))
    assert not path.exists()
    create_key(path, "acme", KeyOptions())
    with pytest.raises(ConfigurationError, match="no key"):
        revoke_key(path, "0123456789")


def test_one_id_is_one_key(path: Path) -> None:
    """A file with an id twice is refused: which of them counts would be chance."""
    create_key(path, "acme", KeyOptions())
    keys = load_keys(path).keys
    with pytest.raises(ValueError, match="there twice"):
        KeysFile(keys=(*keys, *keys))
