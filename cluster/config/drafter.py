"""The section `drafter`: the chosen kind carries its own fields."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from cluster.config.base import Config, DType, Resources
from cluster.errors import ConfigurationError

BOTH_FLAG = "ngram+"  # before a model reference
TABLE_FLAG = "ngram:"  # before a table's file
SKIP_FLAG = "skip:"  # before layers


class NoDrafterConfig(Config):
    """Plain decoding."""

    kind: Literal["off"] = "off"


class NgramDrafterConfig(Config):
    """What followed the same tokens before: in the sequence's own text, and where else is given.

    `tenant_memory_tokens` are kept of the latest answers to requests of each cache salt, for that
    salt's requests only. `table` is a file of `drafthouse tune ngram`.
    """

    kind: Literal["ngram"] = "ngram"
    tenant_memory_tokens: int = Field(default=0, ge=0)
    table: Path | None = None


class ModelDrafterConfig(Config):
    """A small model with the target's vocabulary.

    `placement` says where it runs: in the engine's process; in a pool of draft workers with
    replicas of their own; or in workers colocated with each target replica, in its placement group,
    `num_replicas` beside each. The workers of a pool serve all engines. `name` is the pool's, the
    model reference where there is none.

    With `run_ahead` it drafts while the target verifies. That hides the time drafts take, and needs
    cores (or a device) which the target leaves free; where both share the same few, turn it off.
    Left open, draft workers do and a drafter in the engine's process does not.
    """

    kind: Literal["model"] = "model"
    model: str
    name: str | None = Field(default=None, min_length=1, max_length=64)
    dtype: DType = "float32"
    device: str = "cpu"
    num_threads: int | None = Field(default=None, ge=1)
    max_model_len: int = Field(default=2048, ge=2)
    max_num_seqs: int = Field(default=16, ge=1)
    memory_utilization: float = Field(default=0.9, gt=0, le=1)  # of what is available at start
    placement: Literal["in_process", "worker", "colocated"] = "worker"
    run_ahead: bool | None = None
    max_tail: int = Field(default=32, ge=1)  # tokens drafted ahead of one sequence at most
    num_replicas: int = Field(default=1, ge=1)
    resources: Resources = Field(default_factory=lambda: {"CPU": 0.5})

    @property
    def pool(self) -> str:
        """What its workers, its drafts and its metrics are named after."""
        return self.name or self.model

    @property
    def in_workers(self) -> bool:
        """Whether it runs outside of the engine's process."""
        return self.placement != "in_process"

    @property
    def drafts_ahead(self) -> bool:
        """Whether it runs ahead."""
        return self.in_workers if self.run_ahead is None else self.run_ahead


class HeadDrafterConfig(Config):
    """What reads the target's hidden states, and therefore lives in the target's own process.

    Device and sizes are the target's. So is the number format, unless `dtype` says int8 for a
    float32 target or float32 for an int8 one: no token changes by it. `name` is that of its drafts
    and metrics, the model reference where there is none.
    """

    model: str
    dtype: DType | None = None
    name: str | None = Field(default=None, min_length=1, max_length=64)

    @property
    def pool(self) -> str:
        """What its drafts and its metrics are named after."""
        return self.name or self.model


class MedusaDrafterConfig(HeadDrafterConfig):
    """Medusa heads: one for each drafted position, as many as the checkpoint has."""

    kind: Literal["medusa"] = "medusa"


class EagleDrafterConfig(HeadDrafterConfig):
    """An EAGLE or EAGLE-3 head, or one in the Speculators format: its files say which."""

    kind: Literal["eagle"] = "eagle"


class SkipDrafterConfig(Config):
    """The target itself without some of its layers, on the keys and values it has already.

    Of `skip_layers` both parts are left out; of the others the attention or the feed-forward part.
    """

    kind: Literal["skip"] = "skip"
    name: str = Field(default="skip", min_length=1, max_length=64)
    skip_layers: tuple[NonNegativeInt, ...] = ()
    skip_attention: tuple[NonNegativeInt, ...] = ()
    skip_mlp: tuple[NonNegativeInt, ...] = ()

    @model_validator(mode="after")
    def _skips_something(self) -> Self:
        if not (self.skip_layers or self.skip_attention or self.skip_mlp):
            raise ValueError("skip_layers, skip_attention, skip_mlp: nothing is left out")
        return self

    @property
    def pool(self) -> str:
        """What its drafts and its metrics are named after."""
        return self.name


