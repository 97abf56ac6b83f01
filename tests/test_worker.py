"""The worker: whatever the schedule and the drafts, the tokens and logprobs of plain decoding."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import (
    SamplingSpec,
    SequenceRows,
    SequenceTokens,
    StepInput,
    StepOutput,
    TopLogprobs,
)
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.request import Grammar
from cluster.worker import TargetWorker

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 512
BLOCK_SIZE = 16
NUM_BLOCKS = 40
NUM_NEW = 20
GREEDY = SamplingSpec(seed=1, temperature=0.0)
SEEDED = SamplingSpec(seed=2, temperature=0.9, top_p=0.95)
PLAIN = SamplingSpec(seed=3, temperature=1.2)
PENALISED = SamplingSpec(
    seed=4,
    temperature=0.9,
    repetition_penalty=1.2,
    frequency_penalty=1.5,
    logit_bias=((7, 3.0),),
    banned_token_ids=(3,),
    min_p=0.01,
    num_prompt_tokens=1,
)


@cache
def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_decoder(folder, dtype=dtype)


@pytest.fixture(params=["float32", "int8"])
def decoder(checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Decoder:
    return load(checkpoints["target"], request.param)


@pytest.fixture
def worker(decoder: Decoder) -> TargetWorker:
    return TargetWorker(decoder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@dataclass
class Answer:
    """One sequence as an engine would hold it: what is computed and what is known."""

    prompt: Sequence[int]
    sampling: SamplingSpec
    block_table: tuple[int, ...] = (5, 0, 9, 3, 7)
    num_computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    grammar: Grammar | None = None

    def rows(
        self, *, chunk: int = 10_000, drafts: Sequence[int] = (), seq_id: int = 0
    ) -> SequenceRows:
        """Up to `chunk` uncomputed tokens, and drafts if these are all."""
        known = [*self.prompt, *self.token_ids]
        token_ids = known[self.num_computed : self.num_computed + chunk]
        last = self.num_computed + len(token_ids) == len(known)
        drafts = drafts if last and self.token_ids else ()
        looks_back = self.sampling.needs_history or self.grammar is not None
        return SequenceRows(
            seq_id=seq_id,
            block_table=self.block_table,
            start=self.num_computed,
            token_ids=(*token_ids, *drafts),
            num_drafts=len(drafts),
            sampling=self.sampling if last else None,
            grammar=self.grammar,
            history_token_ids=tuple(known[: self.num_computed]) if looks_back else (),
            logprobs=True,
            top_logprobs=3,
        )

    def commit(self, rows: SequenceRows, tokens: SequenceTokens | None) -> None:
        """Take in a step's result; rejected positions are simply computed again."""
        self.num_computed += len(rows.token_ids) - rows.num_drafts
        if tokens is not None:
            assert len(tokens.token_ids) == len(tokens.logprobs) == tokens.num_accepted + 1
            assert len(tokens.token_ids) == len(tokens.top_logprobs)
            self.num_computed += tokens.num_accepted
            self.token_ids += tokens.token_ids
            self.logprobs += tokens.logprobs
            self.top += tokens.top_logprobs


def step(worker: TargetWorker, answers: Sequence[Answer], rows: Sequence[SequenceRows]) -> None:
    """One step over several answers, committed."""
    output = worker.step(StepInput(step_id=4, sequences=tuple(rows)))
    assert output.step_id == 4
    by_id = {tokens.seq_id: tokens for tokens in output.sequences}
    assert list(by_id) == [part.seq_id for part in rows if part.sampling is not None]
    for answer, part in zip(answers, rows, strict=True):
        answer.commit(part, by_id.get(part.seq_id))


@cache
def plain(decoder: Decoder, prompt: tuple[int, ...], sampling: SamplingSpec) -> Answer:
    """The answer decoded alone, one token a step, the prompt in one go."""
    worker = TargetWorker(decoder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    answer = Answer(prompt, sampling)
    while len(answer.token_ids) < NUM_NEW:
        step(worker, [answer], [answer.rows()])
    return answer


def prompt_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def guesses(kind: str, truth: Sequence[int], done: int, k: int, rng: random.Random) -> list[int]:
    """So many drafts after `done` tokens: all true, all random, or true up to somewhere."""
    true = [*truth[done : done + k], *rng.choices(range(VOCAB), k=k)][:k]
    num_true = {"true": k, "random": 0, "partial": rng.randrange(k + 1)}[kind]
    return [*true[:num_true], *rng.choices(range(VOCAB), k=k - num_true)]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PLAIN], ids=["greedy", "top_p", "plain"])
