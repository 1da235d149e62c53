"""The exit statuses: each error of a run has one, and those that can be gone on from are known."""

import subprocess
import sys

from jaxtrain.checkpoint.steps import CheckpointError
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.run_lock import FolderError
from jaxtrain.training.recovery import NumbersError


def test_each_error_has_its_status():
    errors = (DataError, CheckpointError, FolderError, NumbersError, RunError)
    assert [error.status for error in errors] == [65, 74, 2, 81, 1]


def test_what_can_be_gone_on_from():
    """Never what would end the same way again, nor what somebody has stopped by hand."""
    assert {int(status) for status in ExitStatus if status.goes_on} == {74, 75, 79, 80}


def test_a_process_ends_with_it():
    program = (
        "import sys; from jaxtrain.run.exit_status import ExitStatus; sys.exit(ExitStatus.STOPPED)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 75
