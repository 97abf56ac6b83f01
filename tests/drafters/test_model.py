"""What a draft model drafts: with the target's own weights, the target's own tokens."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from cluster.drafters.contexts import DraftContexts
from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.model import DraftModel
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, DraftWanted, ExchangeInput, Resync, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.sampling.draw import sample
from tests.checkpoints import make_checkpoint

CONTEXT = 128
GREEDY = SamplingSpec(seed=0, temperature=0.0)
WARM = SamplingSpec(seed=11, temperature=0.8, top_p=0.95)
PROMPT = (5, 6, 7, 8, 9, 5, 6)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("draft"), vocab_size=300)
    return load_decoder(folder, dtype="float32")


def draft_model(decoder: Decoder, *, num_blocks: int = 8, **options: int) -> DraftModel:
    return DraftModel(decoder, num_blocks=num_blocks, **({"block_size": CONTEXT} | options))


def continuation(
    decoder: Decoder, token_ids: Sequence[int], sampling: SamplingSpec, num_tokens: int
) -> tuple[int, ...]:
    """What the decoder as a target generates, one token a step from a cache of its own."""
    cache = KVCache.of(decoder, num_blocks=1, block_size=CONTEXT)
    text = list(token_ids)
    start = 0
    with torch.inference_mode():
        for _ in range(num_tokens):
            rows = torch.tensor(text[start:])
            hidden = decoder.forward(rows, [Segment((0,), start, len(rows))], cache)
            start = len(text)
            text += sample(decoder.logits(hidden[-1:]), [sampling], [start])
    return tuple(text[len(token_ids) :])


def whole(
    seq_id: int, token_ids: Sequence[int], num_wanted: int, sampling: SamplingSpec = GREEDY
) -> DraftWanted:
    """A sequence of which the worker is told everything."""
    return DraftWanted(
        seq_id=seq_id,
        base_length=0,
        new_token_ids=tuple(token_ids),
        num_wanted=num_wanted,
        sampling=sampling,
    )


def ask(model: DraftModel, *wanted: DraftWanted, step_id: int = 1) -> dict[int, Draft | Resync]:
    """The drafts of one exchange."""
    message = ExchangeInput(engine_id="e", step_id=step_id, wanted=wanted)
    return model.exchange(message).drafts


def tokens(drafts: dict[int, Draft | Resync]) -> dict[int, tuple[int, ...]]:
    """Their tokens alone."""
    return {seq_id: draft.token_ids for seq_id, draft in drafts.items() if isinstance(draft, Draft)}


def query(
    seq_id: int, token_ids: list[int], num_wanted: int, sampling: SamplingSpec = GREEDY
) -> DraftQuery:
    return DraftQuery(seq_id=seq_id, token_ids=token_ids, num_wanted=num_wanted, sampling=sampling)


class CountingDecoder:
    """A decoder that notes the rows of every forward pass, and fails on demand."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.rows: list[int] = []
        self.failing = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)

    def forward(
        self, token_ids: torch.Tensor, segments: Sequence[Segment], cache: KVCache
    ) -> torch.Tensor:
        """The decoder's own, counted."""
        self.rows.append(len(token_ids))
        hidden = self._decoder.forward(token_ids, segments, cache)
        if self.failing:
            message = "the device is on fire"
            raise RuntimeError(message)
        return hidden


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("num_wanted", [1, 4, 16])
def test_the_targets_own_weights_draft_the_targets_own_tokens(
    decoder: Decoder, sampling: SamplingSpec, num_wanted: int
) -> None:
    """Coupled noise: with equal weights every draft is accepted, at any temperature, in company."""
    model, client = draft_model(decoder), ExchangeClient("e")
    random = Random(num_wanted)
    texts = {seq_id: [random.randrange(300) for _ in range(3 + seq_id)] for seq_id in range(3)}
    truths = {
        seq_id: continuation(decoder, prompt, sampling, 60) for seq_id, prompt in texts.items()
    }
    done = dict.fromkeys(texts, 0)
    for _ in range(3):
        queries = [query(seq_id, text, num_wanted, sampling) for seq_id, text in texts.items()]
        drafts = client.digest(model.exchange(client.message(queries)))
        for seq_id, text in texts.items():
            emitted = truths[seq_id][done[seq_id] : done[seq_id] + num_wanted + 1]
            assert drafts[seq_id].token_ids == emitted[:num_wanted]
            text.extend(emitted)  # all accepted, and the bonus token
            done[seq_id] += len(emitted)


