"""An engine and all it stands on, built in this process from a configuration. No Ray."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from prometheus_client import CollectorRegistry

from cluster.config import (
    DrafthouseConfig,
    ModelDrafterConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
    TargetConfig,
)
from cluster.control.policy import FixedPolicy
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.drafters.vocabulary import check_same_tokenizer
from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.errors import ConfigurationError
from cluster.interfaces import Drafter
from cluster.messages import ModelInfo
from cluster.metrics import EngineMetrics
from cluster.models.load import load_decoder, load_spec
from cluster.models.reference import load_generation_defaults, resolve
from cluster.worker import TargetWorker, ThreadTarget

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine with the parts it was built of."""

    engine: Engine
    target: ThreadTarget
    worker: TargetWorker
    drafter: Drafter
    info: ModelInfo

    async def close(self) -> None:
        """End every sequence and the threads."""
        await self.engine.close()
        self.target.close()
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.close()


def build_engine(
    config: DrafthouseConfig,
    *,
    registry: CollectorRegistry,
    drafter: Drafter | None = None,
) -> LocalEngine:
    """Load the target, check what was asked for, and stand an engine on it.

    `drafter` takes the place of the configured one (draft workers live elsewhere, and only the
    caller knows how to reach them); its vocabulary is checked all the same. Takes seconds: call
    it `in_passing_thread`. Raises ConfigurationError.
    """
    use_threads(config.target.num_threads)
    folder = resolve(config.target.model)
    check_draft(config.drafter, target_folder=folder)
    worker = build_target_worker(config.target, folder)
    if drafter is None:
        drafter = build_drafter(config, vocab_size=worker.vocab_size)
    num_speculative_tokens = config.speculation.num_speculative_tokens
    target = ThreadTarget(worker)
    engine = Engine(
        target=target,
        drafter=drafter,
        policy=FixedPolicy(0 if isinstance(drafter, NoDrafter) else num_speculative_tokens),
        limits=engine_limits(config, vocab_size=worker.vocab_size),
        eos_token_ids=load_generation_defaults(folder).eos_token_ids,
        metrics=EngineMetrics(
            registry, model=config.name, num_positions=max(num_speculative_tokens, 1)
        ),
    )
    info = ModelInfo(
        name=config.name,
        max_model_len=config.target.max_model_len,
        vocab_size=worker.vocab_size,
        drafters=(drafter.name,),
        variant_operations=worker.self_check(),
    )
    return LocalEngine(engine, target, worker, drafter, info)


async def in_passing_thread(compute: Callable[[], T]) -> T:
    """Run something that computes off the event loop, in a thread that ends with it.

    Every thread that computes gets OpenMP threads of its own, for life. Once a process has more
    of them than cores they no longer wait awake for the next operation, and each step pays for
    waking them; so only the target's thread may live on.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, compute)


def use_threads(num_threads: int | None) -> None:
    """Compute with so many threads; None takes every core this process may run on."""
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))


def build_target_worker(config: TargetConfig, folder: Path) -> TargetWorker:
    """The target's weights and KV memory. Raises ConfigurationError when they cannot serve."""
    spec = load_spec(folder)
    if config.max_model_len > spec.max_position_embeddings:
        raise ConfigurationError(
            f"target.max_model_len: {config.max_model_len} is over the model's own "
            f"{spec.max_position_embeddings}"
        )
    return TargetWorker(
        load_decoder(folder, dtype=config.dtype, device=config.device),
        num_blocks=config.total_blocks,
        block_size=config.tokens_per_block,
    )


def engine_limits(config: DrafthouseConfig, *, vocab_size: int) -> EngineLimits:
    """The engine's sizes, from the configuration."""
    target = config.target
    return EngineLimits(
        vocab_size=vocab_size,
        max_model_len=target.max_model_len,
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
        max_num_waiting=target.max_num_waiting,
        block_size=target.tokens_per_block,
        num_blocks=target.total_blocks,
        draft_deadline_seconds=config.speculation.draft_deadline_seconds,
    )


def check_draft(
    drafter: NoDrafterConfig | NgramDrafterConfig | ModelDrafterConfig, *, target_folder: Path
) -> None:
    """Refuse a draft model whose tokens are not the target's. Raises VocabularyMismatch."""
    if isinstance(drafter, ModelDrafterConfig):
        check_same_tokenizer(target_folder, resolve(drafter.model))


def build_drafter(config: DrafthouseConfig, *, vocab_size: int) -> Drafter:
    """The configured drafter, in this process."""
    match config.drafter:
        case NoDrafterConfig():
            return NoDrafter()
        case NgramDrafterConfig(max_match=max_match, min_match=min_match):
            return NgramDrafter(max_match=max_match, min_match=min_match)
        case ModelDrafterConfig() as model:
            return ModelDrafter(build_draft_model(model, vocab_size=vocab_size), name=model.model)


def build_draft_model(config: ModelDrafterConfig, *, vocab_size: int) -> DraftModel:
    """A draft model's weights and KV memory, one slot a sequence."""
    return DraftModel(
        load_decoder(resolve(config.model), dtype=config.dtype, device=config.device),
        num_blocks=config.max_num_seqs,
        block_size=config.max_model_len,
        vocab_size=vocab_size,
    )
