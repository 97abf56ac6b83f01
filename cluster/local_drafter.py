"""The configured drafter, built in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.config import (
    AnyDrafterConfig,
    BesideConfig,
    ChoiceDrafterConfig,
    DrafthouseConfig,
    EagleDrafterConfig,
    HeadDrafterConfig,
    ModelDrafterConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
    SkipDrafterConfig,
    TargetConfig,
    draft_models,
    draft_tables,
)
from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.heads.eagle_load import load_eagle
from cluster.drafters.heads.kinds import resolve_head
from cluster.drafters.heads.medusa import load_medusa
from cluster.drafters.heads.model import BesideTarget, Head, HeadModel
from cluster.drafters.heads.size import HeadSize, eagle_size, medusa_size
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.drafters.skipping import SkipDrafter
from cluster.drafters.table import load_table
from cluster.drafters.thread import Thread
from cluster.drafters.vocabulary import check_same_tokenizer, load_tokens, vocabulary_sha256
from cluster.errors import ConfigurationError
from cluster.interfaces import Drafter
from cluster.memory import check_draft_memory
from cluster.messages import Rule
from cluster.models.decoder import Decoder
from cluster.models.load import DTYPES, load_decoder, load_spec
from cluster.models.reference import resolve
from cluster.models.spec import ModelSpec
from cluster.worker import TargetWorker

PATIENCE = 0.9  # of the draft deadline, after which a choice goes on with what it has

BuildModel = Callable[[ModelDrafterConfig], Drafter]
BuildBeside = Callable[[BesideConfig], Drafter]


def check_draft(drafter: AnyDrafterConfig, *, target_folder: Path) -> None:
    """Refuse drafts whose tokens are not the target's.

    Raises VocabularyMismatch for a model, ConfigurationError for a table.
    """
    for model in draft_models(drafter):
        check_same_tokenizer(target_folder, resolve(model.model))
    for path in draft_tables(drafter):
        if load_table(path).vocabulary != vocabulary_sha256(load_tokens(target_folder)):
            raise ConfigurationError(f"{path}: made of another vocabulary than the target's")


def build_drafter(
    config: DrafthouseConfig, build_model: BuildModel, build_beside: BuildBeside
) -> Drafter:
    """What is configured.

    `build_model` makes what drafts with a model, `build_beside` what is in the target's process.

    Raises ConfigurationError.
    """

    def built(drafter: AnyDrafterConfig) -> Drafter:
        match drafter:
            case NoDrafterConfig():
                return NoDrafter()
            case NgramDrafterConfig(table=path, tenant_memory_tokens=tenant_memory_tokens):
                table = None if path is None else load_table(path)
                return NgramDrafter(table=table, tenant_memory_tokens=tenant_memory_tokens)
            case ModelDrafterConfig():
                return build_model(drafter)
            case HeadDrafterConfig() | SkipDrafterConfig():
                return build_beside(drafter)
            case ChoiceDrafterConfig(drafters=members):
                return ChoiceDrafter(
                    free=[built(each) for each in members if isinstance(each, NgramDrafterConfig)],
                    paid=[
                        built(each) for each in members if not isinstance(each, NgramDrafterConfig)
                    ],
                    patience_seconds=PATIENCE * config.speculation.draft_deadline_seconds,
                )

    return built(config.drafter)


def build_model_drafter(
    config: DrafthouseConfig, model: ModelDrafterConfig, *, vocab_size: int
) -> ModelDrafter:
    """A draft model in this process, with a thread of its own. Raises ConfigurationError."""
    return ModelDrafter(
        build_draft_model(model, vocab_size=vocab_size),
        name=model.pool,
        rule=Rule(config.speculation.verification),
        run_ahead=model.drafts_ahead,
    )


def build_draft_model(config: ModelDrafterConfig, *, vocab_size: int) -> DraftModel:
    """A draft model's weights and KV memory, one slot a sequence.

    Raises ConfigurationError when they do not fit.
    """
    folder = resolve(config.model)
    check_draft_memory(config, load_spec(folder))
    return DraftModel(
        load_decoder(folder, dtype=config.dtype, device=config.device),
        num_blocks=config.max_num_seqs,
        block_size=config.max_model_len,
        vocab_size=vocab_size,
        max_tail=config.max_tail,
        name=config.pool,
    )


def build_beside_target(
    config: DrafthouseConfig, drafter: BesideConfig, *, worker: TargetWorker, thread: Thread
) -> Drafter:
    """What computes in the target's own `thread`. Raises ConfigurationError."""
    if isinstance(drafter, SkipDrafterConfig):
        return SkipDrafter(
            part_of(worker.decoder, drafter),
            worker.cache,
            thread=thread,
            name=drafter.name,
            rule=Rule(config.speculation.verification),
        )
    return _build_head_drafter(config, drafter, worker=worker, thread=thread)


