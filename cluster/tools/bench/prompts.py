"""The texts of the built-in workloads."""

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

CODE = (
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Write a Python class for a stack with push, pop, peek and a length.",
    "Write a SQL query for the three customers with the highest total of orders this year.",
    "Write a JavaScript function that removes duplicates from an array and keeps the order.",
    "Write a Python function that reads a CSV file and returns the mean of each numeric column.",
    "Write a shell script that renames every .jpeg file in a folder to .jpg.",
    dedent(
        """\
        Add type hints and a docstring to this function and print the whole of it:

        def merge(left, right):
            result = []
            while left and right:
                result.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
            return result + left + right
        """
    ),
    dedent(
        """\
        Rewrite this loop as a list comprehension and print the whole function:

        def even_squares(numbers):
            squares = []
            for number in numbers:
                if number % 2 == 0:
                    squares.append(number * number)
            return squares
        """
    ),
)

MATH = (
    "A train leaves at 9:40 and arrives at 13:05. How long is the trip? Show your steps.",
    "Lena buys 3 notebooks at 2.40 each and 5 pens at 0.80 each. How much does she pay?",
    "Solve 3x + 7 = 31 for x, step by step.",
    "A tank holds 240 litres and loses 8 litres an hour. When is it down to 96 litres?",
    "What is 15 percent of 260? Explain how you get there.",
    "The sides of a rectangle are 7 and 24. How long is its diagonal?",
    "Add the whole numbers from 1 to 40 and explain a shortcut.",
    "Tom is twice as old as Mia. In six years their ages add up to 48. How old are they now?",
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
    """\
    Night buses leave the central station at ten past every hour from midnight to five. Line 1
    goes north along the river, line 2 goes east to the airport, and line 3 goes around the old
    town. A day ticket is valid until the last night bus of the following night.
    """,
    """\
    name,city,year,members
    Alder Choir,Brookfield,1987,34
    Harbour Brass,Eastport,2003,18
    North Hill Strings,Kingsley,1995,22
    River Street Singers,Brookfield,2011,41
    """,
    """\
    The museum keeps its oldest maps in a dark room at eighteen degrees. Visitors may see them
    on the first Sunday of each month in groups of at most ten. Pencils are allowed, pens are
    not, and photographs need a written permit from the archive.
    """,
    """\
    {"service": "billing", "port": 8443, "retries": 3, "timeout_seconds": 20}
    {"service": "search", "port": 8444, "retries": 5, "timeout_seconds": 10}
    {"service": "mail", "port": 8445, "retries": 3, "timeout_seconds": 60}
    """,
)

COPY = tuple(f"Repeat the following text exactly:\n\n{dedent(passage)}" for passage in _PASSAGES)
