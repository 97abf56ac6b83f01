"""The policy in worlds whose truth is known."""

from itertools import product

import numpy as np
import pytest

from cluster.control.policy import FixedPolicy
from cluster.tools.simulation.run import (
    COMPARED,
    SimulatedClock,
    compare,
    optimum,
    play,
    worlds,
)
from cluster.tools.simulation.worlds import PROCESSES, TABLES, World


def test_the_optimum_is_no_less_than_any_fixed_number() -> None:
    """In every kind of world: who knows the truth is never behind."""
    for table, process in product(TABLES, PROCESSES):
        world = World(table=table, process=process, num_sequences=3)
        best = max(each.goodput(0, 100) for each in optimum(world, num_steps=100))
        for k in (0, 1, 4, 8):
            trace = play(world, FixedPolicy(k), SimulatedClock(), num_steps=100)
            assert trace.goodput(0, 100) <= best * (1 + 1e-9)


def test_the_optimum_is_found_by_trying_every_number_of_rows() -> None:
    """In a small world the best constant exchange of tokens for seconds is that of brute force."""
    world = World(table="staircase", process="autocorrelated", num_sequences=2, num_positions=3)
    drafting, _ = optimum(world, num_steps=40)
    best = drafting.goodput(0, 40)
    offers = world.offers()
    worth = 0.0
    for _ in range(40):
        falling = -np.sort(-offers.next().survivals.ravel())
        tokens = 2 + np.concatenate([[0.0], np.cumsum(falling)])
        worth += max(
            float(tokens[rows] - best * world.seconds(2 + rows)) for rows in range(len(tokens))
        )
    assert worth == pytest.approx(0, abs=1e-6)  # at the best rate nothing is left to be gained


@pytest.mark.parametrize(
    ("table", "process", "num_sequences", "least"),
    [
        ("memory-bound", "iid", 4, 0.98),
        ("compute-bound", "iid", 4, 0.975),
        ("staircase", "decaying", 4, 0.975),
        ("cpu-like", "autocorrelated", 4, 0.975),
        ("compute-bound", "hopeless", 4, 0.985),
    ],
)
def test_the_policy_is_near_the_optimum_and_no_fixed_choice_is_better(
    table: str, process: str, num_sequences: int, least: float
) -> None:
    """Within 10% in the first 200 steps, near it after 400, at least as good as the others."""
    cell = compare(World(table=table, process=process, num_sequences=num_sequences), num_steps=700)
    assert cell.early > 0.9
    assert cell.warm > least
    assert cell.warm > 0.985 * max(cell.others.values())
    assert set(cell.others) == set(COMPARED)


def test_the_same_world_is_the_same_for_every_policy() -> None:
    """Drafts do not depend on what was done with those before."""
    world = World(table="cpu-like", process="autocorrelated", num_sequences=2)
    first, second = world.offers(), world.offers()
    for _ in range(20):
        assert (first.next().chances == second.next().chances).all()


def test_every_table_meets_every_process_at_every_batch_size() -> None:
    """None is left out of the proof."""
    cells = {(world.table, world.process, world.num_sequences) for world in worlds()}
    assert cells == set(product(TABLES, PROCESSES, (1, 4, 16, 64)))
