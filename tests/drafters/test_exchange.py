"""The exchange protocol: client and worker over a channel that loses, repeats and reorders."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.drafters.contexts import STALE_SECONDS, DraftContext, DraftContexts, TailToken
from cluster.drafters.exchange import ExchangeClient
from cluster.interfaces import DraftQuery
from cluster.messages import (
    Draft,
    DraftWanted,
    ExchangeInput,
    ExchangeOutput,
    Resync,
    Rule,
    SamplingSpec,
)

GREEDY = SamplingSpec(seed=0, temperature=0.0)


def query(seq_id: int, token_ids: list[int], num_wanted: int = 1) -> DraftQuery:
    return DraftQuery(seq_id=seq_id, token_ids=token_ids, num_wanted=num_wanted, sampling=GREEDY)


def wanted(seq_id: int, base_length: int, *new_token_ids: int) -> DraftWanted:
    return DraftWanted(
        seq_id=seq_id,
        base_length=base_length,
        new_token_ids=new_token_ids,
        num_wanted=1,
        sampling=GREEDY,
    )


def fingerprint(token_ids: list[int]) -> int:
    """A draft that gives away on which context it was made."""
    return hash(tuple(token_ids))


def answer_to(contexts: DraftContexts, message: ExchangeInput) -> ExchangeOutput:
    """A draft worker without a model: its draft is the fingerprint of the context it holds."""
    drafts: dict[int, Draft | Resync] = {
        seq_id: Resync() if context is None else Draft((fingerprint(context.token_ids),))
        for seq_id, context in contexts.receive(message).items()
    }
    return ExchangeOutput(message.step_id, drafts)


class TestClient:
    """What the engine's side sends and believes."""

    def test_first_message_is_whole_later_ones_are_deltas(self) -> None:
        """Once acknowledged, a token is not sent again."""
        client, contexts = ExchangeClient("e"), DraftContexts(4)
        token_ids = [1, 2, 3]
        first = client.message([query(7, token_ids)])
        assert (first.wanted[0].base_length, first.wanted[0].new_token_ids) == (0, (1, 2, 3))
        client.digest(answer_to(contexts, first))
        token_ids += [4, 5]
        second = client.message([query(7, token_ids)])
        assert (second.wanted[0].base_length, second.wanted[0].new_token_ids) == (3, (4, 5))

    def test_a_lost_answer_repeats_the_tokens(self) -> None:
        """Without an answer the worker is not known to hold anything new."""
        client, contexts = ExchangeClient("e"), DraftContexts(4)
        token_ids = [1, 2, 3]
        answer_to(contexts, client.message([query(7, token_ids)]))
        token_ids.append(4)
        again = client.message([query(7, token_ids)])
        assert again.wanted[0].base_length == 0
        assert client.digest(answer_to(contexts, again)) == {7: Draft((fingerprint(token_ids),))}

    def test_late_and_repeated_answers_bring_nothing(self) -> None:
        """An answer counts once, and only for the outstanding message."""
        client, contexts = ExchangeClient("e"), DraftContexts(4)
        late = answer_to(contexts, client.message([query(7, [1])]))
        current = answer_to(contexts, client.message([query(7, [1, 2])]))
        assert client.digest(late) == {}
        assert client.digest(current) == {7: Draft((fingerprint([1, 2]),))}
        assert client.digest(current) == {}
        assert client.message([query(7, [1, 2])]).wanted[0].base_length == 2

    def test_resync_sends_the_whole_context_once(self) -> None:
        """A worker that lost a sequence gets it back with the next message."""
        client = ExchangeClient("e")
        client.digest(answer_to(DraftContexts(4), client.message([query(7, [1, 2])])))
        restarted = DraftContexts(4)
        assert client.digest(answer_to(restarted, client.message([query(7, [1, 2, 3])]))) == {}
        whole = client.message([query(7, [1, 2, 3, 4])])
        assert whole.wanted[0].base_length == 0
        client.digest(answer_to(restarted, whole))
        assert client.message([query(7, [1, 2, 3, 4, 5])]).wanted[0].base_length == 4

    def test_finished_ids_ride_along_until_confirmed(self) -> None:
        """The worker is told of an end until an answer shows that it heard."""
        client, contexts = ExchangeClient("e"), DraftContexts(4)
        client.digest(answer_to(contexts, client.message([query(7, [1]), query(8, [2])])))
        client.release([7])
        assert client.message([query(8, [2, 3])]).finished == (7,)  # lost
        client.digest(answer_to(contexts, client.message([query(8, [2, 3, 4])])))
        assert client.message([query(8, [2, 3, 4, 5])]).finished == ()
        assert len(contexts) == 1

    def test_an_end_during_an_exchange_leaves_nothing(self) -> None:
        """The answer to a message of which a sequence has ended since does not revive it."""
        client, contexts = ExchangeClient("e"), DraftContexts(4)
        message = client.message([query(7, [1])])
        client.release([7])
        assert client.digest(answer_to(contexts, message)) == {}
        client.digest(answer_to(contexts, client.message([])))
        assert (client.num_followed, len(contexts)) == (0, 0)

    def test_sequences_the_worker_never_heard_of_are_not_buried(self) -> None:
        """Releasing a sequence that was never drafted for costs no message."""
        client = ExchangeClient("e")
        client.release([7])
        assert client.num_unconfirmed == 0

    def test_a_reused_id_starts_anew(self) -> None:
        """The same id for another sequence is a new context, not an extension."""
        client, contexts = ExchangeClient("e"), DraftContexts(4)
        client.digest(answer_to(contexts, client.message([query(7, [1, 2, 3])])))
        client.release([7])
        drafts = client.digest(answer_to(contexts, client.message([query(7, [8, 9])])))
        assert drafts == {7: Draft((fingerprint([8, 9]),))}

    def test_a_replaced_worker_is_sent_everything(self) -> None:
        """Nothing the old worker held or owed is believed of the new one."""
        client = ExchangeClient("e")
        owed = answer_to(DraftContexts(4), client.message([query(7, [1])]))
        client.forget_all()
        assert client.digest(owed) == {}
        assert client.message([query(7, [1, 2])]).wanted[0].base_length == 0

    def test_a_new_client_of_a_known_engine_is_heard(self) -> None:
        """An engine that lost sight of a worker and found it again is not taken for old news."""
        contexts = DraftContexts(4)
        former = ExchangeClient("e")
        for _ in range(5):
            former.digest(answer_to(contexts, former.message([query(7, [1])])))
        client = ExchangeClient("e")
        drafts = client.digest(answer_to(contexts, client.message([query(7, [2])])))
        assert drafts == {7: Draft((fingerprint([2]),))}

    def test_a_full_worker_is_left_alone_for_a_while(self) -> None:
        """A sequence that found no slot is not sent whole at every step."""
        client, contexts = ExchangeClient("e", refusal_messages=3), DraftContexts(1)
        queries = [query(7, [1]), query(8, [2])]
        asked = []
        for _ in range(6):
            message = client.message(queries)
            asked.append([part.seq_id for part in message.wanted])
            client.digest(answer_to(contexts, message))
        assert asked == [[7, 8], [7], [7], [7], [7, 8], [7]]

    def test_nothing_wanted_is_not_sent(self) -> None:
        """A query for no tokens does not cross the wire."""
        assert ExchangeClient("e").message([query(7, [1], num_wanted=0)]).wanted == ()


