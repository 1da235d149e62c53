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


def test_a_program_is_tried_after_one_without_a_clipped_step():
    tried, lines = speculation()
    seen = []
    for first, norms in ((1, (3.0, 2.0)), (3, (0.5, 1.0)), (5, (0.5, 0.9)), (7, (0.2, 0.3))):
        program(tried, first, *norms)
        seen.append(tried.tries)
    assert seen == [False, False, True, True]
    assert lines == [
        "note: steps 1 to 2 ran one at a time, because a gradient was clipped or an update "
        "skipped; so will others until there is none"
    ]
    assert tried.summary() == "1 of 4 programs had their steps without a barrier"


def test_an_attempt_that_failed_is_said_for_the_first_second_and_fourth_time():
    tried, lines = speculation()
    for phase in range(5):
        program(tried, 8 * phase + 1, 0.5, 0.5)
        program(tried, 8 * phase + 3, 0.5, 7.0)
        program(tried, 8 * phase + 5, 7.0, 7.0)
    assert [line.split(",")[0] for line in lines] == [
        "note: steps 3 to 4 ran again one at a time",
        "note: steps 11 to 12 ran again one at a time",
        "note: steps 27 to 28 ran again one at a time (for the 4th time)",
    ]


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
    assert tried.tries and tried.programs == 2
