"""What a long prompt does to the streams that are under way.

A round starts some answers, lets each bring QUIET_TOKENS tokens undisturbed, and then submits a
long prompt. The streams' times between tokens from there to the long prompt's own first token
are compared with the undisturbed ones of the same round just before.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.table import Table

from cluster.config import DType, TargetConfig
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from cluster.tools.bench.figures import Percentiles, milliseconds, percentile, percentiles
from cluster.tools.bench.lanes import Lane, Variant, open_lab
from cluster.tools.bench.progress import Report
from cluster.tools.bench.prompts import CHAT, COPY
from cluster.tools.bench.streams import Stream

QUIET_TOKENS = 48
SETTLING_TOKENS = 4  # of each stream, before its times count
ROOM_TOKENS = 608  # in the context beside the long prompt, for its template and its answer
POLL_SECONDS = 0.01
RANKS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Round:
    """Times between the streams' tokens, and the long prompt's to its first one; seconds."""

    quiet: tuple[float, ...]
    disturbed: tuple[float, ...]
    first_token: float

    @property
    def ratio(self) -> float:
        """The 95th percentile disturbed over the one undisturbed."""
        return percentile(self.disturbed, 95) / percentile(self.quiet, 95)


@dataclass(frozen=True, slots=True)
class InterferenceRow:
    """All rounds of one number format."""

    dtype: DType
    num_streams: int
    prompt_tokens: int
    rounds: tuple[Round, ...]

    @property
    def ratio(self) -> float:
        """The median round's."""
        return statistics.median(each.ratio for each in self.rounds)

    @property
    def quiet(self) -> Percentiles:
        """Times between tokens without the long prompt, of all rounds together."""
        return percentiles([time for each in self.rounds for time in each.quiet], RANKS)

    @property
    def disturbed(self) -> Percentiles:
        """Times between tokens while the long prompt is computed, of all rounds together."""
        return percentiles([time for each in self.rounds for time in each.disturbed], RANKS)

    @property
    def first_token_seconds(self) -> float:
        """The median round's, of the long prompt."""
        return statistics.median(each.first_token for each in self.rounds)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "dtype": self.dtype,
            "num_streams": self.num_streams,
            "prompt_tokens": self.prompt_tokens,
            "quiet_inter_token_seconds": self.quiet,
            "disturbed_inter_token_seconds": self.disturbed,
            "ratio_p95": self.ratio,
            "prompt_first_token_seconds": self.first_token_seconds,
        }


@dataclass(frozen=True, slots=True)
class InterferenceReport:
    """One row a number format."""

    rows: tuple[InterferenceRow, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Plain data."""
        return [row.as_json() for row in self.rows]

    def __rich__(self) -> Table:
        title = "Milliseconds between the tokens of running streams (p50/p95/p99)"
        table = Table(title=title, title_justify="left")
        headings = ("weights", "streams", "prompt", "quiet", "disturbed", "p95", "first token")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(
                row.dtype,
                str(row.num_streams),
                str(row.prompt_tokens),
                milliseconds(row.quiet),
                milliseconds(row.disturbed),
                f"{row.ratio:.2f}x",
                f"{row.first_token_seconds * 1000:.0f}",
            )
        return table


async def bench_interference(
    target: str,
    *,
    dtypes: Sequence[DType],
    num_streams: int,
    prompt_tokens: int,
    rounds: int,
    report: Report,
) -> InterferenceReport:
    """Measure so many rounds on engines without drafts. Raises ConfigurationError."""
    config = TargetConfig(
        model=target, max_model_len=prompt_tokens + ROOM_TOKENS, max_num_seqs=num_streams + 1
    )
    rows = []
    async with open_lab(config) as lab:
        tokenizer = load_tokenizer(lab.folder)
        long = _long_prompt(tokenizer, prompt_tokens)
        for dtype in dtypes:
            measured = []
            async with lab.lane(Variant(dtype)) as lane:
                for number in range(rounds):
                    report(f"a long prompt, {dtype}", number, rounds)
                    salt = str(number)
                    streams = _streams(tokenizer, num_streams, config.max_model_len, salt=salt)
                    measured.append(await _round(lane, streams, _request("long", long, 1, salt)))
            report(f"a long prompt, {dtype}", rounds, rounds)
            rows.append(InterferenceRow(dtype, num_streams, prompt_tokens, tuple(measured)))
    return InterferenceReport(tuple(rows))


async def _round(lane: Lane, requests: Sequence[Request], long: Request) -> Round:
    async with _under_way(lane, requests) as (streams, tasks):
        await _each_has(streams, tasks, SETTLING_TOKENS)
        begin = time.perf_counter()
        await _each_has(streams, tasks, SETTLING_TOKENS + QUIET_TOKENS)
        wave = await lane.run([long])
    arrived = wave.streams[0].submitted
    first_token = arrived + wave.streams[0].first_token_seconds
    return Round(
        tuple(_times_within(streams, begin, arrived)),
        tuple(_times_within(streams, arrived, first_token)),
        first_token - arrived,
    )


Tasks = Sequence[asyncio.Task[None]]


@asynccontextmanager
async def _under_way(
    lane: Lane, requests: Sequence[Request]
) -> AsyncIterator[tuple[list[Stream], Tasks]]:
    """Streams that go on for as long as the block runs, and are aborted then."""
    now = time.perf_counter()
    streams = [Stream(now) for _ in requests]
    tasks = [
        asyncio.create_task(stream.follow(lane.engine.generate(request)))
        for stream, request in zip(streams, requests, strict=True)
    ]
    try:
        yield streams, tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _each_has(streams: Sequence[Stream], tasks: Tasks, num_tokens: int) -> None:
    """Wait until every stream has that many tokens. Raises what ended one before."""
    while any(stream.num_tokens < num_tokens for stream in streams):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(POLL_SECONDS)


def _times_within(streams: Sequence[Stream], begin: float, end: float) -> Iterator[float]:
    """The times between tokens of which some part lies in the stretch."""
    for stream in streams:
        yield from stream.inter_token_seconds(begin, end)


def _streams(tokenizer: Tokenizer, number: int, max_tokens: int, *, salt: str) -> list[Request]:
    prompts = [tokenizer.chat((ChatMessage(role="user", content=text),)) for text in CHAT]
    return [
        _request(f"stream-{index}", prompts[index % len(prompts)], max_tokens, salt)
        for index in range(number)
    ]


def _long_prompt(tokenizer: Tokenizer, num_tokens: int) -> tuple[int, ...]:
    """Exactly so many tokens of text."""
    text = "\n".join(COPY)
    token_ids = tokenizer.encode(text)
    return (token_ids * -(-num_tokens // len(token_ids)))[:num_tokens]


def _request(name: str, prompt: Sequence[int], max_tokens: int, salt: str) -> Request:
    return Request(
        request_id=f"{name}-{salt}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(seed=0, temperature=0.0),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        cache_salt=salt,
    )