class TestContexts:
    """What the worker's side holds."""

    def test_a_base_that_is_not_held_is_answered_with_none(self) -> None:
        """Never guess at tokens that were not received."""
        contexts = DraftContexts(4)
        contexts.receive(ExchangeInput(engine_id="e", step_id=1, wanted=(wanted(7, 0, 1, 2),)))
        message = ExchangeInput(
            engine_id="e", step_id=2, wanted=(wanted(7, 3, 4), wanted(8, 1, 2), wanted(9, 0, 3))
        )
        held = contexts.receive(message)
        assert [held[seq_id] is None for seq_id in (7, 8, 9)] == [True, True, False]

    def test_a_message_that_was_overtaken_changes_nothing(self) -> None:
        """Old news cannot bring an ended sequence back or shorten a running one."""
        contexts = DraftContexts(4)
        old = ExchangeInput(engine_id="e", step_id=1, wanted=(wanted(7, 0, 1),))
        contexts.receive(ExchangeInput(engine_id="e", step_id=2, wanted=(), finished=(7,)))
        assert contexts.receive(old) == {7: None}
        assert len(contexts) == 0

    def test_the_longest_unused_is_evicted(self) -> None:
        """Memory is bounded, and who was asked for last stays."""
        contexts = DraftContexts(2, patience=0)
        for step_id, seq_id in enumerate([1, 2, 1, 3], start=1):
            message = ExchangeInput(
                engine_id="e", step_id=step_id, wanted=(wanted(seq_id, 0, seq_id),)
            )
            assert contexts.receive(message)[seq_id] is not None
        message = ExchangeInput(engine_id="e", step_id=5, wanted=(wanted(1, 1), wanted(2, 1)))
        held = contexts.receive(message)
        assert (held[1] is None, held[2] is None) == (False, True)
        assert contexts.num_free_slots == 0

    def test_engines_that_do_not_fit_together_do_not_evict_each_other(self) -> None:
        """Active sequences keep their slots; the ones that do not fit wait their turn."""
        contexts = DraftContexts(3, patience=4)
        for step_id in range(1, 50):
            for engine_id in ("a", "b"):
                parts = (wanted(1, 0, 5), wanted(2, 0, 5))
                held = contexts.receive(
                    ExchangeInput(engine_id=engine_id, step_id=step_id, wanted=parts)
                )
                assert [held[1] is None, held[2] is None] == [False, engine_id == "b"]

    def test_sequences_of_a_silent_engine_give_way(self) -> None:
        """An engine that died cannot hold its slots for ever."""
        contexts = DraftContexts(1, patience=4)
        contexts.receive(ExchangeInput(engine_id="dead", step_id=9, wanted=(wanted(1, 0, 5),)))
        admitted = [
            contexts.receive(
                ExchangeInput(engine_id="e", step_id=step_id, wanted=(wanted(1, 0, 5),))
            )[1]
            is not None
            for step_id in range(1, 8)
        ]
        assert admitted == [False, False, False, False, True, True, True]

    def test_what_nobody_asks_for_is_forgotten_in_the_end(self) -> None:
        """An engine that died leaves nothing behind; one that asks again sends its text again."""
        now = 0.0
        contexts = DraftContexts(4, clock=lambda: now)
        for engine_id in ("dead", "e"):
            contexts.receive(
                ExchangeInput(engine_id=engine_id, step_id=1, wanted=(wanted(1, 0, 5),))
            )
        now = STALE_SECONDS - 1
        contexts.receive(ExchangeInput(engine_id="e", step_id=2, wanted=(wanted(1, 1, 6),)))
        contexts.drop_stale()
        assert len(contexts) == 2
        now = STALE_SECONDS + 1
        contexts.drop_stale()
        assert len(contexts) == 1
        assert contexts.num_free_slots == 3
        late = ExchangeInput(engine_id="dead", step_id=2, wanted=(wanted(1, 1, 6),))
        assert contexts.receive(late) == {1: None}
        now = 3 * STALE_SECONDS
        contexts.drop_stale()
        assert contexts.num_free_slots == 4

    def test_engines_with_the_same_ids_are_apart(self) -> None:
        """Sequence ids are an engine's own, and so are its step ids."""
        contexts = DraftContexts(4)
        for engine_id, step_id, token_id in (("a", 9, 1), ("b", 1, 2)):
            contexts.receive(
                ExchangeInput(
                    engine_id=engine_id, step_id=step_id, wanted=(wanted(7, 0, token_id),)
                )
            )
        message = ExchangeInput(engine_id="a", step_id=10, wanted=(wanted(7, 1),))
        held = contexts.receive(message)[7]
        assert held is not None
        assert held.token_ids == [1]

    def test_a_commit_keeps_what_was_computed_on_its_tokens(self) -> None:
        """KV of accepted drafts stays, of rejected ones goes; one row is left to draw from."""
        context = DraftContext(0, token_ids=[1, 2, 3], num_computed=2)
        for token_id in (4, 5, 6):
            context.append(TailToken(token_id, 0.0))
        assert (context.num_tokens, context.num_computed) == (6, 5)
        grade = context.commit(3, [4, 9])  # 4 was drafted, 9 was not
        assert (grade.num_right, grade.num_known) == (1, 2)
        assert (context.token_ids, context.tail) == ([1, 2, 3, 4, 9], [])
        assert context.num_computed == 4
        context.commit(0, [1, 8])
        assert (context.token_ids, context.num_computed) == ([1, 8], 1)
        context.commit(0, [1])
        assert (context.token_ids, context.num_computed) == ([1], 0)

    def test_a_confirmed_tail_stays(self) -> None:
        """What follows the tokens that were right is the next draft, computed already."""
        context = DraftContext(0, token_ids=[1, 2], num_computed=1)
        for token_id in (3, 4, 5, 6):
            context.append(TailToken(token_id, 1.0))
        grade = context.commit(2, [3, 4, 5])
        assert (grade.num_right, grade.num_known) == (3, 3)
        assert context.token_ids == [1, 2, 3, 4, 5]
        assert [drawn.token_id for drawn in context.tail] == [6]
        assert context.num_uncomputed == 1
        grade = context.commit(5, [])
        assert (grade.num_right, grade.num_known) == (0, 0)
        grade = context.commit(5, [6, 7])  # all, and a token nobody had drafted
        assert (grade.num_right, grade.num_known) == (1, 1)
        assert (context.tail, context.num_uncomputed) == ([], 2)

    def test_committed_tokens_are_never_taken_for_drafts(self) -> None:
        """A context that becomes shorter has no tail, though its old text would go on."""
        context = DraftContext(0, token_ids=[1, 2, 3, 4], num_computed=3)
        context.append(TailToken(5, 1.0))
        grade = context.commit(0, [1, 2, 3])
        assert (grade.num_right, grade.num_known) == (0, 0)
        assert (context.token_ids, context.tail, context.num_computed) == ([1, 2, 3], [], 2)

    def test_another_sampling_or_rule_is_another_tail(self) -> None:
        """A tail is as true as the way it was drawn in."""
        for sampling, rule in ((SamplingSpec(seed=9), Rule.COUPLED), (GREEDY, Rule.RATIO)):
            context = DraftContext(0, token_ids=[1, 2], num_computed=1)
            context.follow(GREEDY, Rule.COUPLED)
            context.append(TailToken(3, 1.0))
            context.follow(GREEDY, Rule.COUPLED)
            assert len(context.tail) == 1
            context.follow(sampling, rule)
            assert (context.tail, context.num_computed) == ([], 1)


