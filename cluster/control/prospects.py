"""What may be expected of a sequence's next draft: what its last ones were worth."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.control.table import SequenceTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

NUM_KEPT = 16  # drafts of a sequence
NUM_SCENARIOS = 4  # of them that are taken to come again, all sequences' at once
FIRST_CHANCE = 0.6  # of every position of a draft, before anything is known
FIRST_BACKOFF = 8  # tokens until a sequence that is not asked is tried again, then twice as many
LAST_BACKOFF = 128
LAST_LOOK_WAIT = 16  # the same, where it is only asked, which may cost next to nothing

# What is kept of when to try a sequence, and when to look at its drafts, in committed tokens.
TRY_AT, LOOK_AT, LOOK_WAIT, PUT_OFF, BACKOFF = range(5)  # PUT_OFF: of TRY_AT, after the first wait
AT_FIRST = np.array([0, 0, FIRST_BACKOFF, 0, FIRST_BACKOFF])
SINCE_NOW = np.array([FIRST_BACKOFF, FIRST_BACKOFF, FIRST_BACKOFF, 0, FIRST_BACKOFF])
IS_TIME = np.array([1, 1, 0, 0, 0])


class Prospects:
    """The survivals of each sequence's last drafts, empty ones too, and when to try it again.

    Whatever the price is now, what drafts as these would bring at that price can be told.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._num_records = 0
        first = FIRST_CHANCE ** np.arange(1, num_positions + 1)
        self._table = SequenceTable(
            drafts=np.tile(first.astype(np.float32), (NUM_KEPT, 1)),
            num_asked=np.array(0),
            schedule=AT_FIRST,
        )
        self._asked: tuple[IntArray, IntArray] | None = None  # what `asked` has not entered yet

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, seq_ids: Sequence[int]) -> IntArray:
        """Where these sequences are kept."""
        return self._table.rows(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Sequences ended."""
        self._schedule()
        self._table.forget(seq_ids)

    def drafts(self, rows: IntArray) -> NDArray[np.float32]:
        """Survivals `[NUM_KEPT, sequences, positions]`."""
        kept: NDArray[np.float32] = self._table["drafts"][rows]
        return np.ascontiguousarray(kept.transpose(1, 0, 2))

    def num_asked(self, rows: IntArray) -> IntArray:
        """How many drafts each was asked for so far."""
        count: IntArray = self._table["num_asked"][rows]
        return count

    def record(self, rows: IntArray, survivals: FloatArray, num_asked: IntArray) -> None:
        """Drafts came: survivals `[sequences, longest]`, 0 from where each ended.

        Beyond what was asked for a draft is thought to go on as it ended. While a sequence had
        fewer than are kept, its last one stands for those to come.
        """
        count, length = survivals.shape
        drafts = np.zeros((count, self._num_positions))
        drafts[:, :length] = survivals[:, : self._num_positions]
        if count and num_asked.min() < self._num_positions:
            _extend(drafts, num_asked)
        column = self._table["num_asked"]
        number = column[rows]
        self._table["drafts"][rows, number % NUM_KEPT] = drafts
        column[rows] += 1
        for at in np.flatnonzero(number < NUM_KEPT - 1).tolist():
            self._table["drafts"][rows[at], number[at] + 1 :] = drafts[at]
        if count:
            self._num_records += 1
            sample = self._table.initial["drafts"]  # a new sequence may be as any of the last ones
            sample[self._num_records % NUM_KEPT] = drafts[self._num_records % count]

    def give_up(self, rows: IntArray) -> None:
        """The drafter kept a step waiting: expect nothing of it until it is tried again."""
        self._table["drafts"][rows] = 0.0

    def asked(self, rows: IntArray, num_tokens: IntArray) -> None:
        """These are asked because it pays: once it does not, they are tried again soon."""
        if self._asked is not None and self._asked[0] is not rows:
            self._schedule()
        self._asked = rows, num_tokens  # entered once it is of interest: once it does not pay

    def encouraged(self, rows: IntArray) -> None:
        """A draft token of these was kept that was only tried: try again soon, it may be luck."""
        schedule = self._schedule()
        schedule[rows, TRY_AT] -= schedule[rows, PUT_OFF]
        schedule[rows, PUT_OFF] = 0
        schedule[rows, BACKOFF] = FIRST_BACKOFF

    def due(self, rows: IntArray, num_tokens: IntArray, *, soon: bool = False) -> BoolArray:
        """Which of them should be tried again now; `soon`: as soon as ever."""
        schedule = self._schedule()
        try_at = schedule[rows, TRY_AT]
        if soon:
            try_at -= schedule[rows, PUT_OFF]
        due: BoolArray = try_at <= num_tokens
        return due

    def worth_a_look(self, rows: IntArray, num_tokens: IntArray) -> BoolArray:
        """Whom it costs little to ask now, to see what their drafts look like.

        Once there is one, those that would follow soon are asked with it, in the same message.
        """
        look_at = self._schedule()[rows, LOOK_AT]
        worth: BoolArray = look_at <= num_tokens
        return look_at <= num_tokens + FIRST_BACKOFF if worth.any() else worth

    def looked(self, rows: IntArray, num_tokens: IntArray, *, wait: int) -> None:
        """These were asked: they are worth a look again after at least so many tokens."""
        schedule = self._schedule()
        waits = schedule[rows, LOOK_WAIT]
        schedule[rows, LOOK_AT] = num_tokens + np.maximum(waits, wait)
        schedule[rows, LOOK_WAIT] = np.minimum(2 * waits, LAST_LOOK_WAIT)

    def tried(self, rows: IntArray, num_tokens: IntArray) -> None:
        """These are tried now, and again after twice as many tokens as the last time."""
        schedule = self._schedule()
        backoff = schedule[rows, BACKOFF]
        schedule[rows, TRY_AT] = num_tokens + backoff
        schedule[rows, PUT_OFF] = backoff - FIRST_BACKOFF
        schedule[rows, BACKOFF] = np.minimum(2 * backoff, LAST_BACKOFF)

    def _schedule(self) -> IntArray:
        """When to try and to look at each `[sequences, 5]`, complete."""
        schedule: IntArray = self._table["schedule"]
        if self._asked is not None:
            rows, num_tokens = self._asked
            schedule[rows] = SINCE_NOW + num_tokens[:, None] * IS_TIME
            self._asked = None
        return schedule


def _extend(drafts: FloatArray, num_asked: IntArray) -> None:
    """Let drafts that are as long as was asked for go on with the chance of their last token."""
    num_positions = drafts.shape[1]
    each = np.arange(len(drafts))
    last = np.clip(num_asked, 1, num_positions) - 1
    ends = drafts[each, last]
    before = np.where(last > 0, drafts[each, np.maximum(last - 1, 0)], 1.0)
    chance = np.divide(ends, before, out=np.zeros_like(ends), where=before > 0)
    beyond = np.arange(num_positions) - last[:, None]
    np.copyto(drafts, ends[:, None] * chance[:, None] ** np.maximum(beyond, 0), where=beyond > 0)
