"""The only place that reads or sets the environment."""

import os
from pathlib import Path


def api_key() -> str | None:
    """The key that clients show, from DRAFTHOUSE_API_KEY; unlike an option no one else sees it."""
    return os.environ.get("DRAFTHOUSE_API_KEY") or None


def profiles_folder() -> Path:
    """Where profiles of steps are kept: DRAFTHOUSE_PROFILES, or a folder in the user's cache."""
    chosen = os.environ.get("DRAFTHOUSE_PROFILES")
    return Path(chosen) if chosen else Path.home() / ".cache" / "drafthouse" / "profiles"


def prepare_torch_environment() -> None:
    """Set what torch reads from the environment, here and in processes started from here.

    Call it before importing torch. On huge pages a CPU reads weights some 10% faster; without them
    each small page has to be looked up. What the operator has set stands.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def prepare_grpc_environment() -> None:
    """Set what gRPC reads from the environment; call it before importing grpc.

    What fails is told in one line by whoever asked for it. What the operator has set stands.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def prepare_ray_environment(*, joining: bool) -> None:
    """Set what Ray and its processes read from the environment; call it before importing ray.

    What the operator has set stands. `joining` a cluster that has tokens needs the mode named.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # its own default of 15 starves the target
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # or a late call joins what was left
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")  # 0.1 costs 3% of a core
    # A replica that answers no check is not asked to end first: it would answer that neither.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    if not joining:  # nobody scrapes the metrics of a Ray that lives as long as one command
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
    if joining and (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
