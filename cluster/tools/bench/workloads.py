"""What the benchmarks ask: open chat, and passages to copy word for word."""

from textwrap import dedent

CHAT = (
    "What makes a good morning routine, and how would you start one?",
    "Explain to a friend why the sky looks blue at noon and red at dusk.",
    "Give me three ideas for a weekend trip without a car.",
    "How does a refrigerator keep food cold? Keep it simple.",
    "Describe a small town by the sea in the off season.",
    "What should I know before I adopt an old dog?",
    "Why do some people enjoy scary films while others cannot stand them?",
    "Plan a light dinner for four guests, one of them vegetarian.",
)

_PASSAGES = (
    """\
    The harbour office opens at seven in the morning. Every boat that enters the harbour must
    report its name, its length and the number of people on board. Boats longer than twenty
    metres need a berth on the outer pier, and boats with fewer than six people may use the
    inner pier for one night without a fee.
    """,
    """\
    To change the filter, switch the pump off and close both valves. Turn the cover to the left
    until it comes loose, lift the old filter out, and rinse the housing with clean water. Put
    the new filter in with the arrow pointing down, turn the cover to the right, open both
    valves, and switch the pump on again.
    """,
    """\
    Order 4471: 12 boxes of blue paper, 3 boxes of red paper, 40 pencils.
    Order 4472: 7 boxes of white paper, 1 box of green paper, 25 pencils.
    Order 4473: 12 boxes of blue paper, 9 boxes of white paper, 60 pencils.
    All orders go to the third floor before noon on Tuesday.
    """,
    """\
    def area(shape):
        if shape.kind == "circle":
            return 3.14159 * shape.radius ** 2
        if shape.kind == "square":
            return shape.side ** 2
        if shape.kind == "rectangle":
            return shape.width * shape.height
        raise ValueError(shape.kind)
    """,
)

COPY = tuple(f"Repeat the following text exactly:\n\n{dedent(passage)}" for passage in _PASSAGES)
