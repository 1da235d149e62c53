"""The errors of data: of a corpus or a tokenizer, and of the store or hub that has it."""

from jaxtrain.run.exit_status import ExitStatus, RunError


class DataError(RunError, ValueError):
    """A corpus, a tokenizer or a data field that cannot be used. The message is one line, with file
    and line where there are any."""

    status = ExitStatus.BAD_DATA


class StoreError(DataError):
    """A source in a store, or a repository of the hub, that cannot be read; the text is one line,
    which names it."""

    status = ExitStatus.BAD_CONFIG


class StoreAwayError(StoreError):
    """A store or hub that may answer when the run is started again."""

    status = ExitStatus.STORAGE
