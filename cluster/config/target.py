"""The section `target`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.config.base import BUILTIN_MODEL, Config, DType, Resources


class TargetConfig(Config):
    """The model that is served and how much of it runs at once.

    With a `tensor_parallel_size` above 1 as many ranks hold a part of the model each, in processes
    of their own that take `resources` each and are placed by `placement_strategy`; the engine that
    directs them takes `engine_resources`. `num_threads` are those of a rank, by default its share
    of the cores of its node. An exchange between ranks that takes `rank_timeout_seconds` is taken
    for the end of one of them.
    """

    model: str = BUILTIN_MODEL
    dtype: DType = "float32"
    device: str = "cpu"
    num_threads: int | None = Field(default=None, ge=1)
    max_model_len: int = Field(default=2048, ge=2)
    max_num_seqs: int = Field(default=16, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    max_prompt_rows_beside_decodes: int | None = Field(default=None, ge=1)  # None: by their cost
    max_num_waiting: int = Field(default=1024, ge=1)
    prefix_cache: bool = True
    block_size: int | None = Field(default=None, ge=1)  # None: one block spans the context
    num_blocks: int | None = Field(default=None, ge=1)  # None: what max_num_seqs contexts take
    memory_utilization: float = Field(default=0.9, gt=0, le=1)  # of what is available at start
    num_replicas: int = Field(default=1, ge=1)
    resources: Resources = Field(default_factory=lambda: {"CPU": 1.0})
    tensor_parallel_size: int = Field(default=1, ge=1)
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    engine_resources: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    rank_timeout_seconds: float = Field(default=8.0, gt=0)

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

    @property
    def bundles(self) -> list[Resources]:
        """What one replica takes: the engine's process, then those of the ranks beside it."""
        if self.tensor_parallel_size == 1:
            return [self.resources]
        return [self.engine_resources, *([self.resources] * self.tensor_parallel_size)]
