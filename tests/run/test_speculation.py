"""When the steps of a program are tried together, and what is said of it."""

import math

from jaxtrain.run.speculation import Speculation


def speculation(clip_norm: float = 1.0, skips: bool = True) -> tuple[Speculation, list[str]]:
    lines: list[str] = []
    return Speculation(clip_norm, skips, lines.append), lines


def program(speculation: Speculation, first: int, *norms: float, loss: float = 2.0) -> None:
    """A program of steps with these norms, dispatched and reported."""
    speculation.dispatched(speculation.tries)
    for norm in norms:
        speculation.saw(loss, norm)
    speculation.ran(first, first + len(norms) - 1)


def test_a_program_is_tried_after_a_step_that_was_not_clipped():
    tried, lines = speculation()
    seen = []
    for first, norms in (
        (1, (3.0, 2.0)),
        (3, (0.5, 1.0)),
        (5, (1.5, 0.9)),
        (7, (0.2, 0.3)),
        (9, (0.2, 1.3)),
    ):
        program(tried, first, *norms)
        seen.append(tried.tries)
    assert seen == [False, False, True, True, False]
    assert [line.split(",")[0] for line in lines] == [
        "note: steps 1 to 2 ran one at a time",
        "note: step 10 ran one at a time",
    ]
    assert tried.summary() == "3 of 10 steps ran without a barrier between them"


def test_an_attempt_that_failed_is_said_for_the_first_second_and_fourth_time():
    tried, lines = speculation()
    for phase in range(5):
        program(tried, 8 * phase + 1, 0.5, 0.5, 0.5)
        program(tried, 8 * phase + 4, 0.5, 7.0, 7.0)
        program(tried, 8 * phase + 7, 7.0, 7.0)
    assert [line.split(",")[0] for line in lines] == [
        "note: steps 5 to 6 ran one at a time",
        "note: steps 13 to 14 ran one at a time",
        "note: steps 29 to 30 ran one at a time (for the 4th time)",
    ]
    assert all("because a gradient was clipped or an update skipped" in line for line in lines)
    assert (tried.together, tried.steps) == (5, 5 * 8)


def test_without_clipping_only_numbers_that_are_not_finite_count():
    tried, lines = speculation(clip_norm=0.0)
    assert tried.tries
    program(tried, 1, 1e9, 1e9)
    assert tried.tries and not lines
    program(tried, 3, 1.0, 1.0, loss=math.nan)
    assert not tried.tries and lines
    never, _ = speculation(clip_norm=0.0, skips=False)
    program(never, 1, math.inf, loss=math.nan)
    assert never.tries


def test_a_roll_back_forgets_what_was_dispatched():
    tried, _ = speculation()
    program(tried, 1, 0.5)
    tried.dispatched(True)
    tried.saw(2.0, 9.0)
    tried.go_back(None)
    program(tried, 1, 0.5)
    assert tried.tries and tried.steps == 2
