"""The target answers questions, and its hidden states are kept: what there is to learn from.

Answers are made by the engine that serves, many at once; the states are those it computed them
with. Every second answer to the target's own prompts is drawn at a temperature, the others and
those to given prompts are greedy.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from cluster.config import DrafthouseConfig, NoDrafterConfig, SpeculationConfig, TargetConfig
from cluster.control.cost import CostTable
from cluster.engine.engine import Engine
from cluster.models.hidden import HiddenRows, HiddenWanted
from cluster.models.load import load_spec
from cluster.models.reference import load_generation_defaults, resolve
from cluster.profiling.steps import profile_steps
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.bench.progress import Report
from cluster.tools.bench.workloads import encoded
from cluster.tools.generate import running_engine
from cluster.tools.training.corpus import Corpus, Example
from cluster.tools.training.plan import TrainPlan
from cluster.tools.training.questions import Question, Turn, user_turn
from cluster.worker import TargetWorker, ThreadTarget

SHARD_SECONDS = 20.0  # of answers that are lost when this process is killed
SHARD_EXAMPLES = 128
OWN_PROMPT_TOKENS = 96
LEAST_ANSWER_TOKENS = 2  # the first is no draft's
WARM = 0.8  # the temperature of answers that are not greedy


async def gather(
    plan: TrainPlan,
    questions: Iterable[Question],
    corpus: Corpus,
    *,
    layers: tuple[int, ...],
    seconds: float,
    report: Report,
) -> None:
    """Answer questions for so long, or until there are none left, and put them into the corpus.

    Kept are what goes into each of `layers`, and last what comes out of the last one. Questions
    whose numbers are there already are passed over, prompts that are too long too.
    """
    answered = corpus.numbers
    left = (each for each in questions if each.number not in answered)
    config = _config(plan)
    until = time.monotonic() + seconds
    async with running_engine(config) as local:
        worker, target = local.worker, local.target
        assert isinstance(worker, TargetWorker), "it was built in this process"
        assert isinstance(target, ThreadTarget), "so was its thread"
        num_layers = worker.decoder.spec.num_layers
        wanted = HiddenWanted(
            num_sequences=2 * plan.concurrency,
            num_rows=config.target.max_model_len,
            layers=(*layers, num_layers),
        )
        hidden = await target.call(lambda: worker.keep_hidden(wanted))
        asking = _Asking(
            plan, local.engine, _Rows(hidden, target), corpus, left, until=until, report=report
        )
        await asyncio.gather(*(asking.run() for _ in range(plan.concurrency)))
        asking.write()


async def step_costs(plan: TrainPlan, *, num_speculative_tokens: int) -> CostTable:
    """What the target's steps take on this machine, of one sequence."""
    config = _config(plan)
    async with running_engine(config) as local:
        worker, target = local.worker, local.target
        assert isinstance(target, ThreadTarget), "it was built in this process"
        return await target.call(
            lambda: profile_steps(
                worker,
                max_num_seqs=1,
                max_num_speculative_tokens=num_speculative_tokens,
                max_model_len=config.target.max_model_len,
            )
        )


class _Rows:
    """The hidden states of answers, from the thread that computes them."""

    def __init__(self, hidden: HiddenRows, target: ThreadTarget) -> None:
        self._hidden = hidden
        self._target = target

    async def take(self, token_ids: Sequence[int]) -> Tensor | None:
        """`[len(token_ids), width]`, float16, on the CPU; zeros for what was not computed."""
        rows = await self._target.call(partial(self._hidden.take, token_ids))
        if rows is None:
            return None
        missing = len(token_ids) - len(rows)
        return functional.pad(rows.to("cpu", torch.float16), (0, 0, 0, missing))


class _Asking:
    """Some tasks at once, each with one question after another."""

    def __init__(
        self,
        plan: TrainPlan,
        engine: Engine,
        rows: _Rows,
        corpus: Corpus,
        questions: Iterator[Question],
        *,
        until: float,
        report: Report,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._rows = rows
        self._corpus = corpus
        self._questions = questions
        self._until = until
        self._report = report
        folder = resolve(plan.target)
        self._tokenizer: Tokenizer = load_tokenizer(folder)
        self._turn: Turn | None = user_turn(self._tokenizer)
        self._eos = load_generation_defaults(folder).eos_token_ids
        self._began = time.monotonic()
        self._examples: list[Example] = []
        self._written_at = self._began

    async def run(self) -> None:
        """Until the time is over or nothing is left to ask."""
        for question in self._questions:
            cannot_write = question.prompt is None and self._turn is None
            if cannot_write or time.monotonic() >= self._until:
                return
            prompt = await self._prompt(question)
            if prompt is not None:
                await self._answer(question, prompt)
                now = time.monotonic()
                self._report(
                    "seconds of answers",
                    int(min(now, self._until) - self._began),
                    int(self._until - self._began),
                )
                if now - self._written_at > SHARD_SECONDS or len(self._examples) >= SHARD_EXAMPLES:
                    self.write()

    def write(self) -> None:
        """A shard of the examples since the last."""
        self._corpus.add(self._examples)
        self._examples = []
        self._written_at = time.monotonic()

    async def _prompt(self, question: Question) -> tuple[int, ...] | None:
        """Its tokens; None for one that is too long, or that the target did not bring to an end."""
        if question.prompt is not None:
            given = encoded(question.prompt, self._tokenizer)
            return given if len(given) <= self._plan.max_prompt_tokens else None
        if self._turn is None:
            return None
        before, after = self._turn.before, self._turn.after
        room = self._plan.max_prompt_tokens - len(before) - len(after)
        said = await self._generated(
            question, before, max_tokens=min(OWN_PROMPT_TOKENS, room), temperature=1.0
        )
        if not said or said[-1] not in self._eos:
            return None
        return (*before, *said[:-1], *after)

    async def _answer(self, question: Question, prompt: tuple[int, ...]) -> None:
        warm = question.prompt is None and question.number % 2
        answer = await self._generated(
            question,
            prompt,
            max_tokens=self._plan.max_tokens,
            temperature=WARM if warm else 0.0,
        )
        token_ids = (*prompt, *answer)
        rows = await self._rows.take(token_ids)
        if rows is None or len(answer) < LEAST_ANSWER_TOKENS:
            return
        example = Example(
            number=question.number,
            category=question.category,
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            hidden=rows,
        )
        self._examples.append(example)

    async def _generated(
        self, question: Question, prompt: tuple[int, ...], *, max_tokens: int, temperature: float
    ) -> tuple[int, ...]:
        request = Request(
            request_id=f"{question.number}-{len(prompt)}-{temperature}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                seed=self._plan.seed + question.number, temperature=temperature
            ),
            stopping=StoppingParams(max_tokens=max_tokens),
        )
        return tuple(
            [each async for delta in self._engine.generate(request) for each in delta.token_ids]
        )


def _config(plan: TrainPlan) -> DrafthouseConfig:
    """An engine without drafts or prefix cache: every row is computed, and kept."""
    limit = load_spec(resolve(plan.target)).max_position_embeddings
    return DrafthouseConfig(
        name=plan.target,
        target=TargetConfig(
            model=plan.target,
            dtype=plan.dtype,
            device=plan.device,
            max_model_len=min(plan.longest + 1, limit),
            max_num_seqs=plan.concurrency,
            prefix_cache=False,
        ),
        drafter=NoDrafterConfig(),
        speculation=SpeculationConfig(policy="fixed", num_speculative_tokens=0),
    )
