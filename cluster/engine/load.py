"""What an engine tells others of its load."""

import time
from collections.abc import Callable, Iterable, Mapping

from cluster.control.policy import Policy
from cluster.engine.limits import EngineLimits
from cluster.engine.pace import Pace
from cluster.engine.scheduler import Scheduler
from cluster.messages import Draft, EngineLoad, SequenceTokens

PREFIX_SECONDS = 1.0  # between two looks at what the prefix cache holds
MOST_PREFIXES = 1024


class LoadMeter:
    """Watches an engine's steps and counts what it holds."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: EngineLimits,
        policy: Policy,
        *,
        late_ratio: Callable[[], float] = float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._policy = policy
        self._late_ratio = late_ratio
        self._clock = clock
        self._pace = Pace(clock=clock)
        self._prefixes: frozenset[int] = frozenset()
        self._looked_at = float("-inf")
        self._looked_in_step = 0

    def observe_step(
        self,
        *,
        num_rows: float,
        drafts: Iterable[Draft],
        answers: Mapping[int, SequenceTokens],
        seconds: float,
        decodes: bool,
    ) -> None:
        """A step of so many rows (that look back on nothing) without its drafts is over.

        `decodes` if some of them were not of prompts.
        """
        num_drafted = sum(len(draft.token_ids) for draft in drafts)
        sampled = [answer for answer in answers.values() if answer.token_ids]
        self._pace.observe_step(num_rows=num_rows + num_drafted, seconds=seconds, decodes=decodes)
        self._pace.observe_tokens(
            num_sequences=len(sampled),
            num_tokens=sum(len(answer.token_ids) for answer in sampled),
            num_drafted=num_drafted,
            num_accepted=sum(answer.num_accepted for answer in sampled),
        )

    def observe_answer(self, num_tokens: int) -> None:
        """An answer of so many tokens ended by itself."""
        self._pace.observe_answer(num_tokens)

    def prompt_rows(self, num_decodes: int) -> int:
        """How many rows of prompts, that look back on nothing, may stand beside so many decodes."""
        fixed = self._limits.max_prompt_rows_beside_decodes
        return fixed or self._pace.more_rows(num_decodes)

    @property
    def place_seconds(self) -> float:
        """How long until a running sequence ends, on average."""
        pace, places = self._pace, self._limits.max_num_seqs
        if not pace.tokens_per_step:
            return 0.0
        return pace.answer_tokens * pace.step_seconds / pace.tokens_per_step / places

    def counts(self) -> EngineLoad:
        """What is held now, without what it takes to count more."""
        scheduler, pace = self._scheduler, self._pace
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.blocks.num_free,
            step_id=scheduler.step_id,
            max_num_seqs=self._limits.max_num_seqs,
            base_seconds=pace.base_seconds,
            row_seconds=pace.row_seconds,
        )

    def load(self) -> EngineLoad:
        """Everything but the prefixes."""
        scheduler, limits, pace = self._scheduler, self._limits, self._pace
        prompts = [s for s in scheduler.running if s.num_uncomputed_tokens > 1]
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.blocks.num_free,
            step_id=scheduler.step_id,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_waiting=limits.max_num_waiting,
            max_prompt_rows=self.prompt_rows(len(scheduler.running) - len(prompts)),
            keys_per_row=limits.keys_per_row,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prompt_tokens=sum(s.num_uncomputed_tokens for s in (*prompts, *scheduler.waiting)),
            step_seconds=pace.step_seconds,
            base_seconds=pace.base_seconds,
            row_seconds=pace.row_seconds,
            tokens_per_step=pace.tokens_per_step,
            tokens_per_second=pace.tokens.per_second,
            answer_tokens=pace.answer_tokens,
            price=self._policy.price,
            price_floor=self._policy.price_floor,
            drafted_per_second=pace.drafted.per_second,
            accepted_per_second=pace.accepted.per_second,
            late_ratio=self._late_ratio(),
        )

    def prefixes(self) -> frozenset[int]:
        """Digests of what the prefix cache holds: the same object until they have changed."""
        now, step_id = self._clock(), self._scheduler.step_id
        if step_id != self._looked_in_step and now - self._looked_at >= PREFIX_SECONDS:
            self._looked_at, self._looked_in_step = now, step_id
            prefixes = self._scheduler.blocks.prefixes(MOST_PREFIXES)
            if prefixes != self._prefixes:
                self._prefixes = prefixes
        return self._prefixes
