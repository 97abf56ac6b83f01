"""Losslessness by enumeration: a small vocabulary, every draft, every processor, no sampling error.

Target and draft are tables of logits by last token. What a step emits is enumerated over all drafts
and compared with what the target alone gives, which is written down anew in plain Python.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from math import inf, prod

import pytest
import torch
from torch import Tensor

from cluster.messages import DraftDistribution, Rule, SamplingSpec, SequenceRows
from cluster.sampling import answers
from cluster.sampling.answers import answers_of
from cluster.sampling.propose import propose
from cluster.sampling.ratio import keep_probability, residual_weights
from cluster.sampling.runs import Run
from tests.conformance.chains import processed

VOCAB = 5
K = 2
PROMPT = (3, 0, 1, 0)
TOKENS = [(), *((a,) for a in range(VOCAB)), *product(range(VOCAB), repeat=2)]
PLAIN = SamplingSpec(seed=3, temperature=1.0, num_prompt_tokens=len(PROMPT) - 1)
SPECS = {
    "plain": PLAIN,
    "greedy": replace(PLAIN, temperature=0.0, repetition_penalty=2.0),
    "temperature": replace(PLAIN, temperature=0.6),
    "top_k": replace(PLAIN, top_k=3),
    "top_p": replace(PLAIN, top_p=0.8),
    "min_p": replace(PLAIN, min_p=0.2),
    "repetition": replace(PLAIN, repetition_penalty=1.7),
    "presence": replace(PLAIN, presence_penalty=1.3),
    "frequency": replace(PLAIN, frequency_penalty=-1.1),
    "bias": replace(PLAIN, logit_bias=((0, -100.0), (4, 1.5))),
    "allowed": replace(PLAIN, allowed_token_ids=(0, 2, 3)),
    "banned": replace(PLAIN, banned_token_ids=(1,), banned_sequences=((0, 2), (0, 3, 4), (2, 2))),
    "held back": replace(PLAIN, suppressed_token_ids=(0, 4), suppressed_before=len(PROMPT) + 1),
    "all": replace(
        PLAIN,
        temperature=0.7,
        top_k=4,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((1, 0.8),),
        banned_sequences=((0, 4), (1, 1)),
        suppressed_token_ids=(2,),
        suppressed_before=len(PROMPT) + 2,
    ),
}


@cache
def table(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)


def allowed_by_grammar(text: Sequence[int]) -> list[bool]:
    """A grammar: never the last token again, and 4 only after an even one."""
    return [token != text[-1] and (token < 4 or text[-1] % 2 == 0) for token in range(VOCAB)]


def by_hand(spec: SamplingSpec, text: Sequence[int], *, grammar: bool) -> list[float]:
    """The target's distribution after `text`, one token at a time and in plain Python."""
    answered = text[spec.num_prompt_tokens :]
    bias = dict(spec.logit_bias)
    logits: list[float] = []
    for token, plain in enumerate(table(1)[text[-1]].tolist()):
        logit = plain + bias.get(token, 0.0)
        if token in text:
            penalty = spec.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= spec.presence_penalty * (token in answered)
        logit -= spec.frequency_penalty * answered.count(token)
        forbidden = (
            (grammar and not allowed_by_grammar(text)[token])
            or (spec.allowed_token_ids is not None and token not in spec.allowed_token_ids)
            or token in spec.banned_token_ids
            or any((*text, token)[-len(each) :] == each for each in spec.banned_sequences)
            or (len(text) < spec.suppressed_before and token in spec.suppressed_token_ids)
        )
        logits.append(-inf if forbidden else logit)
    if spec.temperature == 0:
        return [float(token == logits.index(max(logits))) for token in range(VOCAB)]
    fields = ("temperature", "top_k", "top_p", "min_p")
    filters = {name: value for name, value in asdict(spec).items() if name in fields}
    return [float(each) for each in processed(logits, filters)]


def run_of(
    spec: SamplingSpec,
    drafts: Sequence[int],
    distributions: Sequence[DraftDistribution] = (),
    *,
    grammar: bool,
    done: Sequence[int] = (),
) -> tuple[Run, Tensor]:
    """The rows that verify `drafts` after the prompt and `done`, and their logits."""
    text = (*PROMPT, *done)
    token_ids = (text[-1], *drafts)
    sequence = SequenceRows(
        seq_id=1,
        block_table=(0,),
        start=len(text) - 1,
        token_ids=token_ids,
        num_drafts=len(drafts),
        sampling=spec,
        history_token_ids=text[:-1],
        draft_distributions=tuple(distributions),
    )
    masks = [allowed_by_grammar((*text, *drafts[:i])) for i in range(len(token_ids))]
    positions = range(len(text), len(text) + len(token_ids))
    mask = torch.tensor(masks) if grammar else None
    run = Run(sequence, spec, range(len(token_ids)), positions, mask)
    return run, table(1)[list(token_ids)]


def drafted_from(spec: SamplingSpec, tokens: Sequence[int]) -> DraftDistribution:
    """What the drafter draws from after the prompt and `tokens`, under the ratio rule."""
    text = (*PROMPT, *tokens)
    [draft] = propose(
        table(2)[text[-1:], :], [spec], [len(text)], histories=[text], rule=Rule.RATIO
    )
    assert draft is not None
    return draft.distribution or DraftDistribution((draft.token_id,), (1.0,))


