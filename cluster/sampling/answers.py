"""What a target answers for the rows it sampled: tokens by the rule of the step, and logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cluster.messages import Rule, SequenceTokens, TopLogprobs
from cluster.sampling.draw import draw, probabilities, rows_at_once
from cluster.sampling.logprobs import token_log_probs, top_log_probs
from cluster.sampling.processors import drawable, processed
from cluster.sampling.ratio import verify_ratio
from cluster.sampling.runs import Run, joined_masks
from cluster.sampling.verify import verify


def answers_of(runs: Sequence[Run], logits: Tensor, rule: Rule) -> list[SequenceTokens]:
    """Draw and verify every run. `logits`, `[rows, vocab]`, has a row per sampled row, in order.

    A run ends before a row that has no token left to draw. If that is its first row, the sequence
    gets an error; if not, the next step will tell.
    """
    parts = _parts(runs)
    specs = [run.sampling for run in runs for _ in run.rows]
    positions = [position for run in runs for position in run.positions]
    histories = [history for run in runs for history in run.histories()]
    masks = joined_masks(runs, logits)
    ready = processed(logits, specs, positions, histories=histories, masks=masks)
    tokens = _verified(parts, ready, drawable(ready, specs, masks), rule)
    answers = [_answer(part, tokens.get(part.rows.start, [])) for part in parts]
    return _with_logprobs(parts, answers, logits)


def greedy_answers(runs: Sequence[Run], largest: Sequence[int]) -> list[SequenceTokens]:
    """Verify runs that want the largest logits alone; `largest` has a token per row, in order."""
    answers = []
    first = 0
    for run in runs:
        own = largest[first : first + len(run.rows)]
        first += len(run.rows)
        num_accepted = verify(run.draft_token_ids, own).num_accepted
        answers.append(
            SequenceTokens(
                seq_id=run.sequence.seq_id,
                num_accepted=num_accepted,
                token_ids=tuple(own[: num_accepted + 1]),
            )
        )
    return answers


@dataclass(frozen=True, slots=True)
class _Part:
    """A run, or as many of its first rows as can be drawn from: `rows` of the logits."""

    run: Run
    rows: range

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """The drafts that these rows verify."""
        return self.run.draft_token_ids[: max(len(self.rows) - 1, 0)]

    @property
    def positions(self) -> range:
        """Where the tokens drawn will stand."""
        return self.run.positions[: len(self.rows)]


def _parts(runs: Sequence[Run]) -> list[_Part]:
    """Every run with all its rows."""
    parts: list[_Part] = []
    first = 0
    for run in runs:
        parts.append(_Part(run, range(first, first + len(run.rows))))
        first += len(run.rows)
    return parts


def _cut(parts: Sequence[_Part], found: Sequence[bool]) -> list[_Part]:
    """The parts up to their first row in which nothing was found to draw."""
    if all(found):
        return list(parts)
    lengths = [
        next((i for i, row in enumerate(part.rows) if not found[row]), len(part.rows))
        for part in parts
    ]
    return [
        replace(part, rows=part.rows[:length]) for part, length in zip(parts, lengths, strict=True)
    ]


def _verified(
    parts: Sequence[_Part], logits: Tensor, found: Sequence[bool], rule: Rule
) -> dict[int, list[int]]:
    """Accepted drafts and the token that follows them, by first row; `logits` are processed.

    A greedy sequence is the same under both rules, and cheaper under the coupled one.
    """

    def is_random(part: _Part) -> bool:
        return bool(part.draft_token_ids) and part.run.sampling.temperature > 0

    if rule is Rule.COUPLED:
        return _by_coupling(_cut(parts, found), logits)
    coupled = _cut([part for part in parts if not is_random(part)], found)
    ratio = [part for part in parts if is_random(part)]
    return _by_ratio(ratio, logits) | _by_coupling(coupled, logits)


def _by_coupling(parts: Sequence[_Part], logits: Tensor) -> dict[int, list[int]]:
    rows = [row for part in parts for row in part.rows]
    if not rows:
        return {}
    drawn = draw(
        logits if len(rows) == len(logits) else logits[rows],
        [part.run.sampling for part in parts for _ in part.rows],
        [position for part in parts for position in part.positions],
    )
    tokens: dict[int, list[int]] = {}
    first = 0
    for part in parts:
        own = drawn[first : first + len(part.rows)]
        first += len(part.rows)
        if own:
            kept = verify(part.draft_token_ids, own).num_accepted + 1
            tokens[part.rows.start] = own[:kept]  # accepted drafts are equal to these
    return tokens


def _by_ratio(parts: Sequence[_Part], logits: Tensor) -> dict[int, list[int]]:
    """All rows, those with nothing to draw too: a draft may not go because of where it leads."""
    tokens: dict[int, list[int]] = {}
    for some in _groups(parts, most_rows=rows_at_once(logits)):
        rows = [row for part in some for row in part.rows]
        probs = probabilities(
            logits if len(rows) == len(logits) else logits[rows],
            [part.run.sampling for part in some for _ in part.rows],
        )
        first = 0
        for part in some:
            own = probs[first : first + len(part.rows)]
            first += len(part.rows)
            tokens[part.rows.start] = verify_ratio(
                own,
                part.draft_token_ids,
                part.run.sequence.draft_distributions,
                seed=part.run.sampling.seed,
                positions=part.positions,
            )
    return tokens


def _groups(parts: Sequence[_Part], *, most_rows: int) -> list[list[_Part]]:
    """Neighbours that have no more rows than that together, or one by itself."""
    groups: list[list[_Part]] = []
    room = 0
    for part in parts:
        if len(part.rows) > room:
            groups.append([])
            room = most_rows
        groups[-1].append(part)
        room -= len(part.rows)
    return groups


def _answer(part: _Part, token_ids: Sequence[int]) -> SequenceTokens:
    error = None
    if not token_ids:
        error = f"no token is allowed at position {part.run.positions[0]}"
    return SequenceTokens(
        seq_id=part.run.sequence.seq_id,
        num_accepted=max(len(token_ids) - 1, 0),
        token_ids=tuple(token_ids),
        error=error,
    )


def _with_logprobs(
    parts: Sequence[_Part], answers: Sequence[SequenceTokens], logits: Tensor
) -> list[SequenceTokens]:
    """The answers with the logprobs that were asked for; `logits` are the unprocessed ones."""
    complete: list[SequenceTokens] = []
    for part, answer in zip(parts, answers, strict=True):
        asked = part.run.sequence
        rows = slice(part.rows.start, part.rows.start + len(answer.token_ids))
        logprobs: tuple[float, ...] = ()
        top: tuple[TopLogprobs, ...] = ()
        if asked.logprobs and answer.token_ids:
            logprobs = tuple(token_log_probs(logits[rows], answer.token_ids))
        if asked.top_logprobs and answer.token_ids:
            top = tuple(top_log_probs(logits[rows], asked.top_logprobs))
        complete.append(replace(answer, logprobs=logprobs, top_logprobs=top))
    return complete
