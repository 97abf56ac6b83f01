"""How processes that serve are spared the long pauses of Python's garbage collector."""

import gc


def freeze_loaded() -> None:
    """Have the collector never look again at what there is now: modules, tables, weights.

    A look at all of it stops every stream of a process for a third of a second. To be called when
    a process has what it keeps; what it drops of that in circles stays in memory.
    """
    gc.collect()
    gc.freeze()
