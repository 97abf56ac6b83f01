"""The one place that answers for drafters: whatever they do, the step goes on."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from cluster.errors import DrafterUnavailable
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft
from cluster.metrics import DRAFTER_FAILURES, EngineMetrics

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0


class Proposer:
    """Asks a drafter under a deadline and believes nothing it says.

    A drafter's own fault (any exception, any answer that is not what the protocol says) is taken
    as if it had died: a draft can be worth a step's time, never a request.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        deadline_seconds: float,
        vocab_size: int,
        metrics: EngineMetrics,
    ) -> None:
        self._drafter = drafter
        self._deadline_seconds = deadline_seconds
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._next_log = 0.0
        self._num_unlogged = 0

    async def propose(self, queries: Sequence[DraftQuery]) -> dict[int, Draft]:
        """Usable drafts by sequence id, each at most as long as wanted; empty on any failure.

        Without queries the drafter is not called.
        """
        if not queries:
            return {}
        try:
            with self._metrics.timed("draft"):
                async with asyncio.timeout(self._deadline_seconds):
                    answer = await self._drafter.propose(queries)
            return self._usable(queries, answer)
        except TimeoutError:
            self._failed("late", None)
        except DrafterUnavailable as error:
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

    def _usable(
        self, queries: Sequence[DraftQuery], answer: Mapping[int, Draft]
    ) -> dict[int, Draft]:
        """What of the answer can be verified: wanted, in the vocabulary, not too long."""
        drafts = {}
        for query in queries:
            draft = answer.get(query.seq_id)
            if draft is not None:
                drafts[query.seq_id] = Draft(self._trimmed(draft.token_ids, query.num_wanted))
        return drafts

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


def is_cancelled() -> bool:
    """Whether the running task itself was asked to stop, rather than something it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
