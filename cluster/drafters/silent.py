"""No drafter is a drafter that never proposes: plain decoding takes the same path."""

from collections.abc import Iterable, Mapping, Sequence

from cluster.interfaces import DraftQuery
from cluster.messages import Draft


class NoDrafter:
    """Never proposes. Satisfies `interfaces.Drafter`."""

    @property
    def name(self) -> str:
        """The name in metrics and in GetModel."""
        return "off"

    @property
    def context_limit(self) -> int | None:
        """No limit: nothing is held."""
        return None

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """No drafts, for any query."""
        del queries
        return {}

    def release(self, seq_ids: Iterable[int]) -> None:
        """Nothing is held, so nothing is forgotten."""