BesideConfig = MedusaDrafterConfig | EagleDrafterConfig | SkipDrafterConfig
AnyMember = NgramDrafterConfig | ModelDrafterConfig | BesideConfig


class ChoiceDrafterConfig(Config):
    """Several drafters: each sequence has its drafts from the one that serves it best."""

    kind: Literal["choice"] = "choice"
    drafters: tuple[Annotated[AnyMember, Field(discriminator="kind")], ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        models, others = draft_models(self), drafters_beside(self)
        pools = [*(model.pool for model in models), *(other.pool for other in others)]
        for pool in pools:
            if pools.count(pool) > 1:
                raise ValueError(f"drafters: several are named {pool!r}; give each a name")
        return self


AnyDrafterConfig = NoDrafterConfig | AnyMember | ChoiceDrafterConfig
DrafterConfig = Annotated[AnyDrafterConfig, Field(discriminator="kind")]


def draft_models(drafter: AnyDrafterConfig) -> tuple[ModelDrafterConfig, ...]:
    """The draft models a drafter is or has."""
    match drafter:
        case ModelDrafterConfig():
            return (drafter,)
        case ChoiceDrafterConfig(drafters=members):
            return tuple(each for each in members if isinstance(each, ModelDrafterConfig))
        case _:
            return ()


def drafters_beside(drafter: AnyDrafterConfig) -> tuple[BesideConfig, ...]:
    """What of a drafter has to be in the target's own process."""
    members = drafter.drafters if isinstance(drafter, ChoiceDrafterConfig) else (drafter,)
    return tuple(each for each in members if isinstance(each, BesideConfig))


def draft_heads(drafter: AnyDrafterConfig) -> tuple[HeadDrafterConfig, ...]:
    """What of a drafter reads the target's hidden states."""
    return tuple(each for each in drafters_beside(drafter) if isinstance(each, HeadDrafterConfig))


def draft_tables(drafter: AnyDrafterConfig) -> tuple[Path, ...]:
    """The n-gram tables a drafter or its members read."""
    members = drafter.drafters if isinstance(drafter, ChoiceDrafterConfig) else (drafter,)
    tables = (each.table for each in members if isinstance(each, NgramDrafterConfig))
    return tuple(table for table in tables if table is not None)


def drafter_from_flag(
    draft: str, *, kind_of: Callable[[str], str] = lambda _: "model", **model_fields: object
) -> AnyDrafterConfig:
    """What `--draft off|ngram|ngram:TABLE|REF|ngram+REF` means.

    REF is skip: and layers of the target to leave out (skip:3,5-9), or a reference of the kind that
    `kind_of` says: model, medusa or eagle. `model_fields` say the rest of a model's section.
    Raises ConfigurationError for layers that are none.
    """
    if draft == "off":
        return NoDrafterConfig()
    if draft == "ngram":
        return NgramDrafterConfig()
    if draft.startswith(TABLE_FLAG):
        return NgramDrafterConfig(table=Path(draft.removeprefix(TABLE_FLAG)))
    drafter = _member_from_flag(draft.removeprefix(BOTH_FLAG), kind_of, model_fields)
    if draft.startswith(BOTH_FLAG):
        return ChoiceDrafterConfig(drafters=(NgramDrafterConfig(), drafter))
    return drafter


def _member_from_flag(
    reference: str, kind_of: Callable[[str], str], model_fields: Mapping[str, object]
) -> ModelDrafterConfig | BesideConfig:
    if reference.startswith(SKIP_FLAG):
        return SkipDrafterConfig(skip_layers=_layers_from_flag(reference.removeprefix(SKIP_FLAG)))
    match kind_of(reference):
        case "medusa":
            return MedusaDrafterConfig(model=reference)
        case "eagle":
            return EagleDrafterConfig(model=reference)
        case _:
            return ModelDrafterConfig.model_validate({"model": reference, **model_fields})


def _layers_from_flag(layers: str) -> tuple[int, ...]:
    """3,5-9 as numbers."""
    numbers: list[int] = []
    for part in layers.split(","):
        if (bounds := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())) is None:
            raise ConfigurationError(f"--draft {SKIP_FLAG}{layers}: {part!r} is no layer")
        numbers += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return tuple(dict.fromkeys(numbers))
