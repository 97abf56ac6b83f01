"""Fixtures for the drafters' tests."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """For all of them."""
