"""An engine and all it stands on, built in this process from a configuration. No Ray."""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from prometheus_client import CollectorRegistry

from cluster.config import (
    BesideConfig,
    DrafthouseConfig,
    ModelDrafterConfig,
    TargetConfig,
    draft_heads,
    draft_models,
)
from cluster.control.policy import Policy
from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.errors import ConfigurationError, NotBesideTarget
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.states import GrammarStates
from cluster.interfaces import Drafter, Target
from cluster.local_drafter import (
    build_beside_target,
    build_drafter,
    build_model_drafter,
    check_draft,
    close_drafter,
    drafter_names,
    head_size,
)
from cluster.local_policy import build_policy
from cluster.memory import check_memory
from cluster.messages import ModelInfo, Rule
from cluster.metrics import EngineMetrics
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder, load_spec
from cluster.models.reference import load_generation_defaults, resolve
from cluster.models.spec import ModelSpec
from cluster.profiling.steps import Timeable
from cluster.text.tokenizer import load_vocabulary
from cluster.worker import TargetWorker, ThreadTarget

T = TypeVar("T")


class Worker(Timeable, Protocol):
    """What an engine asks of the compute side before it serves."""

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits, padding of the vocabulary included."""
        ...

    def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit; empty is exact."""
        ...


class ClosableTarget(Target, Protocol):
    """A target that ends with its engine."""

    def close(self) -> None:
        """Compute no more. May be called again."""
        ...


@dataclass(frozen=True, slots=True)
class ComputeSide:
    """The same target twice: as an engine calls it, and for a thread that may wait for it."""

    target: ClosableTarget
    worker: Worker


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine with the parts it was built of."""

    engine: Engine
    target: ClosableTarget
    worker: Worker
    drafter: Drafter
    info: ModelInfo

    async def close(self) -> None:
        """End every sequence and the threads."""
        await self.engine.close()
        self.target.close()
        close_drafter(self.drafter)


def build_engine(
    config: DrafthouseConfig,
    *,
    registry: CollectorRegistry,
    remote_drafters: Mapping[str, Drafter] | None = None,
    ranks: ComputeSide | None = None,
) -> LocalEngine:
    """Load the target, check what was asked for, and stand an engine on it.

    `remote_drafters` draft with the models that are placed in draft workers, by pool (those live
    elsewhere, and only the caller knows how to reach them); other models are loaded here. The
    target computes in a thread of its own, or elsewhere, in the `ranks` that hold it together.
    Takes seconds: call it `in_passing_thread`. Raises ConfigurationError.
    """
    use_threads(config.target.num_threads)
    folder = resolve(config.target.model)
    check_draft(config.drafter, target_folder=folder)
    remote = remote_drafters or {}
    own = [model for model in draft_models(config.drafter) if model.pool not in remote]
    drafts = [(model, load_spec(resolve(model.model))) for model in own]
    if ranks is None:
        spec, context = load_spec(folder), config.target.max_model_len
        heads = [
            head_size(head, spec, max_model_len=context) for head in draft_heads(config.drafter)
        ]
        check_memory(config, spec, drafts, heads)
        ranks = _in_this_process(config.target, folder)
    target, worker = ranks.target, ranks.worker

    def build_model(model: ModelDrafterConfig) -> Drafter:
        if model.pool in remote:
            return remote[model.pool]
        return build_model_drafter(config, model, vocab_size=worker.vocab_size)

    def build_beside(drafter: BesideConfig) -> Drafter:
        if isinstance(worker, TargetWorker) and isinstance(target, ThreadTarget):
            return build_beside_target(config, drafter, worker=worker, thread=target)
        problem = "the target computes in other processes than its engine"
        raise NotBesideTarget(drafter=drafter.pool, problem=problem)

    drafter = build_drafter(config, build_model, build_beside)
    engine = stand_engine(
        config,
        target=target,
        drafter=drafter,
        spec=load_spec(folder),
        eos_token_ids=load_generation_defaults(folder).eos_token_ids,
        registry=registry,
        policy=build_policy(config, drafter, worker=worker, folder=folder, registry=registry),
    )
    info = ModelInfo(
        name=config.name,
        max_model_len=config.target.max_model_len,
        vocab_size=worker.vocab_size,
        drafters=drafter_names(drafter),
        verification=config.speculation.verification,
        variant_operations=worker.self_check(),
    )
    return LocalEngine(engine, target, worker, drafter, info)


def _in_this_process(config: TargetConfig, folder: Path) -> ComputeSide:
    if config.tensor_parallel_size > 1:
        raise ConfigurationError(
            f"target.tensor_parallel_size: {config.tensor_parallel_size} ranks are processes of "
            f"a cluster, and this is one process; drafthouse serve starts them"
        )
    worker = build_target_worker(config, folder)
    return ComputeSide(ThreadTarget(worker), worker)


def stand_engine(
    config: DrafthouseConfig,
    *,
    target: Target,
    drafter: Drafter,
    spec: ModelSpec,
    eos_token_ids: frozenset[int],
    registry: CollectorRegistry,
    policy: Policy,
) -> Engine:
    """An engine on a target, a drafter and a policy that are there already."""
    return Engine(
        target=target,
        drafter=drafter,
        policy=policy,
        limits=engine_limits(config, spec),
        eos_token_ids=eos_token_ids,
        metrics=EngineMetrics(
            registry,
            model=config.name,
            num_positions=max(config.speculation.num_speculative_tokens, 1),
            drafters=drafter_names(drafter),
        ),
        rule=Rule(config.speculation.verification),
    )


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


def build_target_worker(
    config: TargetConfig, folder: Path, *, decoder: Decoder | None = None
) -> TargetWorker:
    """The target's weights and KV memory. Raises ConfigurationError when they cannot serve.

    Several workers, used in turn, may share the weights of one `decoder` that is loaded already.
    """
    spec = load_spec(folder)
    check_context(config, spec)
    return TargetWorker(
        decoder or load_decoder(folder, dtype=config.dtype, device=config.device),
        num_blocks=config.total_blocks,
        block_size=config.tokens_per_block,
        grammars=GrammarStates(
            lambda: GrammarCompiler(
                load_vocabulary(folder),
                eos_token_ids=load_generation_defaults(folder).eos_token_ids,
                vocab_size=spec.vocab_size,
            )
        ),
    )


def check_context(config: TargetConfig, spec: ModelSpec) -> None:
    """Raises ConfigurationError for a context that is longer than the model's own."""
    if config.max_model_len > spec.max_position_embeddings:
        raise ConfigurationError(
            f"target.max_model_len: {config.max_model_len} is over the model's own "
            f"{spec.max_position_embeddings}"
        )


def engine_limits(config: DrafthouseConfig, spec: ModelSpec) -> EngineLimits:
    """The engine's sizes, from the configuration and the model."""
    target = config.target
    return EngineLimits(
        vocab_size=spec.vocab_size,
        keys_per_row=spec.keys_per_row,
        max_model_len=target.max_model_len,
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
        max_prompt_rows_beside_decodes=target.max_prompt_rows_beside_decodes,
        max_num_waiting=target.max_num_waiting,
        block_size=target.tokens_per_block,
        num_blocks=target.total_blocks,
        prefix_cache=target.prefix_cache,
        draft_deadline_seconds=config.speculation.draft_deadline_seconds,
    )
