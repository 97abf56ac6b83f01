"""All benchmarks in one run, so that every ratio is of figures taken under the same conditions."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Group
from rich.table import Table

from cluster.config import DrafthouseConfig, NgramDrafterConfig, TargetConfig
from cluster.local import LocalEngine, in_passing_thread
from cluster.models.reference import resolve
from cluster.request import Request
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from cluster.tools.bench.decode import (
    Run,
    TransformersBaseline,
    greedy_request,
    run_engine,
    run_engine_decode,
)
from cluster.tools.bench.served import run_served, served
from cluster.tools.bench.steps import StepTime, measure_steps
from cluster.tools.bench.workloads import CHAT, COPY
from cluster.tools.generate import running_engine

ROUNDS = 3
NEW_TOKENS = 64
COPY_TOKENS = 128

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside the one it is compared with."""

    name: str
    run: Run
    baseline: Run

    @property
    def ratio(self) -> float:
        """Tokens per second over the baseline's."""
        return self.run.tokens_per_second / self.baseline.tokens_per_second


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured."""

    steps: list[StepTime]
    rows: list[Row]

    def as_json(self) -> dict[str, object]:
        """Plain data, seconds and tokens per second."""
        return {
            "steps": [
                {
                    "dtype": step.dtype,
                    "sequences": step.num_sequences,
                    "rows": step.num_rows,
                    "seconds": step.seconds,
                }
                for step in self.steps
            ],
            "rows": [
                {
                    "name": row.name,
                    "tokens_per_second": row.run.tokens_per_second,
                    "baseline_tokens_per_second": row.baseline.tokens_per_second,
                    "ratio": row.ratio,
                    "acceptance_length": row.run.acceptance_length,
                }
                for row in self.rows
            ],
        }

    def __rich__(self) -> Group:
        return Group(_steps_table(self.steps), _rows_table(self.rows))


def run_bench(target: str, *, progress: Progress) -> Report:
    """Run every benchmark on one target. Takes some minutes."""
    folder = resolve(target)
    measure = partial(measure_steps, target, folder, ("float32", "int8"), progress=progress)
    steps = asyncio.run(in_passing_thread(measure))
    return Report(steps, asyncio.run(_rows(target, folder, progress)))


async def _rows(target: str, folder: Path, progress: Progress) -> list[Row]:
    tokenizer = load_tokenizer(folder)
    chat, copy = _prompts(tokenizer, CHAT), _prompts(tokenizer, COPY)
    config = DrafthouseConfig(
        name=target, target=TargetConfig(model=target), drafter=NgramDrafterConfig()
    )
    requests = _requests(chat, max_tokens=NEW_TOKENS, speculate=True, ignore_eos=True)
    async with running_engine(config) as local:
        rows = [
            await _against_transformers(local, folder, chat[:1], progress),
            await _against_transformers(local, folder, chat, progress),
            await _against_off(local, "copy", copy, COPY_TOKENS, progress),
            await _against_off(local, "chat", chat, NEW_TOKENS, progress),
        ]
        progress("in process, 8 at once")
        before = await _rounds(lambda: run_engine(local, requests))
        progress("over gRPC, 8 at once")
        async with served(target, "ngram") as address:
            over_grpc = await _rounds(lambda: run_served(address, requests))
        after = await _rounds(lambda: run_engine(local, requests))
    return [*rows, Row("gRPC against in process, 8 at once", over_grpc, before + after)]


async def _against_transformers(
    local: LocalEngine, folder: Path, prompts: Sequence[Sequence[int]], progress: Progress
) -> Row:
    """The engine without drafts and transformers' generate in turn, first tokens not counted."""
    progress(f"against transformers, {len(prompts)} at once")
    baseline = await local.target.call(partial(TransformersBaseline, folder))
    requests = _requests(prompts, max_tokens=NEW_TOKENS, speculate=False, ignore_eos=True)
    await run_engine_decode(local, requests)
    ours = theirs = Run(0, 0.0)
    for _ in range(ROUNDS):
        ours += await run_engine_decode(local, requests)
        decode = partial(baseline.run_decode, prompts, max_tokens=NEW_TOKENS)
        theirs += await local.target.call(decode)
    return Row(f"decode against transformers, {len(prompts)} at once", ours, theirs)


async def _against_off(
    local: LocalEngine,
    name: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Progress,
) -> Row:
    """Speculation on and off in turn, one prompt at a time, to the natural end."""
    progress(f"n-gram against off, {name}")
    runs = {True: Run(0, 0.0), False: Run(0, 0.0)}
    for _ in range(ROUNDS):
        for prompt in prompts:
            for speculate in runs:
                requests = _requests(
                    [prompt], max_tokens=max_tokens, speculate=speculate, ignore_eos=False
                )
                runs[speculate] += await run_engine(local, requests)
    return Row(f"n-gram against off, {name}, one at a time", runs[True], runs[False])


async def _rounds(run: Callable[[], Awaitable[Run]]) -> Run:
    """The sum of ROUNDS runs after one that does not count."""
    await run()
    total = Run(0, 0.0)
    for _ in range(ROUNDS):
        total += await run()
    return total


def _prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [tokenizer.chat((ChatMessage(role="user", content=text),)) for text in texts]


def _requests(
    prompts: Sequence[Sequence[int]], *, max_tokens: int, speculate: bool, ignore_eos: bool
) -> list[Request]:
    return [
        greedy_request(
            f"bench-{number}",
            prompt,
            max_tokens=max_tokens,
            speculate=speculate,
            ignore_eos=ignore_eos,
        )
        for number, prompt in enumerate(prompts)
    ]


def _steps_table(steps: Sequence[StepTime]) -> Table:
    table = Table(title="Seconds of one target step", title_justify="left")
    for heading in ("weights", "sequences", "rows each", "ms", "against one row"):
        table.add_column(heading, justify="right")
    single = {
        step.dtype: step.seconds for step in steps if (step.num_sequences, step.num_rows) == (1, 1)
    }
    for step in steps:
        table.add_row(
            step.dtype,
            str(step.num_sequences),
            str(step.num_rows),
            f"{step.seconds * 1000:.1f}",
            f"{step.seconds / single[step.dtype]:.2f}x",
        )
    return table


def _rows_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Tokens per second, greedy", title_justify="left")
    for heading in ("what", "tokens/s", "baseline", "ratio", "tokens a step"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.run.tokens_per_second:.1f}",
            f"{row.baseline.tokens_per_second:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.run.acceptance_length:.2f}",
        )
    return table