def test_rejected_drafts_leave_no_trace(decoder: Decoder) -> None:
    """After a rejection anywhere in a draft the next one is what a fresh model would draft."""
    model, client = draft_model(decoder), ExchangeClient("e")
    random = Random(5)
    text = list(PROMPT)
    for _ in range(12):
        draft = client.digest(model.exchange(client.message([query(1, text, 5, WARM)])))[1]
        assert draft.token_ids == continuation(decoder, text, WARM, 5)
        text += draft.token_ids[: random.randrange(6)]
        text.append(random.randrange(300))  # the recovered token, seldom the drafted one


def test_a_step_computes_only_new_tokens(decoder: Decoder) -> None:
    """The common prefix keeps its keys and values: one batched forward a token, no re-reading."""
    counting = CountingDecoder(decoder)
    model, client = draft_model(counting), ExchangeClient("e")
    texts = {1: list(PROMPT), 2: list(PROMPT) * 2}
    for _ in range(2):
        counting.rows.clear()
        queries = [query(seq_id, text, 4) for seq_id, text in texts.items()]
        drafts = client.digest(model.exchange(client.message(queries)))
        for seq_id, text in texts.items():
            text += [*drafts[seq_id].token_ids, 9]
    # The last draft token and the bonus token of each are new; then three single rows each.
    assert counting.rows == [4, 2, 2, 2]


def test_a_long_context_is_taken_in_by_parts(decoder: Decoder) -> None:
    """One exchange computes at most max_rows of it, and others get their drafts meanwhile."""
    counting = CountingDecoder(decoder)
    model, client = draft_model(counting, max_rows=16), ExchangeClient("e")
    long, short = [token % 300 for token in range(7, 57)], list(PROMPT)
    lengths = []
    for _ in range(5):
        drafts = client.digest(
            model.exchange(client.message([query(1, long, 3), query(2, short, 3)]))
        )
        assert drafts[2].token_ids == continuation(decoder, short, GREEDY, 3)
        short += drafts[2].token_ids[:1]
        lengths.append(len(drafts[1].token_ids))
    assert lengths == [0, 0, 0, 3, 3]
    assert drafts[1].token_ids == continuation(decoder, long, GREEDY, 3)
    assert max(counting.rows) == 16


def test_context_limit_shortens_drafts(decoder: Decoder) -> None:
    """Context and draft together never pass the draft's context; a longer context gets none."""
    model = draft_model(decoder, block_size=16)
    assert model.context_limit == 16
    text = list(range(20, 40))
    lengths = []
    for step_id, length in enumerate((13, 14, 15, 16, 20, 13), start=1):
        draft = ask(model, whole(1, text[:length], 8), step_id=step_id)[1]
        assert isinstance(draft, Draft)
        lengths.append(len(draft.token_ids))
    assert lengths == [3, 2, 1, 0, 0, 3]


def test_the_models_own_context_limits_too(tmp_path: Path) -> None:
    """A block longer than the positions the model knows does not stretch them."""
    folder = make_checkpoint(tmp_path, vocab_size=64, max_position_embeddings=32)
    model = draft_model(load_decoder(folder, dtype="float32"))
    assert model.context_limit == 32


def test_a_lost_worker_comes_back_with_the_same_drafts(decoder: Decoder) -> None:
    """A new draft model asks for a resync, and then drafts what the old one would have."""
    client = ExchangeClient("e")
    text = list(PROMPT)
    client.digest(draft_model(decoder).exchange(client.message([query(1, text, 3)])))
    text.append(44)
    restarted = draft_model(decoder)
    message = client.message([query(1, text, 3)])
    answer = restarted.exchange(message)
    assert answer.drafts == {1: Resync()}
    assert client.digest(answer) == {}
    drafts = client.digest(restarted.exchange(client.message([query(1, text, 3)])))
    assert drafts[1].token_ids == continuation(decoder, text, GREEDY, 3)


def test_an_evicted_sequence_is_resynced_and_slots_do_not_mix(decoder: Decoder) -> None:
    """A slot that changed hands keeps nothing of the sequence it held."""
    model = draft_model(decoder, num_blocks=1)
    model._contexts = DraftContexts(1, patience=0)
    clients = {"a": ExchangeClient("a"), "b": ExchangeClient("b")}
    texts = {"a": list(PROMPT), "b": [3, 2, 1]}
    drafted = []
    for engine_id in ("a", "b", "a", "a", "b", "b"):
        text = texts[engine_id]
        message = clients[engine_id].message([query(1, text, 4)])
        draft = clients[engine_id].digest(model.exchange(message)).get(1)
        drafted.append(draft is not None)
        if draft is not None:
            assert draft.token_ids == continuation(decoder, text, GREEDY, 4)
            text += draft.token_ids[:2]
    assert drafted == [True, True, False, True, False, True]
    assert model.num_sequences == 1


