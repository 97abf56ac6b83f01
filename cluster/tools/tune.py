"""`drafthouse tune ngram`: a table of n-grams from the target's own answers, in seconds.

The answers are generated greedily, or read from a file. What the table would bring is measured
on answers it was not made of: the answers are dealt to FOLDS parts, and each part is decoded again
with drafts from the request's own text alone, and with a table of the other parts behind it.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cluster.config import (
    DrafthouseConfig,
    DType,
    NgramDrafterConfig,
    SpeculationConfig,
    TargetConfig,
)
from cluster.drafters.ngram import CONTEXT_OF_ANSWER, NgramDrafter
from cluster.drafters.table import NgramTable, build_table
from cluster.drafters.vocabulary import load_tokens, vocabulary_sha256
from cluster.engine.engine import Engine
from cluster.errors import ConfigurationError
from cluster.models.load import load_spec
from cluster.models.reference import resolve
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.bench.progress import Report
from cluster.tools.bench.workloads import Workload
from cluster.tools.generate import running_engine
from cluster.tools.replay import Answered, Yield, replay

FOLDS = 5
EVALUATED_K = (4, 8)
CONCURRENCY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """Whose answers, to what, and where the table goes."""

    target: str
    out: Path
    prompts: Workload | None = None
    answers: Path | None = None  # read instead of generated
    save_answers: Path | None = None
    num_prompts: int = 256
    max_prompt_tokens: int = 512
    max_tokens: int = 128
    dtype: DType = "int8"
    min_count: int = 1
    evaluate: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What drafts of at most K tokens bring, without and with a table of other answers."""

    num_speculative_tokens: int
    own_text: Yield
    with_table: Yield


@dataclass(frozen=True, slots=True)
class Tuned:
    """The table that was written, of what, and what to expect of it."""

    out: Path
    num_answers: int
    num_tokens: int
    num_entries: int
    evaluations: tuple[Evaluation, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "out": str(self.out),
            "num_answers": self.num_answers,
            "num_tokens": self.num_tokens,
            "num_entries": self.num_entries,
            "evaluations": [asdict(each) for each in self.evaluations],
        }

    def __rich__(self) -> Table:
        table = Table(
            title=f"{self.out}: {self.num_entries} n-grams of {self.num_tokens} tokens in "
            f"{self.num_answers} answers",
            title_justify="left",
        )
        for column in ("drafts from", "K", "accepted a step", "drafted a step"):
            table.add_column(column, justify="left" if column == "drafts from" else "right")
        for each in self.evaluations:
            for name, its in (("own text", each.own_text), ("and the table", each.with_table)):
                table.add_row(
                    name,
                    str(each.num_speculative_tokens),
                    f"{its.accepted_per_step:.2f}",
                    f"{its.drafted_per_step:.2f}",
                )
        return table


async def tune_ngram(plan: TunePlan, *, report: Report) -> Tuned:
    """Make the table and write it. Raises ConfigurationError."""
    answers = await _answers(plan, report)
    if not any(answered.answer_token_ids for answered in answers):
        raise ConfigurationError("no answers to make a table of")
    if plan.save_answers is not None:
        plan.save_answers.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in answers))
    vocabulary = vocabulary_sha256(load_tokens(resolve(plan.target)))
    table = _table(answers, vocabulary=vocabulary, min_count=plan.min_count)
    table.save(plan.out)
    numbers = EVALUATED_K if plan.evaluate else ()
    return Tuned(
        plan.out,
        len(answers),
        sum(len(answered.answer_token_ids) for answered in answers),
        len(table),
        tuple(evaluate(answers, k, min_count=plan.min_count) for k in numbers),
    )


