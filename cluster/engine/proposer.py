"""The one place that answers for drafters: whatever they do, the step goes on."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum, inf, isfinite

from cluster.errors import DrafterUnavailable
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, DraftDistribution, Rule
from cluster.metrics import DRAFTER_FAILURES, EngineMetrics

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0
TOLERANCE = 1e-9  # of the sum of a draft's distribution, which bounds what it can shift
LATE = frozenset({"late", "busy", "distrusted"})  # was late, still is, or is not asked for it
LATE_RATE = 0.02


class Proposer:
    """Asks a drafter under a deadline and believes nothing it says.

    A drafter's own fault (any exception, any answer that is not what the protocol says) is taken
    as if it had died: a draft can be worth a step's time, never a request. Under Rule.RATIO a draft
    ends before the first token whose distribution is none, or not one it can have come from. That
    shifts no output: where a draft ends depends on the tokens before that place, or on a token that
    the rule would have given no say (see `sampling.ratio`).
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        deadline_seconds: float,
        vocab_size: int,
        metrics: EngineMetrics,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        self._drafter = drafter
        self._rule = rule
        self._deadline_seconds = deadline_seconds
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._next_log = 0.0
        self._num_unlogged = 0
        self._late_ratio = 0.0

    @property
    def late_ratio(self) -> float:
        """The part of the latest steps that asked for drafts in which none came in time."""
        return self._late_ratio

    async def propose(
        self, queries: Sequence[DraftQuery], *, patience_seconds: float = inf
    ) -> dict[int, Draft]:
        """Usable drafts by sequence id, each at most as long as wanted; empty on any failure.

        What takes longer than the deadline, or than `patience_seconds`, has failed. Without
        queries the drafter is not called.
        """
        if not queries:
            return {}
        try:
            with self._metrics.timed("draft"):
                async with asyncio.timeout(min(self._deadline_seconds, patience_seconds)):
                    answer = await self._drafter.propose(queries)
            self._note(late=False)
            return self._usable(queries, answer)
        except TimeoutError:
            self._note(late=True)
            self._metrics.drafts_late(len(queries))
            self._failed("late", None)
        except DrafterUnavailable as error:
            self._note(late=error.reason in LATE)
            if error.reason == "late":
                self._metrics.drafts_late(len(queries))
            self._failed(error.reason, None)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            self._failed("died", error)  # something inside the drafter was cancelled, not us
        except Exception as error:  # noqa: BLE001 - drafts fail open: its bug is not the request's
            self._failed("died", error)
        return {}

    def release(self, seq_ids: Iterable[int]) -> None:
        """Tell the drafter that sequences have ended."""
        try:
            self._drafter.release(seq_ids)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("died", error)

    def _note(self, *, late: bool) -> None:
        self._late_ratio += LATE_RATE * (late - self._late_ratio)

    def _usable(
        self, queries: Sequence[DraftQuery], answer: Mapping[int, Draft]
    ) -> dict[int, Draft]:
        """What of the answer can be verified: wanted, in the vocabulary, not too long."""
        drafts = {}
        for query in queries:
            draft = answer.get(query.seq_id)
            if draft is not None:
                drafts[query.seq_id] = self._believed(draft, query.num_wanted)
        return drafts

    def _believed(self, draft: Draft, num_wanted: int) -> Draft:
        """As much of a draft as can be verified, with distributions only where they are used."""
        token_ids = self._trimmed(draft.token_ids, num_wanted)
        believed = Draft(token_ids, (), checked_margins(draft)[: len(token_ids)], draft.drafter)
        if self._rule is Rule.COUPLED or not draft.distributions:
            return believed
        if len(draft.distributions) != len(draft.token_ids):
            return Draft()
        believed = replace(believed, distributions=draft.distributions[: len(token_ids)])
        for count, drawn in enumerate(zip(token_ids, believed.distributions, strict=True)):
            if not _is_drawn_from(*drawn, vocab_size=self._vocab_size):
                return believed.first(count)
        return believed

    def _trimmed(self, token_ids: Sequence[int], num_wanted: int) -> tuple[int, ...]:
        """The first `num_wanted` ids, cut before the first that is none of the vocabulary."""
        for count, token_id in enumerate(token_ids[:num_wanted]):
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                return tuple(token_ids[:count])
        return tuple(token_ids[:num_wanted])

    def _failed(self, reason: str, error: BaseException | None) -> None:
        """Count a step without drafts, and say so at most once in LOG_INTERVAL_SECONDS."""
        self._metrics.drafter_unavailable(reason if reason in DRAFTER_FAILURES else "died")
        self._num_unlogged += 1
        now = time.monotonic()
        if now < self._next_log:
            return
        logger.warning(
            "drafter %s gave nothing (%s); steps without drafts since the last such line: %d",
            self._drafter.name,
            reason,
            self._num_unlogged,
            exc_info=error,
        )
        self._next_log = now + LOG_INTERVAL_SECONDS
        self._num_unlogged = 0


def checked_margins(draft: Draft) -> tuple[float, ...]:
    """The margins if there is a finite one for each token; they decide nothing but speed."""
    margins = draft.margins
    if len(margins) != len(draft.token_ids) or not all(map(_is_finite, margins)):
        return ()
    return margins


def _is_finite(margin: object) -> bool:
    return isinstance(margin, float) and isfinite(margin)


def _is_drawn_from(token_id: int, distribution: DraftDistribution, *, vocab_size: int) -> bool:
    """Whether this is a distribution over the vocabulary that can have brought the token."""
    token_ids, probabilities = distribution.token_ids, distribution.probabilities
    return (
        len(token_ids) == len(probabilities) == len(set(token_ids)) > 0
        and set(map(type, token_ids)) == {int}
        and set(map(type, probabilities)) == {float}
        and min(token_ids) >= 0
        and max(token_ids) < vocab_size
        and abs(fsum(probabilities) - 1) <= TOLERANCE  # not so for one that is not a number
        and min(probabilities) >= 0
        and dict(zip(token_ids, probabilities, strict=True)).get(token_id, 0) > 0
    )


def is_cancelled() -> bool:
    """Whether the running task itself was asked to stop, rather than something it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
