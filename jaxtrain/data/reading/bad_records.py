"""Single records that cannot be read. `data.bad_records` says whether one ends the preparation or
is left out and counted."""

import dataclasses
import pathlib
from collections.abc import Sequence

from jaxtrain.data.tokenizer import DataError
from jaxtrain.run.exit_status import ExitStatus

# the remedy of records that lack the fields, or text in them
SET_FIELDS = "set data.text_fields to fields of text (a list, such as a chat's messages, is none)"
PLACES = 5  # the number of bad records whose messages are shown
MOST_PLACES = 100_000  # the number of those whose messages a prepared corpus has


class BadFile(DataError):
    """A file of a source that is damaged, or does not match the others of its source."""

    status = ExitStatus.BAD_CONFIG


class BadRecord(DataError):
    """A record, or the rest of a file, that cannot be read. The message is one line: file and line,
    the problem, and its remedy.

    fix: its remedy, in words. settings: flags with which this record is read, which are the remedy
    only if no record before it was read without them. records: how many records are lost, one for a
    rest of a file whose records cannot be counted.
    """

    refused_by: type[DataError] = DataError

    def __init__(self, where: str, what: str, fix: str = "", settings: str = "", records: int = 1):
        self.where, self.what, self.fix, self.settings = where, what, fix, settings
        self.place, self.records = f"{where}: {what}", records
        super().__init__(f"{self.place}: {fix}" if fix else self.place)

    def refusal(self, any_read: bool) -> DataError:
        """The error that ends the preparation; its message names data.bad_records=skip too, unless
        that would leave out all records. any_read: other records were read."""
        fix = f"use {self.settings}" if self.settings and not any_read else self.fix
        if (self.settings or self.fix == SET_FIELDS) and not any_read:
            return self.refused_by(f"{self.place}: {fix}")
        skip = "use --config.data.bad_records=skip to leave out what cannot be read"
        return self.refused_by(
            f"{self.place}: {fix}, or {skip}" if fix else f"{self.place}: {skip}"
        )


class DamagedFile(BadRecord):
    """Content that is not what a file of its format has: it is cut short, damaged, or another
    format's."""

    refused_by = BadFile


@dataclasses.dataclass
class Skipped:
    """The records that were left out.

    count: their number
    places: the messages of MOST_PLACES at most
    settings: flags with which the first one is read, if there are any
    files: for each place, the number of its file in the source
    paths: the paths of the files with bad records when the corpus was prepared, by their numbers
    """

    count: int = 0
    places: list[str] = dataclasses.field(default_factory=list)
    settings: str = ""
    files: list[int] = dataclasses.field(default_factory=list)
    paths: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, record: BadRecord, number: int = 0, path: str = "") -> None:
        """Counts a record, and saves its message with the number and path of its file."""
        self.append(
            Skipped(record.records, [record.place], record.settings, [0], {"0": path}), number
        )

    def append(self, later: "Skipped", first_file: int) -> None:
        """Adds the records of files whose numbers begin with `first_file`."""
        self.settings = self.settings if self.count else later.settings
        self.count += later.count
        space = MOST_PLACES - len(self.places)
        self.places += later.places[:space]
        self.files += [first_file + number for number in later.files[:space]]
        self.paths |= {str(first_file + int(key)): path for key, path in later.paths.items()}

    def at(self, paths: Sequence[str]) -> "Skipped":
        """These records, with the paths that their files have now."""
        places = [
            f"{paths[number]}{place.removeprefix(self.paths[str(number)])}"
            for number, place in zip(self.files, self.places, strict=True)
        ]
        return dataclasses.replace(self, places=places)

    def lines(self, source: str, stored: pathlib.Path) -> list[str]:
        """Lines of text with the count and the first messages; [] without bad records. stored: the
        file that has all messages."""
        if not self.count:
            return []
        hidden = len(self.places) - PLACES
        rest = [f"  and {hidden:,} more, which are in {stored}"] if hidden > 0 else []
        return [
            f"data.bad_records=skip: {self.count:,} bad record{'s'[: self.count > 1]} of "
            f"data.source={source} left out:",
            *(f"  {place}" for place in self.places[:PLACES]),
            *rest,
        ]
