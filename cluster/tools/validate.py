"""Whether a target and a drafter fit together, and what to expect of them: before deploying.

What would be refused at start is checked, all of it, and everything that is wrong is said at
once. What fits is then tried on a short sample, with drafts and without.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from rich.console import Group
from rich.table import Table

from cluster.config import (
    BesideConfig,
    DrafthouseConfig,
    NoDrafterConfig,
    SkipDrafterConfig,
    SpeculationConfig,
    TargetConfig,
    draft_models,
    drafters_beside,
)
from cluster.drafters.vocabulary import check_same_vocabulary, vocabulary_sha256
from cluster.errors import ConfigurationError, VocabularyMismatch
from cluster.local_drafter import head_size, skipped_parts
from cluster.memory import (
    MIB,
    Need,
    available_bytes,
    check_fits,
    draft_needs,
    head_needs,
    target_needs,
)
from cluster.models.load import load_spec
from cluster.models.reference import resolve
from cluster.models.spec import ModelSpec
from cluster.text.tokenizer import load_tokenizer
from cluster.tools.bench.expectation import Expectation, expect
from cluster.tools.bench.lanes import Variant
from cluster.tools.bench.progress import Report


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked; of one that does not fit the detail says why."""

    what: str
    fits: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint as far as a pair depends on it; `tokens` are the tokenizer's, by id."""

    name: str
    spec: ModelSpec
    tokens: Mapping[int, str]

    @property
    def num_tokens(self) -> int:
        """Ids that a prompt may hold, from 0 on: the real vocabulary, without padding rows."""
        return max(self.tokens, default=-1) + 1

    @property
    def tokenizer_sha256(self) -> str:
        """Of every id with its token: equal for equal vocabularies."""
        return vocabulary_sha256(self.tokens)

    def as_json(self) -> dict[str, object]:
        """Plain data: name, tokenizer and shape."""
        spec = self.spec
        return {
            "model": self.name,
            "architecture": spec.architecture,
            "num_tokens": self.num_tokens,
            "tokenizer_sha256": self.tokenizer_sha256,
            "max_position_embeddings": spec.max_position_embeddings,
            "num_layers": spec.num_layers,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "head": [spec.vocab_size, spec.hidden_size],
            "tied_head": spec.tied_head,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that was found; `needs` is memory at full load, `expectation` of a pair that fits."""

    models: tuple[Model, ...]
    findings: tuple[Finding, ...]
    needs: tuple[Need, ...]
    expectation: Expectation | None

    @property
    def fits(self) -> bool:
        """Whether the pair can be deployed."""
        return all(finding.fits for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "fits": self.fits,
            "models": [model.as_json() for model in self.models],
            "findings": [asdict(finding) for finding in self.findings],
            "memory": [asdict(need) for need in self.needs],
            "expectation": None if self.expectation is None else self.expectation.as_json(),
        }

    def __rich__(self) -> Group:
        models = Table(title="Models", title_justify="left", show_header=False)
        columns = [model.as_json() for model in self.models]
        for field in columns[0] if columns else ():
            models.add_row(field, *(str(column[field]) for column in columns))
        title = "The pair fits" if self.fits else "The pair does not fit"
        findings = Table(title=title, title_justify="left", show_header=False)
        for finding in self.findings:
            findings.add_row("yes" if finding.fits else "no", finding.what, finding.detail)
        expectation = () if self.expectation is None else (self.expectation,)
        return Group(models, findings, *expectation)


async def validate(
    target: TargetConfig, variant: Variant, *, report: Report, sample: bool = True
) -> Verdict:
    """Check a target with the variant's number format, drafter and K."""
    config = variant.config(target, SpeculationConfig())
    findings: list[Finding] = []
    references = {"target": config.target.model}
    for model in draft_models(config.drafter):
        references["draft"] = model.model
    loaded = [_loaded(what, reference, findings) for what, reference in references.items()]
    models = tuple(model for model in loaded if model is not None)
    if len(models) < len(references):
        return Verdict(models, tuple(findings), (), None)
    needs = _needs(config, *models)
    findings += [*_vocabularies(*models), *_contexts(config, *models)]
    for drafter in drafters_beside(config.drafter):
        needs += _beside(config, drafter, models[0].spec, findings)
    findings.append(_memory(config, needs))
    verdict = Verdict(models, tuple(findings), needs, None)
    if sample and verdict.fits and not isinstance(config.drafter, NoDrafterConfig):
        return replace(verdict, expectation=await expect(target.model, variant, report=report))
    return verdict


def _loaded(what: str, reference: str, findings: list[Finding]) -> Model | None:
    """A model that can be served, or None; either is added to the findings."""
    try:
        folder = resolve(reference)
        spec = load_spec(folder)
        tokens = load_tokenizer(folder).tokens
    except ConfigurationError as error:
        findings.append(Finding(what, fits=False, detail=str(error)))
        return None
    known = {token_id: token for token_id, token in enumerate(tokens) if token is not None}
    model = Model(reference, spec, known)
    rows = f"{model.num_tokens} tokens, {spec.vocab_size} rows in the head"
    findings.append(
        Finding(what, model.num_tokens <= spec.vocab_size, f"{spec.architecture}, {rows}")
    )
    return model


def _vocabularies(target: Model, draft: Model | None = None) -> Iterator[Finding]:
    """Whether the draft's ids mean what the target's mean, and what its head has to do with it."""
    if draft is None:
        return
    try:
        check_same_vocabulary(target.tokens, draft.tokens)
    except VocabularyMismatch as error:
        hashes = f"sha256 {target.tokenizer_sha256[:12]} and {draft.tokenizer_sha256[:12]}"
        yield Finding("tokenizer", fits=False, detail=f"{error} ({hashes})")
    else:
        yield Finding(
            "tokenizer",
            fits=True,
            detail=f"{len(target.tokens)} equal tokens, sha256 {target.tokenizer_sha256[:12]}",
        )
    shapes = (f"{each.spec.vocab_size} x {each.spec.hidden_size}" for each in (target, draft))
    yield Finding(
        "head",
        fits=True,
        detail="{} in the target, {} in the draft, which has a head of its own".format(*shapes),
    )


def _contexts(
    config: DrafthouseConfig, target: Model, draft: Model | None = None
) -> Iterator[Finding]:
    """Whether contexts are as long as configured, and from where on nothing is drafted."""
    asked, limit = config.target.max_model_len, target.spec.max_position_embeddings
    yield Finding("context", asked <= limit, f"max_model_len {asked}, the target's own {limit}")
    if draft is None:
        return
    [drafter] = draft_models(config.drafter)
    own = draft.spec.max_position_embeddings
    held = min(own, drafter.max_model_len)
    reach = (
        "drafts to the end"
        if held >= asked
        else f"sequences of more than {held} of {asked} tokens go on without drafts"
    )
    yield Finding(
        "draft context",
        fits=True,
        detail=f"{reach} (the draft's own {own}, configured {drafter.max_model_len})",
    )


def _beside(
    config: DrafthouseConfig, drafter: BesideConfig, target: ModelSpec, findings: list[Finding]
) -> tuple[Need, ...]:
    """Memory of what drafts beside the target; whether it is for this one is added to findings."""
    try:
        if isinstance(drafter, SkipDrafterConfig):
            attention, mlp = skipped_parts(drafter, num_layers=target.num_layers)
            parts = f"{len(attention)} attention and {len(mlp)} feed-forward parts left out"
            findings.append(Finding("draft", fits=True, detail=parts))
            return ()
        size = head_size(drafter, target, max_model_len=config.target.max_model_len)
    except ConfigurationError as error:
        findings.append(Finding("draft", fits=False, detail=str(error)))
        return ()
    detail = f"{drafter.kind} head of {size.num_weights:,} weights on the target's hidden states"
    findings.append(Finding("draft", fits=True, detail=detail))
    return head_needs(config.target, target, size)


def _needs(config: DrafthouseConfig, target: Model, draft: Model | None = None) -> tuple[Need, ...]:
    """Memory of both at full load."""
    needs = target_needs(
        config.target,
        target.spec,
        num_speculative_tokens=config.speculation.num_speculative_tokens,
    )
    if draft is not None:
        [drafter] = draft_models(config.drafter)
        needs += draft_needs(drafter, draft.spec)
    return needs


def _memory(config: DrafthouseConfig, needs: tuple[Need, ...]) -> Finding:
    """Whether it fits on this machine, with every number."""
    try:
        check_fits(needs, utilization=config.target.memory_utilization)
    except ConfigurationError as error:
        return Finding("memory", fits=False, detail=str(error))
    parts = ", ".join(f"{need.what} {need.num_bytes / MIB:,.0f}" for need in needs)
    available = ", ".join(
        f"{available_bytes(device) / MIB:,.0f} available on {device}"
        for device in dict.fromkeys(need.device for need in needs)
    )
    return Finding("memory", fits=True, detail=f"MiB: {parts}; {available}")
