"""Records that cannot be read where those around them can, and what is kept of them:
`data.bad_records` says whether they end the preparation or are left out and counted."""

import dataclasses

from jaxtrain.data.tokenizer import DataError

PLACES = 5  # of bad records, that are kept


class BadRecord(DataError):
    """A record, or the rest of a file, that cannot be read. The message is one line: where (file
    and line), what, and what mends it."""

    def __init__(self, where: str, what: str, fix: str = ""):
        self.place, self.fix = f"{where}: {what}", fix
        super().__init__(f"{self.place}: {fix}" if fix else self.place)

    def refusal(self) -> DataError:
        """The error that ends the preparation, with the other way."""
        skip = "use --config.data.bad_records=skip to leave out what cannot be read"
        return DataError(
            f"{self.place}: {self.fix}, or {skip}" if self.fix else f"{self.place}: {skip}"
        )


@dataclasses.dataclass
class Skipped:
    """The records that were left out: how many, and the messages of the first ones."""

    count: int = 0
    places: list[str] = dataclasses.field(default_factory=list)

    def add(self, record: BadRecord) -> None:
        """Counts one more."""
        self.count += 1
        if len(self.places) < PLACES:
            self.places.append(record.place)

    def lines(self, source: str) -> list[str]:
        """For people: the count and the first places; nothing where there are none."""
        if not self.count:
            return []
        rest = (
            [f"  and {self.count - len(self.places):,} more"]
            if self.count > len(self.places)
            else []
        )
        head = (
            f"data.bad_records=skip: {self.count:,} bad record{'s'[: self.count > 1]} of "
            f"data.source={source} left out:"
        )
        return [head, *(f"  {place}" for place in self.places), *rest]
