"""What steps of the very engines that are compared take, seen in waves that are not counted."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cluster.control.cost import CostTable
from cluster.control.draft_cost import DraftCost
from cluster.control.policy import FixedPolicy, StepRecord
from cluster.tools.choosing.facts import StepCosts
from cluster.tools.choosing.prediction import Prices


class RecordedPolicy(FixedPolicy):
    """The same number for every sequence at every step, and all that came of it."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.records: list[StepRecord] = []
        self._recording = False

    def record(self, *, recording: bool) -> None:
        """Begin with nothing, or end."""
        if recording:
            self.records = []
        self._recording = recording

    def observe(self, record: StepRecord) -> None:
        """Keep it."""
        if self._recording:
            self.records.append(record)


@dataclass(frozen=True, slots=True)
class Observed:
    """A wave's steps, and the wall time from the first to the last."""

    records: tuple[StepRecord, ...]
    seconds: float

    @property
    def rest_seconds(self) -> float:
        """Of a step, beyond the target and the wait for drafts."""
        known = sum(each.target_seconds + each.draft_seconds for each in self.records)
        return max(self.seconds - known, 0.0) / max(len(self.records), 1)


def prices_of(table: CostTable, plain: Sequence[Observed], drafting: Sequence[Observed]) -> Prices:
    """Prices of one draft's steps, from waves without drafts and with them."""
    draft = DraftCost()
    rest: dict[int, list[float]] = defaultdict(list)
    for observed in (*plain, *drafting):
        if observed.records:
            most = max(record.shape.num_sequences for record in observed.records)
            rest[most].append(observed.rest_seconds)
    for observed in drafting:
        for record in observed.records:
            if record.draft_seconds > 0:
                draft.observe(len(record.outcomes), _num_drafted(record), record.draft_seconds)
    points = [(float(number), fmean(seconds)) for number, seconds in rest.items()]
    return Prices(table, draft, StepCosts.of(points or [(1.0, 0.0)]))


def correct(table: CostTable, waves: Sequence[Observed]) -> None:
    """Have the table learn from steps as they are in an engine, of all waves in turn."""
    series = [list(observed.records) for observed in waves]
    for place in range(max(map(len, series), default=0)):
        for records in series:
            if place < len(records):
                record = records[place]
                table.observe(record.shape, _num_drafted(record), record.target_seconds)


def token_seconds(drafting: Sequence[Observed]) -> float:
    """What steps waited for a token that was drafted, on average; 0 where none was."""
    records = [record for observed in drafting for record in observed.records]
    num_drafted = sum(map(_num_drafted, records))
    waited = sum(record.draft_seconds for record in records)
    return waited / num_drafted if num_drafted else 0.0


def _num_drafted(record: StepRecord) -> int:
    return sum(len(outcome.draft.token_ids) for outcome in record.outcomes)