def part_of(target: Decoder, config: SkipDrafterConfig) -> Decoder:
    """The target without what is to be skipped. Raises ConfigurationError."""
    attention, mlp = skipped_parts(config, num_layers=target.spec.num_layers)
    return target.without(attention=attention, mlp=mlp)


def skipped_parts(config: SkipDrafterConfig, *, num_layers: int) -> tuple[set[int], set[int]]:
    """The layers whose attention is left out, and those whose feed-forward part is.

    Raises ConfigurationError for layers that there are not, and where nothing is left.
    """
    attention = {*config.skip_layers, *config.skip_attention}
    mlp = {*config.skip_layers, *config.skip_mlp}
    largest = max(attention | mlp)
    if largest >= num_layers:
        raise ConfigurationError(
            f"drafter {config.name!r}: layer {largest} is to be skipped, and the target's last is "
            f"{num_layers - 1}"
        )
    if len(attention) + len(mlp) == 2 * num_layers:
        raise ConfigurationError(f"drafter {config.name!r}: nothing of {num_layers} layers is left")
    return attention, mlp


def _build_head_drafter(
    config: DrafthouseConfig, head: HeadDrafterConfig, *, worker: TargetWorker, thread: Thread
) -> ModelDrafter:
    """A head on the target's hidden states."""
    loaded = load_head(
        head,
        worker.decoder,
        config.target,
        max_draft=config.speculation.num_speculative_tokens,
    )
    model = HeadModel(loaded, worker.keep_hidden(loaded.wanted), name=head.pool)
    return ModelDrafter(
        model,
        name=head.pool,
        rule=Rule(config.speculation.verification),
        thread=BesideTarget(model, thread),
    )


def load_head(
    head: HeadDrafterConfig, target: Decoder, config: TargetConfig, *, max_draft: int
) -> Head:
    """A head's weights and memory. Raises ConfigurationError."""
    folder = resolve_head(head.model)
    dtype = head.dtype or config.dtype
    if DTYPES[dtype] != DTYPES[config.dtype]:
        raise ConfigurationError(
            f"drafter {head.pool!r}: dtype {dtype} beside a target of {config.dtype}, whose hidden "
            f"states it reads"
        )
    if isinstance(head, EagleDrafterConfig):
        return load_eagle(
            folder,
            target,
            dtype=dtype,
            num_sequences=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_draft=max(max_draft, 1),
        )
    return load_medusa(
        folder,
        target.spec,
        dtype=dtype,
        device=config.device,
        num_sequences=config.max_num_seqs,
        context_limit=config.max_model_len,
    )


def check_beside(
    drafters: Sequence[BesideConfig], config: TargetConfig, target_folder: Path
) -> None:
    """Refuse what is not for this target, by what can be seen without loading it.

    Raises ConfigurationError.
    """
    target = load_spec(target_folder)
    for drafter in drafters:
        if isinstance(drafter, SkipDrafterConfig):
            skipped_parts(drafter, num_layers=target.num_layers)
        else:
            head_size(drafter, target, max_model_len=config.max_model_len)


def head_size(head: HeadDrafterConfig, target: ModelSpec, *, max_model_len: int) -> HeadSize:
    """What it will take. Raises ConfigurationError."""
    folder = resolve_head(head.model)
    if isinstance(head, EagleDrafterConfig):
        size = eagle_size(folder, target, max_model_len=max_model_len)
    else:
        size = medusa_size(folder, target)
    return replace(size, dtype=head.dtype)


def drafter_names(drafter: Drafter) -> tuple[str, ...]:
    """The names of a drafter and of those it holds."""
    match drafter:
        case ChoiceDrafter(drafters=members):
            return tuple(member.name for member in members)
        case _:
            return (drafter.name,)


def close_drafter(drafter: Drafter) -> None:
    """End the threads of a drafter in this process."""
    match drafter:
        case ModelDrafter():
            drafter.close()
        case ChoiceDrafter(drafters=members):
            for member in members:
                close_drafter(member)
        case _:
            pass
