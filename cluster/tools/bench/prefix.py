"""What a prefix cache is worth: the second turn of a chat against the same turn from cold.

Each round has a conversation of its own salt. Its first turn is answered, then the second is
asked twice: with the conversation's salt, so that what the first turn computed is at hand, and
with a salt that nothing was computed under. The two take turns in coming first.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from rich.table import Table

from cluster.config import DType, TargetConfig
from cluster.models.reference import resolve
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from cluster.tools.bench.lanes import Lane, Variant, open_lab
from cluster.tools.bench.progress import Report
from cluster.tools.bench.prompts import CHAT, COPY
from cluster.tools.bench.streams import Stream

ANSWER_TOKENS = 16
ROOM_TOKENS = 8 * ANSWER_TOKENS  # for both answers, the first one tokenised again from its text
NUM_SLOTS = 4
REPLY = "Here you are."  # to all but the last of the history's messages
FOLLOW_UP = ChatMessage(
    role="user", content="Thank you. Now say the most important part of that in one sentence."
)


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """The same prompt with what was cached of it, and without."""

    warm: Stream
    cold: Stream
    num_prompt_tokens: int

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes."""
        return self.cold.first_token_seconds / self.warm.first_token_seconds


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """The second turns of one number format; seconds are medians, a ratio is that of ratios."""

    dtype: DType
    history_tokens: int
    turns: tuple[SecondTurn, ...]

    @property
    def warm_seconds(self) -> float:
        """To the first token, with the cache."""
        return statistics.median(turn.warm.first_token_seconds for turn in self.turns)

    @property
    def cold_seconds(self) -> float:
        """To the first token, without."""
        return statistics.median(turn.cold.first_token_seconds for turn in self.turns)

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes."""
        return statistics.median(turn.ratio for turn in self.turns)

    @property
    def same_tokens(self) -> bool:
        """Whether the answers are the same with the cache and without."""
        return all(turn.warm.token_ids == turn.cold.token_ids for turn in self.turns)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "dtype": self.dtype,
            "history_tokens": self.history_tokens,
            "prompt_tokens": self.turns[-1].num_prompt_tokens,
            "cached_tokens": self.turns[-1].warm.num_cached_tokens,
            "warm_first_token_seconds": self.warm_seconds,
            "cold_first_token_seconds": self.cold_seconds,
            "ratio": self.ratio,
            "same_tokens": self.same_tokens,
        }


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """One row a number format."""

    rows: tuple[PrefixRow, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [row.as_json() for row in self.rows]

    def __rich__(self) -> Table:
        title = "Milliseconds to the first token of a chat's second turn"
        table = Table(title=title, title_justify="left")
        headings = ("weights", "history", "prompt", "cached", "cold", "warm", "sooner", "same")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(
                row.dtype,
                str(row.history_tokens),
                str(row.turns[-1].num_prompt_tokens),
                str(row.turns[-1].warm.num_cached_tokens),
                f"{row.cold_seconds * 1000:.0f}",
                f"{row.warm_seconds * 1000:.0f}",
                f"{row.ratio:.1f}x",
                "yes" if row.same_tokens else "no",
            )
        return table


async def bench_prefix(
    target: str, *, dtypes: Sequence[DType], history_tokens: int, rounds: int, report: Report
) -> PrefixReport:
    """Measure `rounds` conversations after one that does not count. Raises ConfigurationError."""
    tokenizer = load_tokenizer(resolve(target))
    history = _history(tokenizer, history_tokens)
    follow_up = tokenizer.chat((FOLLOW_UP,))
    max_model_len = len(tokenizer.chat(history)) + len(follow_up) + ROOM_TOKENS
    config = TargetConfig(model=target, max_model_len=max_model_len, max_num_seqs=NUM_SLOTS)
    rows = []
    async with open_lab(config) as lab:
        for dtype in dtypes:
            turns = []
            async with lab.lane(Variant(dtype)) as lane:
                for number in range(rounds + 1):
                    report(f"second turns, {dtype}", number, rounds + 1)
                    turns.append(await _second_turn(lane, tokenizer, history, number))
            report(f"second turns, {dtype}", rounds + 1, rounds + 1)
            rows.append(PrefixRow(dtype, len(tokenizer.chat(history)), tuple(turns[1:])))
    return PrefixReport(tuple(rows))


async def _second_turn(
    lane: Lane, tokenizer: Tokenizer, history: Sequence[ChatMessage], number: int
) -> SecondTurn:
    own, fresh = f"chat-{number}", f"other-{number}"
    first = await _ask(lane, tokenizer.chat(history), own)
    answer = ChatMessage(role="assistant", content=tokenizer.decode(first.token_ids))
    prompt = tokenizer.chat((*history, answer, FOLLOW_UP))
    salts = (own, fresh) if number % 2 else (fresh, own)
    streams = {salt: await _ask(lane, prompt, salt) for salt in salts}
    return SecondTurn(streams[own], streams[fresh], len(prompt))


async def _ask(lane: Lane, prompt: Sequence[int], salt: str) -> Stream:
    request = Request(
        request_id=f"{salt}-{len(prompt)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(seed=0, temperature=0.0),
        stopping=StoppingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
        cache_salt=salt,
    )
    return (await lane.run([request])).streams[0]


def _history(tokenizer: Tokenizer, num_tokens: int) -> list[ChatMessage]:
    """A conversation that ends with a user's message, of at least so many tokens, hardly more."""
    messages: list[ChatMessage] = []
    for text in cycle((*COPY, *CHAT)):
        asked = [*messages, ChatMessage(role="user", content=text)]
        if len(tokenizer.chat(asked)) >= num_tokens:
            return [*messages, _shortened(tokenizer, messages, text, num_tokens)]
        messages = [*asked, ChatMessage(role="assistant", content=REPLY)]
    raise AssertionError


def _shortened(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], text: str, num_tokens: int
) -> ChatMessage:
    """The first words of a text, as few as make the conversation that long."""
    words = text.split(" ")
    asked = [
        ChatMessage(role="user", content=" ".join(words[:num_words]))
        for num_words in range(1, len(words) + 1)
    ]
    enough = bisect_left(
        asked, num_tokens, key=lambda message: len(tokenizer.chat([*messages, message]))
    )
    return asked[enough]
