"""What a simulated target's steps cost: a table of a name, or one that was measured."""

import json
from pathlib import Path

from cluster.control.cost import CostTable
from cluster.errors import ConfigurationError
from cluster.tools.simulation.worlds import PROFILED_ROWS, TABLES, World


def read_cost(name: str) -> CostTable:
    """The table of that name, or of a file that `drafthouse profile --json` wrote.

    Raises ConfigurationError.
    """
    if name in TABLES:
        world = World(table=name, process="iid", num_sequences=1)
        return CostTable({world.shape(rows): float(world.seconds(rows)) for rows in PROFILED_ROWS})
    try:
        data = json.loads(Path(name).read_text())
        return CostTable.from_json({"weight": 1.0} | data)
    except OSError as error:
        known = ", ".join(TABLES)
        raise ConfigurationError(f"--cost: {name}: none of {known}, and no file") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"--cost: {name} holds no cost table: {error!r}") from error