def test_engines_with_the_same_sequence_ids_are_apart(decoder: Decoder) -> None:
    """Every engine gets drafts of its own sequence 1, and an end in one is none in the other."""
    model = draft_model(decoder)
    clients = {"a": ExchangeClient("a"), "b": ExchangeClient("b")}
    texts = {"a": list(PROMPT), "b": [30, 20, 10]}
    for engine_id in ("a", "b", "a", "b"):
        client, text = clients[engine_id], texts[engine_id]
        drafts = client.digest(model.exchange(client.message([query(1, text, 4)])))
        assert drafts[1].token_ids == continuation(decoder, text, GREEDY, 4)
        text += drafts[1].token_ids[:1]
    clients["a"].release([1])
    model.exchange(clients["a"].message([]))
    assert model.num_sequences == 1
    drafts = clients["b"].digest(model.exchange(clients["b"].message([query(1, texts["b"], 4)])))
    assert drafts[1].token_ids == continuation(decoder, texts["b"], GREEDY, 4)


def test_x15a_a_padding_id_in_the_context_gets_no_draft(decoder: Decoder) -> None:
    """A target with more padded rows may emit an id the draft has none for: no crash, no draft."""
    model = draft_model(decoder)
    drafts = ask(model, whole(1, (*PROMPT, 300), 4), whole(2, PROMPT, 4))
    assert tokens(drafts) == {1: (), 2: continuation(decoder, PROMPT, GREEDY, 4)}
    longer = DraftWanted(seq_id=1, base_length=8, new_token_ids=(4,), num_wanted=4, sampling=GREEDY)
    assert ask(model, longer, step_id=2) == {1: Draft()}


def test_x15a_drafts_stay_in_the_targets_vocabulary(decoder: Decoder) -> None:
    """A draft with more padded rows than the target never proposes one of them."""
    hot = SamplingSpec(seed=3, temperature=50.0)
    free = ask(draft_model(decoder), whole(1, PROMPT, 60, hot))[1]
    limited = ask(draft_model(decoder, vocab_size=100), whole(1, PROMPT, 60, hot))[1]
    assert isinstance(free, Draft)
    assert isinstance(limited, Draft)
    assert max(free.token_ids) >= 100
    assert len(limited.token_ids) == 60
    assert max(limited.token_ids) < 100


def test_suppressed_ids_are_not_drafted(decoder: Decoder) -> None:
    """min_tokens holds in drafts as in the target; ids the draft has no logit for are no error."""
    (likely, *_) = continuation(decoder, PROMPT, GREEDY, 1)
    spec = SamplingSpec(
        seed=0,
        temperature=0.0,
        suppressed_token_ids=(likely, 305),
        suppressed_before=len(PROMPT) + 1,
    )
    draft = ask(draft_model(decoder), whole(1, PROMPT, 3, spec))[1]
    assert isinstance(draft, Draft)
    assert len(draft.token_ids) == 3
    assert draft.token_ids[0] != likely


def test_a_failed_forward_pass_does_not_spoil_later_ones(decoder: Decoder) -> None:
    """What was not computed is not believed to be."""
    counting = CountingDecoder(decoder)
    model = draft_model(counting)
    counting.failing = True
    with pytest.raises(RuntimeError, match="on fire"):
        ask(model, whole(1, PROMPT, 4))
    counting.failing = False
    drafts = ask(model, whole(1, (9, *PROMPT), 4), step_id=2)
    assert tokens(drafts) == {1: continuation(decoder, (9, *PROMPT), GREEDY, 4)}


def test_a_repeated_message_gets_the_same_answer(decoder: Decoder) -> None:
    """Safe to repeat: a message that arrives twice changes nothing the second time."""
    model = draft_model(decoder)
    first = ask(model, whole(1, PROMPT, 4, WARM))
    assert ask(model, whole(1, PROMPT, 4, WARM)) == first


def test_nothing_wanted_computes_nothing(decoder: Decoder) -> None:
    """A message that only buries sequences costs no forward pass."""
    counting = CountingDecoder(decoder)
    model = draft_model(counting)
    assert ask(model) == {}
    assert ask(model, whole(1, (), 4), step_id=2) == {1: Draft()}
    assert counting.rows == []