def evaluate(
    answers: Sequence[Answered], num_speculative_tokens: int, *, min_count: int = 1
) -> Evaluation:
    """Decode every answer again, with a table of those of the other parts."""
    own_text = replay(NgramDrafter(), answers, num_speculative_tokens=num_speculative_tokens)
    with_table = Yield()
    for part in range(min(FOLDS, len(answers))):
        others = [each for place, each in enumerate(answers) if place % FOLDS != part]
        table = _table(others, vocabulary="", min_count=min_count)
        with_table += replay(
            NgramDrafter(table=table),
            answers[part::FOLDS],
            num_speculative_tokens=num_speculative_tokens,
        )
    return Evaluation(num_speculative_tokens, own_text, with_table)


def _table(answers: Iterable[Answered], *, vocabulary: str, min_count: int) -> NgramTable:
    """Of all answers, each with the end of its prompt before it."""
    texts = [
        [*answered.prompt_token_ids[-CONTEXT_OF_ANSWER:], *answered.answer_token_ids]
        for answered in answers
    ]
    return build_table(texts, vocabulary=vocabulary, min_count=min_count)


async def _answers(plan: TunePlan, report: Report) -> list[Answered]:
    if plan.answers is not None:
        return read_answers(plan.answers, plan.target)
    if plan.prompts is None:
        raise ConfigurationError("neither prompts nor answers to make a table of")
    tokenizer = load_tokenizer(resolve(plan.target))
    number = min(plan.num_prompts, len(plan.prompts.prompts))
    prompts = [
        prompt
        for prompt in plan.prompts.token_ids(tokenizer, number)
        if len(prompt) <= plan.max_prompt_tokens
    ]
    return await _generated(plan, prompts, report)


async def _generated(
    plan: TunePlan, prompts: Sequence[tuple[int, ...]], report: Report
) -> list[Answered]:
    """What the target answers greedily, some prompts at once."""
    longest = max(map(len, prompts), default=1) + plan.max_tokens
    limit = load_spec(resolve(plan.target)).max_position_embeddings
    config = DrafthouseConfig(
        name=plan.target,
        target=TargetConfig(
            model=plan.target,
            dtype=plan.dtype,
            max_model_len=min(longest + 1, limit),
            max_num_seqs=CONCURRENCY,
        ),
        drafter=NgramDrafterConfig(),
        speculation=SpeculationConfig(num_speculative_tokens=2),
    )
    gate, num_done = asyncio.Semaphore(CONCURRENCY), 0
    async with running_engine(config) as local:

        async def answer(place: int, prompt: tuple[int, ...]) -> Answered:
            nonlocal num_done
            async with gate:
                answered = await _answered(local.engine, place, prompt, plan.max_tokens)
            num_done += 1
            report("answers", num_done, len(prompts))
            return answered

        return list(await asyncio.gather(*(answer(*each) for each in enumerate(prompts))))


async def _answered(
    engine: Engine, place: int, prompt: tuple[int, ...], max_tokens: int
) -> Answered:
    request = Request(
        request_id=str(place),
        prompt_token_ids=prompt,
        sampling=SamplingParams(seed=0, temperature=0.0),
        stopping=StoppingParams(max_tokens=max_tokens),
    )
    token_ids: list[int] = []
    async for delta in engine.generate(request):
        token_ids += delta.token_ids
    return Answered(prompt, tuple(token_ids))


def read_answers(path: Path, target: str) -> list[Answered]:
    """Lines of {"answer_token_ids": [...], "prompt_token_ids": [...]}, or of {"text": ...}.

    The prompt may be left out. Raises ConfigurationError naming the line.
    """
    tokenizer = load_tokenizer(resolve(target))
    answers = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            answers.append(_parsed(json.loads(line), tokenizer))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path}: line {number} is no answer: {error!r}") from error
    return answers


def _parsed(data: dict[str, Any], tokenizer: Tokenizer) -> Answered:
    """One answer. Raises ValueError, KeyError, TypeError, AttributeError for anything else."""
    text = data.get("text")
    answer = data["answer_token_ids"] if text is None else tokenizer.encode(text)
    prompt = data.get("prompt_token_ids", ())
    if not all(type(token_id) is int and token_id >= 0 for token_id in (*prompt, *answer)):
        raise ValueError("a token id is no number from 0 on")
    return Answered(tuple(prompt), tuple(answer))
