"""A comparison of drafts as a page with pictures."""

from pathlib import Path

from cluster.tools.bench.page import Bars, Lines, Section, Sheet, page
from cluster.tools.choosing.comparison import Comparison, kept_rows, speed_rows


def write_page(comparison: Comparison, path: Path) -> None:
    """One HTML file that needs nothing else."""
    title = f"Drafthouse: drafts for {comparison.target}"
    sections = (_choice(comparison), _kept(comparison), _speed(comparison))
    path.write_text(page(title, sections), encoding="utf-8")


def _choice(comparison: Comparison) -> Section:
    return Section(
        "What to take",
        f"Answers of at most {comparison.max_tokens} tokens at temperature "
        f"{comparison.temperature:g}. All that follows is of this one run.",
        (Sheet(("found",), [(words,) for words in comparison.words]),),
    )


def _kept(comparison: Comparison) -> Section:
    measured = comparison.measured
    survival = {
        each.draft: list(enumerate(each.steps.survival, start=1))
        for each in measured
        if each.steps.survival
    }
    lengths = {
        name: {
            each.draft: each.kinds[name].acceptance_length
            for each in measured
            if each.kinds is not None and name in each.kinds
        }
        for name in dict.fromkeys(name for each in measured for name in each.kinds or {})
    }
    headings, rows = kept_rows(comparison)
    return Section(
        "Drafts that are kept",
        "Of the drafts that reach a position, those that are kept up to there; and the tokens that "
        "a step brings, its own included, with the largest K.",
        (Sheet(headings, rows),),
        (
            Lines("Kept up to a position", "position in the draft", "part of drafts", survival),
            Bars("Tokens a step", "tokens", lengths, reference=1.0),
        ),
    )


def _speed(comparison: Comparison) -> Section:
    pictures: list[Lines | Bars] = []
    for candidate in comparison.measured:
        numbers = dict.fromkeys(cell.num_speculative_tokens for cell in candidate.cells)
        series = {}
        for number in numbers:
            cells = [each for each in candidate.cells if each.num_speculative_tokens == number]
            series[f"K={number} measured"] = [
                (float(each.concurrency), each.measured or 0.0) for each in cells
            ]
            series[f"K={number} predicted"] = [
                (float(each.concurrency), each.predicted) for each in cells
            ]
        title = f"{candidate.draft}: speed-up"
        pictures.append(Lines(title, "at once", "to no drafts", series, reference=1.0, log_x=True))
    expected = {
        each.draft: [(float(at.num_sequences), at.speedup) for at in each.expected]
        for each in comparison.measured
    }
    pictures.append(
        Lines(
            "Under the controller, lasting load, foreseen",
            "at once",
            "to no drafts",
            expected,
            reference=1.0,
            log_x=True,
        )
    )
    headings, rows = speed_rows(comparison)
    return Section(
        "What they bring",
        "All engines of a concurrency answered the same prompts with the same seeds, in turn, wave "
        "by wave. Predictions come from the target's cost table, the drafts' times in one wave "
        "that is not counted, and what is kept by category; speed-ups are from the first tokens "
        "on, medians over the rounds.",
        (Sheet(headings, rows),),
        pictures,
    )
