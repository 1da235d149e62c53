"""docs/operations.md: its tables of exit statuses and of what may differ are the code's."""

import re

from support import ROOT

from jaxtrain.devices import cluster_environment
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


def test_the_table_says_what_processes_have_alike():
    """Every setting that may differ, and every package and variable that may not."""
    table = TEXT[TEXT.index("| what | may differ |") :].partition("\n\n")[0]
    names = {*cluster_environment.MAY_DIFFER, *cluster_environment.VARIABLES}
    names |= {name for name in cluster_environment.PACKAGES if "cuda" not in name}
    assert {name for name in names if name in table} == names
