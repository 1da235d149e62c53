"""Exit statuses, for programs that restart runs (Slurm, JobSet, Ray, `jaxtrain.launch --restarts`),
and the error that carries one.

docs/operations.md has them as a table. Standard library only.
"""

import enum
import signal
from typing import ClassVar


class ExitStatus(enum.IntEnum):
    """The exit statuses of `jaxtrain.train`, and of every command that ends for one of these
    reasons.

    64 to 78 mean what sysexits.h says; 79 and up are reasons that it lacks. A process that a signal
    ends has 128 plus the signal's number, as in shells.

    >>> int(ExitStatus.STOPPED), ExitStatus.STOPPED.goes_on, ExitStatus.BAD_CONFIG.goes_on
    (75, True, False)
    """

    FINISHED = 0
    FAULT = 1  # in the program, with a traceback
    BAD_CONFIG = 2  # flags, recipe or settings; damaged files of a corpus
    BAD_DATA = 65  # EX_DATAERR: records of the corpus, or a corpus that has changed
    STORAGE = 74  # EX_IOERR: what is stored cannot be read or written
    # EX_TEMPFAIL: on request (SIGTERM, preemption), with the step saved: the same command goes on
    STOPPED = 75
    HUNG = 79  # no step for longer than a step can last
    LOST_PEER = 80  # another process of the run has gone
    # a loss, gradients or parameters that are not finite, or copies of parameters that differ
    BAD_NUMBERS = 81
    OUT_OF_MEMORY = 82  # the host or a device has too little for what was asked
    INTERRUPTED = 128 + signal.SIGINT  # Ctrl-C, with the step saved if there was one

    @property
    def goes_on(self) -> bool:
        """True if the same command can be expected to get further when it is started again."""
        return self in (
            ExitStatus.STORAGE,
            ExitStatus.STOPPED,
            ExitStatus.HUNG,
            ExitStatus.LOST_PEER,
        )


class RunError(Exception):
    """An error that ends a command and is no fault in the program. Its text is one line, shown
    without a traceback; `status` is the command's."""

    status: ClassVar[ExitStatus] = ExitStatus.FAULT
