"""Several drafters at once: each sequence has its drafts from the one that is worth most to it.

queries ──> free drafters: all of them, every time            graded by what follows, used or not
   │            │
   │            └─ how many tokens their drafts are expected to bring
   └──────> paid drafters: the sequences to which they would bring more, if waiting for it pays
                │
                └─ of all that came, each sequence gets the draft that is expected to bring most
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.drafters.members import Member, PaidMember, Seconds
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft


@dataclass(frozen=True, slots=True)
class _Proposals:
    """What was proposed to follow `base_length` tokens, by whom."""

    base_length: int
    drafts: tuple[tuple[Member, Draft], ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a paid drafter is asked for, and whether that pays or is a trial."""

    queries: list[DraftQuery]
    pays: bool


_Answer = tuple[Member, Mapping[int, Draft]]


class ChoiceDrafter:
    """Holds `free` drafters, whose answers cost nothing, and `paid` ones, which take time.

    Which drafts are verified changes no token under the coupled rule, so a sequence may change its
    drafter at every step. A paid drafter is asked for a number of sequences when the tokens they
    gain outweigh the time by which all others have to wait, and now and then to see whether it has
    become worth it; it is waited for no longer than `patience_seconds`. A member that fails is
    left out for some steps; the others' drafts come as if it were not there.
    """

    def __init__(
        self,
        *,
        free: Sequence[Drafter],
        paid: Sequence[Drafter],
        patience_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._free = [Member(drafter) for drafter in free]
        self._paid = [
            PaidMember(drafter, patience_seconds=patience_seconds, clock=clock) for drafter in paid
        ]
        self._clock = clock
        self._proposals: dict[int, _Proposals] = {}
        self._rest = Seconds()  # of a step, without its drafts
        self._ended: float | None = None

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """All that it holds, the free ones first."""
        return tuple(member.drafter for member in self._members)

    @property
    def name(self) -> str:
        """The names of all, joined."""
        return "+".join(drafter.name for drafter in self.drafters)

    @property
    def context_limit(self) -> int | None:
        """The longest of any; each is only asked for what fits its own."""
        limits = [drafter.context_limit for drafter in self.drafters]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Each sequence's draft. Raises DrafterUnavailable if all that were asked failed."""
        if self._ended is not None:
            self._rest.observe(self._clock() - self._ended)
        self._grade(queries)
        came = [(member, await member.ask(queries)) for member in self._free]
        drafts, expected = self._best(came)
        asked = self._worth_asking(queries, expected)
        answers = await asyncio.gather(*(member.ask(its.queries) for member, its in asked.items()))
        for (member, its), answer in zip(asked.items(), answers, strict=True):
            came.append((member, answer))
            drafts = {**drafts, **answer} if its.pays else {**answer, **drafts}
        self._keep(queries, came)
        self._ended = self._clock()
        failures = [member.failure for member, _ in came]
        if failures and not drafts and failures[0] is not None and None not in failures:
            raise failures[0]
        return drafts

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        seq_ids = tuple(seq_ids)
        for seq_id in seq_ids:
            self._proposals.pop(seq_id, None)
        for member in self._members:
            member.release(seq_ids)

    @property
    def _members(self) -> list[Member]:
        return [*self._free, *self._paid]

    def _grade(self, queries: Sequence[DraftQuery]) -> None:
        """Compare what was proposed with what followed."""
        for query in queries:
            proposals = self._proposals.pop(query.seq_id, None)
            if proposals is not None:
                followed = query.token_ids[proposals.base_length :]
                for member, draft in proposals.drafts:
                    member.grades.observe(query.seq_id, draft, followed)

    def _best(self, came: Sequence[_Answer]) -> tuple[dict[int, Draft], dict[int, float]]:
        """Each sequence's best draft, of equals the first, and how many tokens it should bring."""
        best: dict[int, Draft] = {}
        expected: dict[int, float] = {}
        for member, drafts in came:
            for seq_id, draft in drafts.items():
                tokens = member.grades.expected_of(seq_id, draft)
                if seq_id not in best or tokens > expected[seq_id]:
                    best[seq_id], expected[seq_id] = draft, tokens
        return best, expected

    def _worth_asking(
        self, queries: Sequence[DraftQuery], expected: Mapping[int, float]
    ) -> dict[PaidMember, _Asked]:
        """Whom to ask for what: the most tokens a second over all sequences, or a trial.

        Decided by what is known before a paid drafter draws: were its drafts picked by what they
        hold, the ratio rule would not keep the target's distribution.
        """
        hoped = {query.seq_id: expected.get(query.seq_id, 0.0) for query in queries}
        asked: dict[PaidMember, _Asked] = {}
        for member in self._paid:
            candidates = member.candidates(queries)
            tokens = {
                query.seq_id: member.grades.expected(query.seq_id, query.num_wanted)
                for query in candidates
            }
            worth = [query for query in candidates if tokens[query.seq_id] > hoped[query.seq_id]]
            gained = sum(tokens[query.seq_id] - hoped[query.seq_id] for query in worth)
            all_tokens = len(queries) + sum(hoped.values())
            if worth and gained * self._rest.known >= all_tokens * member.seconds.known:
                hoped |= {query.seq_id: tokens[query.seq_id] for query in worth}
                asked[member] = _Asked(worth, pays=True)
            elif trial := member.trial(candidates):
                asked[member] = _Asked(trial, pays=False)
        return asked

    def _keep(self, queries: Sequence[DraftQuery], came: Sequence[_Answer]) -> None:
        """Remember all drafts, used or not, until it is known what followed."""
        for query in queries:
            drafts = tuple(
                (member, its[query.seq_id]) for member, its in came if query.seq_id in its
            )
            if drafts:
                self._proposals[query.seq_id] = _Proposals(len(query.token_ids), drafts)
