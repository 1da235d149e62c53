"""docs/operations.md: its table of exit statuses is the enum's."""

import re

from support import ROOT

from jaxtrain.run.exit_status import ExitStatus

TEXT = (ROOT / "docs" / "operations.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]+) \| (yes|no)\b[^|]*\|$", TEXT, re.MULTILINE)


def test_the_table_of_exit_statuses_is_the_enum():
    assert [(int(number), name) for number, name, _, _ in ROWS] == [
        (status.value, status.name) for status in ExitStatus
    ]


def test_the_table_says_which_can_be_started_again():
    assert {name for _, name, _, again in ROWS if again == "yes"} == {
        status.name for status in ExitStatus if status.goes_on
    }


def test_deaths_by_signals_are_in_the_table():
    """They are no exit statuses of the enum's, and can be started again."""
    assert re.search(r"^\| 128 \+ n \| \|[^|]+\| yes \|$", TEXT, re.MULTILINE)