@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_x01_x22_drafts_never_change_a_token_or_a_logprob_bit(
    decoder: Decoder, worker: TargetWorker, k: int, sampling: SamplingSpec
) -> None:
    """True, random and half-true drafts of any length give what plain decoding gives."""
    expected = plain(decoder, prompt_of(30), sampling)
    for kind in ("true", "random", "partial"):
        rng = random.Random(k)
        answer = Answer(prompt_of(30), sampling)
        steps = 0
        while len(answer.token_ids) < NUM_NEW:
            drafts = guesses(kind, expected.token_ids, len(answer.token_ids), k, rng)
            step(worker, [answer], [answer.rows(drafts=drafts)])
            steps += 1
        assert answer.token_ids[:NUM_NEW] == expected.token_ids
        assert answer.logprobs[:NUM_NEW] == expected.logprobs
        assert kind != "true" or steps == 1 + -(-(NUM_NEW - 1) // (k + 1))


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_x07_x09_any_mix_in_a_step_gives_each_sequence_its_own_answer(
    checkpoints: dict[str, Path], seed: int
) -> None:
    """Prompt chunks, decodes and verified rows share steps in any way, and nobody notices."""
    rng = random.Random(seed)
    decoder = load(checkpoints["target"])
    mixed = TargetWorker(decoder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    expected, answers = [], []
    for index, sampling in enumerate([GREEDY, SEEDED, PLAIN, PENALISED, PENALISED]):
        prompt = prompt_of(rng.choice([1, 2, 15, 16, 17, 40]), seed=seed + index)
        expected.append(plain(decoder, prompt, sampling))
        answers.append(Answer(prompt, sampling, tuple(blocks[5 * index : 5 * index + 5])))
    while waiting := [i for i, answer in enumerate(answers) if len(answer.token_ids) < NUM_NEW]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        rows = []
        for index in chosen:
            truth, done = expected[index].token_ids, len(answers[index].token_ids)
            k = min(rng.choice([0, 0, 1, 2, 5]), NUM_NEW - done - 1)
            drafts = guesses("partial", truth, done, k, rng)
            chunk = rng.choice([1, 2, 7, 64])
            rows.append(answers[index].rows(chunk=chunk, drafts=drafts, seq_id=index))
        step(mixed, [answers[index] for index in chosen], rows)
    for answer, alone in zip(answers, expected, strict=True):
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == alone.logprobs
        assert answer.top == alone.top


def test_an_answer_is_greedy_and_its_logprobs_are_the_softmax(
    checkpoints: dict[str, Path],
) -> None:
    """Tokens and logprobs are those of the decoder's own logits over the whole text."""
    decoder = load(checkpoints["target"])
    answer = plain(decoder, prompt_of(9), GREEDY)
    text = [*prompt_of(9), *answer.token_ids]
    cache = KVCache.of(decoder, num_blocks=5, block_size=16)
    hidden = decoder.forward(torch.tensor(text), [Segment((0, 1, 2, 3, 4), 0, len(text))], cache)
    log_probs = decoder.logits(hidden)[8:-1].log_softmax(-1)
    assert answer.token_ids == log_probs.argmax(-1).tolist()
    assert answer.logprobs == pytest.approx(log_probs.amax(-1).tolist(), abs=1e-5)


def test_suppressed_ids_wait_for_their_position(checkpoints: dict[str, Path]) -> None:
    """min_tokens holds at every verified row: drafts of the forbidden id are not accepted."""
    decoder = load(checkpoints["target"])
    worker = TargetWorker(decoder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    favourite = plain(decoder, prompt_of(9), GREEDY).token_ids[0]
    suppressing = SamplingSpec(
        seed=0, temperature=0.0, suppressed_token_ids=(favourite,), suppressed_before=9 + 6
    )
    answer = Answer(prompt_of(9), suppressing)
    step(worker, [answer], [answer.rows()])
    step(worker, [answer], [answer.rows(drafts=[favourite] * 4)])
    assert len(answer.token_ids) == 2
    while len(answer.token_ids) < NUM_NEW:
        step(worker, [answer], [answer.rows(drafts=[1, 2, 3])])
    assert favourite not in answer.token_ids[:6]
    assert answer.token_ids[:NUM_NEW] == plain(decoder, prompt_of(9), suppressing).token_ids


class Spy:
    """A decoder that notes how many rows go through its head, and may disturb its rows."""

    def __init__(
        self, decoder: Decoder, disturb: Callable[[Sequence[Segment]], float] = lambda _: 0.0
    ) -> None:
        self.spec, self.device, self.dtype = decoder.spec, decoder.device, decoder.dtype
        self.head_rows: list[int] = []
        self._decoder = decoder
        self._disturb = disturb

    def forward(
        self, token_ids: torch.Tensor, segments: Sequence[Segment], cache: KVCache
    ) -> torch.Tensor:
        """The decoder's own, disturbed."""
        return self._decoder.forward(token_ids, segments, cache) + self._disturb(segments)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The decoder's own."""
        self.head_rows.append(hidden.shape[0])
        return self._decoder.logits(hidden)

    def largest(self, hidden: torch.Tensor) -> list[int] | None:
        """Nothing: all goes through the head."""
        del hidden


def test_only_sampled_rows_go_through_the_head(checkpoints: dict[str, Path]) -> None:
    """A prompt's rows but the last cost no vocabulary, and a chunk that is not the last none."""
    spy = Spy(load(checkpoints["target"]))
    worker = TargetWorker(spy, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # type: ignore[arg-type]
    first, second = Answer(prompt_of(20), GREEDY), Answer(prompt_of(30), SEEDED, (1, 2, 4))
    step(worker, [first], [first.rows(chunk=8)])
    assert spy.head_rows == []
    step(worker, [first, second], [first.rows(), second.rows(chunk=8, seq_id=1)])
    assert spy.head_rows == [1]
    step(worker, [first, second], [first.rows(drafts=[1, 2, 3]), second.rows(seq_id=1)])
    assert spy.head_rows == [1, 5]


def test_a_step_of_nothing_computes_nothing(checkpoints: dict[str, Path]) -> None:
    """An empty step is answered, not run."""
    spy = Spy(load(checkpoints["target"]), disturb=lambda _: 1 / 0)
    worker = TargetWorker(spy, num_blocks=1, block_size=16)  # type: ignore[arg-type]
    assert worker.step(StepInput(9, ())) == StepOutput(9, ())


def test_drafts_without_a_row_before_them_are_refused(worker: TargetWorker) -> None:
    """Otherwise the rows of another sequence would be verified in their place."""
    rows = SequenceRows(
        seq_id=6, block_table=(0,), start=3, token_ids=(1, 2), num_drafts=2, sampling=GREEDY
    )
    with pytest.raises(ValueError, match="sequence 6: 2 drafts in 2 rows"):
        worker.step(StepInput(1, (rows,)))
