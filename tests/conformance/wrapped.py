"""Drafters that do as another one does, and something else besides."""

from collections.abc import Iterable, Mapping, Sequence

from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, DraftDistribution


class Wrapped:
    """As the other."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.context_limit = drafter.context_limit

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """The other's drafts."""
        return await self._drafter.propose(queries)

    def release(self, seq_ids: Iterable[int]) -> None:
        """As the other."""
        self._drafter.release(seq_ids)


class Lying(Wrapped):
    """Ships other distributions than its drafts were drawn from."""

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """The drafts, with distributions turned around."""
        drafts = await super().propose(queries)
        return {
            seq_id: Draft(draft.token_ids, tuple(_turned(each) for each in draft.distributions))
            for seq_id, draft in drafts.items()
        }


def _turned(drawn: DraftDistribution) -> DraftDistribution:
    return DraftDistribution(drawn.token_ids, drawn.probabilities[::-1])


class Noting(Wrapped):
    """Notes each draft by the number of tokens it follows, of a sequence that is alone."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.drafts: dict[int, Draft] = {}

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """The drafts as they came."""
        [query] = queries
        length = len(query.token_ids)
        drafts = await super().propose(queries)
        self.drafts[length] = drafts.get(query.seq_id, Draft())
        return drafts
