"""Where a simulated request goes: the real choice, between the engines that hold the fewest."""

from collections import defaultdict
from itertools import islice

from cluster.control.routing import Need, Standing, choose
from cluster.tools.simulation.engines import SimulatedEngine

SHORTLIST = 4  # engines that are weighed for one request


class Routes:
    """The engines that take requests, by how many sequences each holds."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._engines: dict[str, SimulatedEngine] = {}
        self._by_held: defaultdict[int, dict[str, None]] = defaultdict(dict)

    def add(self, engine: SimulatedEngine) -> None:
        """It takes requests from now on."""
        self._engines[engine.engine_id] = engine
        self._held[engine.engine_id] = engine.num_held
        self._by_held[engine.num_held][engine.engine_id] = None

    def remove(self, engine: SimulatedEngine) -> None:
        """It takes no more."""
        del self._engines[engine.engine_id]
        self._leave(engine.engine_id)

    def moved(self, engine: SimulatedEngine) -> None:
        """It holds another number of sequences now."""
        engine_id = engine.engine_id
        held = self._held.get(engine_id)
        if held is not None and held != engine.num_held:
            self._leave(engine_id)
            self._held[engine_id] = engine.num_held
            self._by_held[engine.num_held][engine_id] = None

    def choose(self, need: Need) -> SimulatedEngine:
        """Raises what routing raises."""
        standings = [
            Standing(engine_id=engine_id, load=self._engines[engine_id].load())
            for engine_id in self._shortlist()
        ]
        return self._engines[choose(standings, need).engine_id]

    def _shortlist(self) -> list[str]:
        found: list[str] = []
        for held in sorted(self._by_held):
            found += islice(self._by_held[held], SHORTLIST - len(found))
            if len(found) == SHORTLIST:
                break
        return found

    def _leave(self, engine_id: str) -> None:
        held = self._held.pop(engine_id)
        same = self._by_held[held]
        del same[engine_id]
        if not same:
            del self._by_held[held]
