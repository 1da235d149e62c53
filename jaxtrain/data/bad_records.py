"""Single records that cannot be read. `data.bad_records` says whether one ends the preparation or
is left out and counted."""

import dataclasses

from jaxtrain.data.tokenizer import DataError

PLACES = 5  # the number of bad records whose messages are shown


class BadRecord(DataError):
    """A record, or the rest of a file, that cannot be read. The message is one line: file and line,
    the problem, and its remedy."""

    def __init__(self, where: str, what: str, fix: str = ""):
        self.place, self.fix = f"{where}: {what}", fix
        super().__init__(f"{self.place}: {fix}" if fix else self.place)

    def refusal(self) -> DataError:
        """The error that ends the preparation; its message names data.bad_records=skip too."""
        skip = "use --config.data.bad_records=skip to leave out what cannot be read"
        return DataError(
            f"{self.place}: {self.fix}, or {skip}" if self.fix else f"{self.place}: {skip}"
        )


@dataclasses.dataclass
class Skipped:
    """The records that were left out: their number, and the messages of the first PLACES."""

    count: int = 0
    places: list[str] = dataclasses.field(default_factory=list)

    def add(self, record: BadRecord) -> None:
        """Counts a record, and saves its message if it is one of the first."""
        self.count += 1
        if len(self.places) < PLACES:
            self.places.append(record.place)

    def lines(self, source: str) -> list[str]:
        """Lines of text with the count and the first messages; [] without bad records."""
        if not self.count:
            return []
        hidden = self.count - len(self.places)
        rest = [f"  and {hidden:,} more"] if hidden else []
        head = (
            f"data.bad_records=skip: {self.count:,} bad record{'s'[: self.count > 1]} of "
            f"data.source={source} left out:"
        )
        return [head, *(f"  {place}" for place in self.places), *rest]