def target_rows(
    spec: SamplingSpec, monkeypatch: pytest.MonkeyPatch, *, grammar: bool
) -> dict[tuple[int, ...], Tensor]:
    """What the ratio rule is given as the target's probabilities after each of `TOKENS`."""
    seen: list[Tensor] = []
    monkeypatch.setattr(answers, "verify_ratio", lambda probs, *_, **__: seen.append(probs) or [0])
    rows: dict[tuple[int, ...], Tensor] = {}
    for drafts in product(range(VOCAB), repeat=K):
        run, logits = run_of(spec, drafts, grammar=grammar)
        answers_of([run], logits, Rule.RATIO)
        for row in range(K + 1):
            assert torch.equal(rows.setdefault(drafts[:row], seen[-1][row]), seen[-1][row])
    return rows


def random_spec(name: str) -> SamplingSpec:
    """A spec at any temperature but 0, where no rule is needed."""
    return replace(SPECS[name], temperature=SPECS[name].temperature or 0.01)


@pytest.mark.parametrize("text_is", ["free", "grammatical"])
@pytest.mark.parametrize("name", SPECS)
def test_every_verified_row_has_the_targets_whole_distribution(
    name: str, text_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratio: the target's probabilities at each row are those of the text with the drafts in it."""
    spec, grammar = random_spec(name), text_is == "grammatical"
    rows = target_rows(spec, monkeypatch, grammar=grammar)
    assert set(rows) == set(TOKENS)
    for tokens, probs in rows.items():
        expected = by_hand(spec, (*PROMPT, *tokens), grammar=grammar)
        assert probs.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("drafts_are", ["drawn", "certain"])
@pytest.mark.parametrize("text_is", ["free", "grammatical"])
@pytest.mark.parametrize("name", SPECS)
def test_ratio_emits_the_targets_distribution(
    name: str, text_is: str, drafts_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all chains of drafts, what is emitted is to rounding what the target alone emits."""
    spec = random_spec(name)
    target = target_rows(spec, monkeypatch, grammar=text_is == "grammatical")
    law = dict.fromkeys(product(range(VOCAB), repeat=K + 1), 0.0)
    for chain in product(range(VOCAB), repeat=K):
        if drafts_are == "drawn":
            proposals = [drafted_from(spec, chain[:row]) for row in range(K)]
        else:
            proposals = [DraftDistribution((token,), (1.0,)) for token in (1, 0)]
        drawn = prod(probability(each, token) for each, token in zip(proposals, chain, strict=True))
        for emitted, weight in outcomes(chain, proposals, target):
            for tokens in law:
                if tokens[: len(emitted)] == emitted:
                    rest = (
                        float(target[tokens[:i]][tokens[i]]) for i in range(len(emitted), K + 1)
                    )
                    law[tokens] += drawn * weight * prod(rest)
    for tokens, weight in law.items():
        alone = prod(float(target[tokens[:i]][tokens[i]]) for i in range(K + 1))
        assert weight == pytest.approx(alone, abs=1e-12)


def outcomes(
    chain: tuple[int, ...],
    proposals: Sequence[DraftDistribution],
    target: dict[tuple[int, ...], Tensor],
) -> list[tuple[tuple[int, ...], float]]:
    """Every outcome of verifying one chain, with its probability."""
    found: list[tuple[tuple[int, ...], float]] = []
    reached = 1.0
    for row, (token, proposal) in enumerate(zip(chain, proposals, strict=True)):
        probs = target[chain[:row]]
        keep = keep_probability(float(probs[token]), probability(proposal, token))
        residual = residual_weights(probs, token, proposal)
        residual = residual / residual.sum()
        found += [
            ((*chain[:row], other), reached * (1 - keep) * float(residual[other]))
            for other in range(VOCAB)
        ]
        reached *= keep
    return [*found, (chain, reached)]


def probability(proposal: DraftDistribution, token: int) -> float:
    return dict(zip(proposal.token_ids, proposal.probabilities, strict=True)).get(token, 0.0)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_where_nothing_is_left(temperature: float, rule: Rule) -> None:
    """A kept draft that leads nowhere is the last token; the next step has an error, no token."""
    spec = replace(
        PLAIN,
        temperature=temperature,
        allowed_token_ids=(1, 2),
        banned_sequences=((0, 2), (1, 2), (1, 1)),
    )
    run, logits = run_of(spec, (1, 4), grammar=False)
    [answer] = answers_of([run], logits, rule)
    assert (answer.token_ids, answer.num_accepted, answer.error) == ((1,), 0, None)
    run, logits = run_of(spec, (2, 4), grammar=False, done=(1,))
    [answer] = answers_of([run], logits, rule)
    assert answer.token_ids == ()
    assert answer.error == "no token is allowed at position 5"


@pytest.mark.parametrize("text_is", ["free", "grammatical"])
@pytest.mark.parametrize("name", SPECS)
def test_coupled_emits_the_targets_own_draws(name: str, text_is: str) -> None:
    """Whatever is drafted, each emitted token is the one the target draws without drafts.

    Without drafts the ratio rule draws the same, and at temperature 0 with any.
    """
    grammar = text_is == "grammatical"
    for seed in range(4):
        spec = replace(SPECS[name], seed=seed)
        own: dict[tuple[int, ...], int] = {}
        for done in TOKENS:
            run, logits = run_of(spec, (), grammar=grammar, done=done)
            [own[done]] = answers_of([run], logits, Rule.COUPLED)[0].token_ids
            assert answers_of([run], logits, Rule.RATIO)[0].token_ids == (own[done],)
        for drafts in TOKENS:
            run, logits = run_of(spec, drafts, grammar=grammar)
            answer = answers_of([run], logits, Rule.COUPLED)[0]
            for at, token in enumerate(answer.token_ids):
                assert token == own[answer.token_ids[:at]]
            kept = answer.token_ids[: answer.num_accepted]
            assert kept == drafts[: len(kept)]
            assert len(kept) == len(drafts) or answer.token_ids[-1] != drafts[len(kept)]
            if spec.temperature == 0:
                assert answers_of([run], logits, Rule.RATIO) == [answer]
