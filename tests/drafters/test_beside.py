"""Drafters beside the target, configured: what an engine is built with, and what is refused."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.config import (
    DrafthouseConfig,
    EagleDrafterConfig,
    NgramDrafterConfig,
    SkipDrafterConfig,
    TargetConfig,
    drafter_from_flag,
    parse_config,
)
from cluster.errors import ConfigurationError, NotBesideTarget
from cluster.local import ComputeSide, build_engine, build_target_worker
from cluster.local_drafter import check_beside, skipped_parts
from tests.checkpoints import make_checkpoint
from tests.harness import ask, make_request, running
from tests.heads import make_eagle, make_medusa


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), hidden_size=32, num_layers=4)


def config_of(target: Path, drafter: dict[str, object]) -> DrafthouseConfig:
    return parse_config(
        {
            "target": {
                "model": str(target),
                "max_model_len": 64,
                "max_num_seqs": 2,
                "num_threads": 1,
            },
            "speculation": {
                "policy": "fixed",
                "num_speculative_tokens": 4,
                "draft_deadline_seconds": 5.0,
            },
            "drafter": drafter,
        }
    )


async def test_all_kinds_in_one_choice(target: Path, tmp_path: Path) -> None:
    """Named in GetModel, asked, and the answer is that of the target alone."""
    members = [
        {"kind": "ngram"},
        {"kind": "medusa", "model": str(make_medusa(tmp_path / "medusa", target)), "name": "m"},
        {"kind": "eagle", "model": str(make_eagle(tmp_path / "eagle", target)), "name": "e"},
        {"kind": "skip", "skip_layers": [1], "skip_mlp": [2]},
    ]
    answers = []
    for drafter in ({"kind": "off"}, {"kind": "choice", "drafters": members}, members[3]):
        local = build_engine(config_of(target, drafter), registry=CollectorRegistry())
        async with running(local.engine):
            asked = make_request([5, 6, 7, 8], max_tokens=40, ignore_eos=True)
            [recorder] = await ask(local.engine, [asked])
        answers.append(recorder)
        await local.close()
        if drafter["kind"] == "choice":
            assert local.info.drafters == ("ngram", "m", "e", "skip")
    assert answers[0].answer() == answers[1].answer() == answers[2].answer()
    assert answers[0].num_drafted == 0 < answers[1].num_drafted
    assert answers[2].num_accepted > 0


class Elsewhere:
    """A target in other processes."""


def test_a_target_elsewhere_is_refused_at_start(target: Path) -> None:
    """Ranks, or whatever else is not this process: by a typed error that names the drafter."""
    config = config_of(target, {"kind": "skip", "skip_layers": [1]})
    worker = build_target_worker(config.target, target)
    elsewhere = ComputeSide(Elsewhere(), worker)  # type: ignore[arg-type]
    with pytest.raises(NotBesideTarget, match=r"'skip'.*other processes"):
        build_engine(config, registry=CollectorRegistry(), ranks=elsewhere)


def test_what_is_skipped_has_to_be_there() -> None:
    """Layers past the last, all of them, or none."""
    with pytest.raises(ConfigurationError, match=r"layer 4 is to be skipped, .* last is 3"):
        skipped_parts(SkipDrafterConfig(skip_layers=(1, 4)), num_layers=4)
    with pytest.raises(ConfigurationError, match="nothing of 4 layers is left"):
        skipped_parts(SkipDrafterConfig(skip_layers=(0, 1, 2, 3)), num_layers=4)
    with pytest.raises(ConfigurationError, match="nothing is left out"):
        parse_config({"drafter": {"kind": "skip"}})
    parts = SkipDrafterConfig(skip_layers=(1,), skip_attention=(0,), skip_mlp=(2, 3))
    assert skipped_parts(parts, num_layers=4) == ({0, 1}, {1, 2, 3})


def test_the_flag_says_which_layers() -> None:
    """skip:3,5-7, also beside n-grams; what is no number is refused."""
    assert drafter_from_flag("skip:3,5-7") == SkipDrafterConfig(skip_layers=(3, 5, 6, 7))
    assert drafter_from_flag("ngram+skip:1").kind == "choice"
    for flag in ("skip:", "skip:a", "skip:1-", "skip:-1"):
        with pytest.raises(ConfigurationError, match="is no layer"):
            drafter_from_flag(flag)


def test_the_flag_names_a_table() -> None:
    """ngram: and the table's file."""
    assert drafter_from_flag("ngram:a.table") == NgramDrafterConfig(table=Path("a.table"))


def test_serve_refuses_before_it_starts(target: Path, tmp_path: Path) -> None:
    """By config.json alone: a head for another target, layers that it does not have."""
    other = make_checkpoint(tmp_path / "other", hidden_size=64, num_layers=4)
    head = EagleDrafterConfig(model=str(make_eagle(tmp_path / "head", other)))
    sizes = TargetConfig(max_model_len=64)
    check_beside([head], sizes, other)
    with pytest.raises(ConfigurationError, match="have 64 elements, the target's 32"):
        check_beside([head], sizes, target)
    with pytest.raises(ConfigurationError, match="layer 9"):
        check_beside([SkipDrafterConfig(skip_layers=(9,))], sizes, target)
