"""Which policy a configuration means."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.config import DrafthouseConfig, parse_config, speculation_from_flag
from cluster.control.adaptive import AdaptivePolicy
from cluster.control.policy import Candidate, FixedPolicy, Policy, StepShape
from cluster.drafters.silent import NoDrafter
from cluster.errors import ConfigurationError
from cluster.interfaces import Drafter
from cluster.local import build_target_worker
from cluster.local_policy import build_policy
from tests.fakes import FakeModel, SameDrafter

SHAPE = StepShape(num_sequences=1, num_rows=1, num_context_tokens=10)


def policy_of(folder: Path, drafter: Drafter, **speculation: object) -> Policy:
    """The policy that a configuration of a tiny target means."""
    config = parse_config(
        {
            "target": {"model": str(folder), "max_model_len": 256, "max_num_seqs": 2},
            "speculation": {"profile": False} | speculation,
        }
    )
    return build_policy(
        config,
        drafter,
        worker=build_target_worker(config.target, folder),
        folder=folder,
        registry=CollectorRegistry(),
    )


def num_asked(policy: Policy) -> int:
    """How many drafts it asks for at first."""
    return policy.choose([Candidate(seq_id=1, num_tokens=10)], SHAPE).get(1, 0)


def test_the_default_is_adaptive_with_a_cap_of_eight() -> None:
    """And profiles the target, as the documentation says."""
    speculation = DrafthouseConfig().speculation
    assert (speculation.policy, speculation.num_speculative_tokens) == ("adaptive", 8)
    assert speculation.profile


def test_adaptive_and_fixed(checkpoints: dict[str, Path]) -> None:
    """The number is a cap for the one, and the number for the other."""
    drafter = SameDrafter(FakeModel())
    adaptive = policy_of(checkpoints["target"], drafter, num_speculative_tokens=3)
    assert isinstance(adaptive, AdaptivePolicy)
    assert 1 <= num_asked(adaptive) <= 3
    fixed = policy_of(checkpoints["target"], drafter, policy="fixed", num_speculative_tokens=3)
    assert isinstance(fixed, FixedPolicy)
    assert num_asked(fixed) == 3


def test_without_a_drafter_or_drafts_nothing_is_asked(checkpoints: dict[str, Path]) -> None:
    """K = 0 is the plain path, whatever the policy is called."""
    assert num_asked(policy_of(checkpoints["target"], NoDrafter())) == 0
    off = policy_of(checkpoints["target"], SameDrafter(FakeModel()), num_speculative_tokens=0)
    assert num_asked(off) == 0


def test_the_flag_says_a_number_or_auto() -> None:
    """A number means always that many; anything else is refused by name."""
    assert speculation_from_flag("auto") == {"policy": "adaptive"}
    assert speculation_from_flag("0") == {"policy": "fixed", "num_speculative_tokens": 0}
    for wrong in ("", "-1", "four", "4.0"):
        with pytest.raises(ConfigurationError, match="--num-speculative-tokens"):
            speculation_from_flag(wrong)