@dataclass
class Channel:
    """Carries messages and answers, any of which it may lose, repeat, delay and reorder."""

    random: Random
    badness: float
    in_flight: list[object] = field(default_factory=list)

    def send(self, item: object) -> None:
        """Put an item under way: no, one or two times."""
        if self.random.random() >= self.badness:
            self.in_flight.append(item)
        if self.random.random() < self.badness:
            self.in_flight.append(item)

    def arrivals(self) -> list[object]:
        """What arrives now, in any order; the rest stays under way."""
        if self.random.random() < self.badness:
            self.random.shuffle(self.in_flight)
        count = len(self.in_flight)
        if self.random.random() < self.badness:
            count = self.random.randint(0, count)
        arrived, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        return arrived


class World:
    """Two engines with their sequences, one draft worker, and channels between them."""

    def __init__(self, *, seed: int, badness: float, num_slots: int) -> None:
        self.random = Random(seed)
        self.num_slots = num_slots
        self.contexts = self.new_worker()
        self.clients = {
            engine_id: ExchangeClient(engine_id, refusal_messages=2) for engine_id in ("a", "b")
        }
        self.running: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}}
        self.next_seq_id = 0
        self.to_worker = Channel(self.random, badness)
        self.to_engine = Channel(self.random, badness)

    def new_worker(self) -> DraftContexts:
        """A worker that holds nothing."""
        return DraftContexts(self.num_slots, patience=2)

    def replace_worker(self, *, noticed: bool) -> None:
        """The worker dies, and what was on its way to it with it; the engines may not notice."""
        self.contexts = self.new_worker()
        self.to_worker.in_flight.clear()
        if noticed:
            for client in self.clients.values():
                client.forget_all()

    def heal(self) -> None:
        """From here on everything arrives, once and in order."""
        self.to_worker, self.to_engine = Channel(self.random, 0.0), Channel(self.random, 0.0)

    def grow(self) -> None:
        """Every sequence commits one to three tokens."""
        for sequences in self.running.values():
            for token_ids in sequences.values():
                token_ids.extend(self.tokens(3))

    def end_all(self) -> None:
        """Every sequence ends."""
        for engine_id, sequences in self.running.items():
            self.clients[engine_id].release(list(sequences))
            sequences.clear()

    def live(self) -> None:
        """Sequences start, grow and end; ids are sometimes used again."""
        self.grow()
        for engine_id, sequences in self.running.items():
            if self.random.random() < 0.4 and len(sequences) < 4:
                self.next_seq_id += 1
                seq_id = self.next_seq_id if self.random.random() < 0.7 else 0
                if seq_id not in sequences:
                    sequences[seq_id] = self.tokens(5)
            if sequences and self.random.random() < 0.2:
                seq_id = self.random.choice(list(sequences))
                del sequences[seq_id]
                self.clients[engine_id].release([seq_id])

    def tokens(self, at_most: int) -> list[int]:
        """A few tokens of a vocabulary of four."""
        return [self.random.randrange(4) for _ in range(self.random.randint(1, at_most))]

    def exchange(self) -> dict[str, set[int]]:
        """One step of both engines; returns whose drafts came back, checked to be true."""
        for engine_id, sequences in self.running.items():
            queries = [query(seq_id, token_ids) for seq_id, token_ids in sequences.items()]
            self.to_worker.send(self.clients[engine_id].message(queries))
        for message in self.to_worker.arrivals():
            assert isinstance(message, ExchangeInput)
            engine_id = message.engine_id.split("/")[0]
            self.to_engine.send((engine_id, answer_to(self.contexts, message)))
            assert len(self.contexts) + self.contexts.num_free_slots == self.num_slots
        drafted: dict[str, set[int]] = {"a": set(), "b": set()}
        for engine_id, answer in self.to_engine.arrivals():
            drafts = self.clients[engine_id].digest(answer)
            for seq_id, draft in drafts.items():
                assert draft.token_ids == (fingerprint(self.running[engine_id][seq_id]),)
                drafted[engine_id].add(seq_id)
        return drafted


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    badness=st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    num_slots=st.sampled_from([1, 3, 16]),
)
def test_drafts_continue_the_true_context_and_nothing_leaks(
    seed: int, badness: float, num_slots: int
) -> None:
    """Over any channel drafts fit the context of their moment; once it heals all recovers.

    Every draft the client lets through was made on exactly the tokens the sequence had in its
    message; when messages arrive again every sequence is drafted for within a few steps, and when
    all have ended neither side holds anything.
    """
    world = World(seed=seed, badness=badness, num_slots=num_slots)
    for step in range(30):
        world.live()
        if step == 20 and world.random.random() < 0.3:
            world.replace_worker(noticed=world.random.random() < 0.5)
        world.exchange()
    world.heal()
    drafted: dict[str, set[int]] = {"a": set(), "b": set()}
    for _ in range(8):
        world.grow()
        for engine_id, seq_ids in world.exchange().items():
            drafted[engine_id] |= seq_ids
    if num_slots == 16:
        assert drafted == {engine_id: set(seqs) for engine_id, seqs in world.running.items()}
    world.end_all()
    world.exchange()
    assert [client.num_followed for client in world.clients.values()] == [0, 0]
    assert world.contexts.num_free_slots == num_slots


@pytest.mark.parametrize("num_slots", [1, 16])
def test_a_perfect_channel_drafts_for_all_that_fit_at_every_step(num_slots: int) -> None:
    """Without losses no sequence that has a slot ever misses a step."""
    world = World(seed=1, badness=0.0, num_slots=num_slots)
    world.running["a"] = {seq_id: [seq_id, 1] for seq_id in range(1, 5)}
    for _ in range(10):
        world.grow()
        assert len(world.exchange()["a"]) == min(num_slots, 4)
