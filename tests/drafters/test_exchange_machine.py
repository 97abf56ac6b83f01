"""Drafting ahead under any loss, repetition, reordering and delay of messages and answers."""

from dataclasses import dataclass, field

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.drafters.contexts import DraftContexts
from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.model import DraftModel
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Rule, SamplingSpec
from tests.drafters.fake_decoder import CONTEXT, VOCAB_SIZE, FakeDecoder, fresh

ENGINES = ("a", "b")
TOKENS = st.integers(0, VOCAB_SIZE - 1)
PLACES = st.integers(0, 7)
LONGEST = 30


@dataclass
class Text:
    """A running sequence: all it has committed, and how it is sampled."""

    token_ids: list[int]
    sampling: SamplingSpec


@dataclass
class Engine:
    """One engine's side: its sequences, its client, and what its last message was about."""

    client: ExchangeClient
    running: dict[int, Text] = field(default_factory=dict)
    asked: dict[int, Text] = field(default_factory=dict)
    num_wanted: int = 0


class DraftingAhead(RuleBasedStateMachine):
    """Two engines, one draft model that drafts ahead, and a wire that does what it wants.

    The decoder behind the model fails on keys and values of any other text than the sequence's.
    """

    @initialize(
        rule_of_all=st.sampled_from(Rule),
        num_slots=st.sampled_from([1, 2, 8]),
        max_rows=st.sampled_from([4, 16]),
    )
    def begin(self, rule_of_all: Rule, num_slots: int, max_rows: int) -> None:
        """Nobody knows anything."""
        self.rule, self.num_slots, self.max_rows = rule_of_all, num_slots, max_rows
        self.engines = {
            name: Engine(ExchangeClient(name, rule=rule_of_all, refusal_messages=2))
            for name in ENGINES
        }
        self.num_started = 0
        self.to_worker: list[ExchangeInput] = []
        self.to_engine: list[tuple[str, ExchangeOutput]] = []
        self.new_worker()
        for name in ENGINES:
            for temperature in (0.0, 1.0):
                self.start(name, [self.num_started, 1, 2, 3], temperature, reuse=False)

    def new_worker(self) -> None:
        """A model that holds nothing."""
        self.model = DraftModel(
            FakeDecoder(),  # type: ignore[arg-type]
            num_blocks=self.num_slots,
            block_size=CONTEXT,
            max_rows=self.max_rows,
            max_tail=9,
            name="fake",
        )
        self.model._contexts = DraftContexts(self.num_slots, patience=2)

    @rule(
        name=st.sampled_from(ENGINES),
        prompt=st.lists(TOKENS, min_size=1, max_size=20),
        temperature=st.sampled_from([0.0, 1.0]),
        reuse=st.booleans(),
    )
    def start(self, name: str, prompt: list[int], temperature: float, reuse: bool) -> None:  # noqa: FBT001 - drawn
        """A sequence starts, sometimes under a name that was used before."""
        running = self.engines[name].running
        self.num_started += 1
        seq_id = 0 if reuse else self.num_started
        if seq_id not in running and len(running) < 4:
            sampling = SamplingSpec(seed=self.num_started, temperature=temperature)
            running[seq_id] = Text(prompt, sampling)

    @rule(
        name=st.sampled_from(ENGINES),
        place=PLACES,
        num_right=st.integers(0, 6),
        others=st.lists(TOKENS, max_size=2),
    )
    def commit(self, name: str, place: int, num_right: int, others: list[int]) -> None:
        """A sequence gets tokens that the model would draft, then some that it may not."""
        running = self.engines[name].running
        if running:
            text = list(running.values())[place % len(running)]
            drafted = fresh(text.token_ids, text.sampling, self.rule, num_right)
            text.token_ids += [drawn.token_id for drawn in drafted] + others
            del text.token_ids[LONGEST:]

    @rule(name=st.sampled_from(ENGINES), place=PLACES)
    def end(self, name: str, place: int) -> None:
        """A sequence ends."""
        engine = self.engines[name]
        if engine.running:
            seq_id = list(engine.running)[place % len(engine.running)]
            del engine.running[seq_id]
            engine.client.release([seq_id])

    @rule(
        name=st.sampled_from(ENGINES),
        num_wanted=st.integers(0, 4),
        price=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def ask(self, name: str, num_wanted: int, price: float) -> None:
        """An engine sends the message of a step; what it asked before is late now."""
        engine = self.engines[name]
        engine.asked = {
            seq_id: Text(list(text.token_ids), text.sampling)
            for seq_id, text in engine.running.items()
        }
        engine.num_wanted = num_wanted
        queries = [
            DraftQuery(
                seq_id=seq_id,
                token_ids=text.token_ids,
                num_wanted=num_wanted,
                sampling=text.sampling,
                price=price,
            )
            for seq_id, text in engine.running.items()
        ]
        self.to_worker.append(engine.client.message(queries))

    @rule(place=PLACES, repeat=st.booleans())
    def reach_worker(self, place: int, repeat: bool) -> None:  # noqa: FBT001 - drawn
        """Some message arrives, and may arrive again."""
        if self.to_worker:
            index = place % len(self.to_worker)
            message = self.to_worker[index] if repeat else self.to_worker.pop(index)
            answer = self.model.exchange(message)
            self.to_engine.append((message.engine_id.split("/")[0], answer))

    @rule(place=PLACES, repeat=st.booleans())
    def reach_engine(self, place: int, repeat: bool) -> None:  # noqa: FBT001 - drawn
        """Some answer arrives, and may arrive again."""
        if self.to_engine:
            index = place % len(self.to_engine)
            name, answer = self.to_engine[index] if repeat else self.to_engine.pop(index)
            self.check(name, self.engines[name].client.digest(answer))

    @rule(
        name=st.sampled_from(ENGINES),
        num_wanted=st.integers(1, 4),
        num_passes=st.integers(0, 4),
        num_right=st.integers(0, 5),
        others=st.lists(TOKENS, min_size=1, max_size=3),
    )
    def step(
        self, name: str, num_wanted: int, num_passes: int, num_right: int, others: list[int]
    ) -> None:
        """Message and answer arrive in time, the worker runs ahead, and all texts go on; twice."""
        for _ in range(2):
            self.ask(name, num_wanted, 0.0)
            self.reach_worker(-1, repeat=False)
            self.reach_engine(-1, repeat=False)
            self.run_ahead(num_passes)
            for place in range(len(self.engines[name].running)):
                self.commit(name, place, num_right, others)

    @rule(place=PLACES, of_messages=st.booleans())
    def lose(self, place: int, of_messages: bool) -> None:  # noqa: FBT001 - drawn
        """A message or an answer never arrives."""
        under_way: list[object] = self.to_worker if of_messages else self.to_engine  # type: ignore[assignment]
        if under_way:
            del under_way[place % len(under_way)]

    @rule(num_passes=st.integers(1, 6))
    def run_ahead(self, num_passes: int) -> None:
        """The worker is idle for a while."""
        for _ in range(num_passes):
            self.model.advance()

    @rule(noticed=st.booleans())
    def replace_worker(self, noticed: bool) -> None:  # noqa: FBT001 - drawn
        """The worker dies, and with it what was on its way to it; the engines may not notice."""
        self.new_worker()
        self.to_worker.clear()
        if noticed:
            for engine in self.engines.values():
                engine.client.forget_all()

    @invariant()
    def slots_are_held_or_free(self) -> None:
        """None is lost, whatever happens."""
        contexts = self.model._contexts
        assert len(contexts) + contexts.num_free_slots == self.num_slots
        assert len({context.slot for context in contexts}) == len(contexts)

    def check(self, name: str, drafts: dict[int, Draft]) -> None:
        """Each is what a new model drafts after what the sequence had when it was asked for."""
        engine = self.engines[name]
        for seq_id, draft in drafts.items():
            text = engine.asked[seq_id]
            assert len(draft.token_ids) <= engine.num_wanted
            expected = fresh(text.token_ids, text.sampling, self.rule, len(draft.token_ids))
            assert draft.token_ids == tuple(drawn.token_id for drawn in expected)
            assert draft.margins == tuple(drawn.margin for drawn in expected)
            assert draft.drafter == "fake"
            shipped = tuple(drawn.distribution for drawn in expected)
            assert draft.distributions == (shipped if any(shipped) else ())

    def teardown(self) -> None:
        """When messages arrive again all are drafted for; when all has ended nothing is left."""
        if not hasattr(self, "model"):
            return
        self.to_worker.clear()
        self.to_engine.clear()
        for _ in range(4):
            for name in ENGINES:
                self.ask(name, 3, 0.0)
                self.reach_worker(0, repeat=False)
                self.reach_engine(0, repeat=False)
                num_passes = 0
                while self.model.advance():
                    num_passes += 1
                    assert num_passes < 400, "there is an end to what can be drafted ahead"
        if self.num_slots == 8:
            held = [context.token_ids for context in self.model._contexts]
            for engine in self.engines.values():
                assert all(text.token_ids in held for text in engine.running.values())
            assert all(len(context.tail) >= 7 for context in self.model._contexts)
        for engine in self.engines.values():
            engine.client.release(list(engine.running))
            engine.running.clear()
        for name in ENGINES:
            self.ask(name, 3, 0.0)
            self.reach_worker(0, repeat=False)
            self.reach_engine(0, repeat=False)
            assert self.engines[name].client.num_followed == 0
        assert self.model._contexts.num_free_slots == self.num_slots


TestDraftingAhead = DraftingAhead.TestCase
TestDraftingAhead.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # to shrink a failure takes minutes
)
