"""The whole configuration: nested, frozen, closed. A typo is an error that names the key.

Nothing here downloads, connects or logs. The chosen drafter carries its own fields.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import ConfigurationError

BUILTIN_MODEL = "smollm2-135m-instruct"

DType = Literal["float32", "int8", "bfloat16", "float16"]
Resources = dict[str, float]


class Config(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetConfig(Config):
    """The model that is served and how much of it runs at once."""

    model: str = BUILTIN_MODEL
    dtype: DType = "float32"
    device: str = "cpu"
    num_threads: int | None = Field(default=None, ge=1)
    max_model_len: int = Field(default=2048, ge=2)
    max_num_seqs: int = Field(default=16, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    max_num_waiting: int = Field(default=1024, ge=1)
    block_size: int | None = Field(default=None, ge=1)  # None: one block spans the context
    num_blocks: int | None = Field(default=None, ge=1)  # None: what max_num_seqs contexts take
    num_replicas: int = Field(default=1, ge=1)
    resources: Resources = Field(default_factory=lambda: {"CPU": 1.0})

    @model_validator(mode="after")
    def _blocks_hold_one_context(self) -> Self:
        if self.total_blocks * self.tokens_per_block < self.max_model_len:
            message = (
                f"num_blocks: {self.total_blocks} blocks of {self.tokens_per_block} tokens "
                f"cannot hold one context of max_model_len {self.max_model_len}"
            )
            raise ValueError(message)
        return self

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one KV block."""
        return self.block_size or self.max_model_len

    @property
    def total_blocks(self) -> int:
        """KV blocks the target holds."""
        if self.num_blocks is not None:
            return self.num_blocks
        return self.max_num_seqs * -(-self.max_model_len // self.tokens_per_block)


class NoDrafterConfig(Config):
    """Plain decoding."""

    kind: Literal["off"] = "off"


class NgramDrafterConfig(Config):
    """Prompt lookup: the longest suffix seen before, and what followed it."""

    kind: Literal["ngram"] = "ngram"
    max_match: int = Field(default=3, ge=1)
    min_match: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            message = f"min_match: {self.min_match} is over max_match {self.max_match}"
            raise ValueError(message)
        return self


class ModelDrafterConfig(Config):
    """A small model with the target's vocabulary, in the engine's process or in draft workers."""

    kind: Literal["model"] = "model"
    model: str
    dtype: DType = "float32"
    device: str = "cpu"
    num_threads: int | None = Field(default=None, ge=1)
    max_model_len: int = Field(default=2048, ge=2)
    max_num_seqs: int = Field(default=16, ge=1)
    placement: Literal["in_process", "worker"] = "worker"
    num_replicas: int = Field(default=1, ge=1)
    resources: Resources = Field(default_factory=lambda: {"CPU": 0.5})


DrafterConfig = Annotated[
    NoDrafterConfig | NgramDrafterConfig | ModelDrafterConfig, Field(discriminator="kind")
]


class SpeculationConfig(Config):
    """How far to guess and how long to wait for a guess."""

    num_speculative_tokens: int = Field(default=4, ge=0, le=64)
    draft_deadline_seconds: float = Field(default=1.0, gt=0)


class GatewayConfig(Config):
    """Where clients knock. Port 0 takes any free port."""

    host: str = "127.0.0.1"
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    http_port: int = Field(default=8000, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1)
    max_message_bytes: int = Field(default=8 * 2**20, ge=1024)
    drain_seconds: float = Field(default=120.0, gt=0)
    resources: Resources = Field(default_factory=lambda: {"CPU": 0.2})


class DrafthouseConfig(Config):
    """One served model and everything around it. `name` is what requests call it."""

    name: str = BUILTIN_MODEL
    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = NgramDrafterConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    gateway: GatewayConfig = GatewayConfig()


def drafter_from_flag(
    draft: str, *, placement: Literal["in_process", "worker"]
) -> NoDrafterConfig | NgramDrafterConfig | ModelDrafterConfig:
    """What `--draft ngram|off|REF` means; REF is a model reference."""
    plain: dict[str, NoDrafterConfig | NgramDrafterConfig] = {
        "off": NoDrafterConfig(),
        "ngram": NgramDrafterConfig(),
    }
    return plain.get(draft) or ModelDrafterConfig(model=draft, placement=placement)


def load_config(path: Path) -> DrafthouseConfig:
    """Read a YAML file. Raises ConfigurationError naming every key that is wrong."""
    try:
        return parse_config(yaml.safe_load(path.read_text()) or {})
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def parse_config(data: object) -> DrafthouseConfig:
    """Check plain data against the model. Raises ConfigurationError naming every wrong key."""
    try:
        return DrafthouseConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors(include_url=False)
        )
        raise ConfigurationError(problems) from error


def prepare_ray_environment(*, joining: bool) -> None:
    """Set what Ray and its processes read from the environment; call it before importing ray.

    What the operator has set stands. `joining` a cluster that has tokens needs the mode named.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # its own default of 15 starves the target
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    if joining and (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
