"""The order in which a source's training sequences are read: its ordinal, the running number of a
sequence, decides alone.

    ordinal ─► epoch, place in it ─► window, place in it ─► group ─► sequence

The sequences lie in groups of about GROUP tokens (document_packing.py). Each epoch permutes the
groups, WINDOW consecutive ones in that order are a window, and the sequences of a window are
permuted. So a sequence is near many others that are read at about the same time, which is what a
store needs; few groups are one window, in which all sequences are permuted.

A change of the sequence length begins a new leg: what is left of the epoch is a stream that is cut
anew, and the epochs after it are those of the entire stream.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

from jaxtrain.data.document_packing import SequenceArrays, Sequences
from jaxtrain.data.row_log import ReadSequence
from jaxtrain.data.split import Stream, make_stream, mix

WINDOW = 64  # groups


class Draw(NamedTuple):
    """A sequence of a source, at its place in the order.

    source: its name; ordinal: the number of the source's sequences that come before it
    epoch: of the source; number: among `sequences`
    ranges: those of the corpus with its tokens; of padding there are none
    """

    source: str
    ordinal: int
    epoch: int
    number: int
    ranges: list[tuple[int, int]]
    sequences: Sequences

    def arrays(self) -> SequenceArrays:
        """The sequence, as in Sequences."""
        return self.sequences.read(self.ranges)

    def record(self) -> ReadSequence:
        """What the row log says of it."""
        return ReadSequence(*self[:5])


class Window(NamedTuple):
    """Sequences of an epoch that are read one after the other, permuted.

    place: of its first sequence in the epoch; seed: of the permutation
    groups: ascending; firsts: [groups] the first sequence of each; offsets: [groups + 1] the place
        of each group's sequences in the window, then their number
    """

    place: int
    seed: int
    groups: np.ndarray
    firsts: np.ndarray
    offsets: np.ndarray

    def sequences(self, places: Iterable[int]) -> np.ndarray:
        """[places] int64: the sequences at some places of the window."""
        last = int(self.offsets[-1]) - 1
        shuffled = np.array(
            [index_shuffle(i, max_index=last, seed=self.seed, rounds=4) for i in places]
        )
        group = np.searchsorted(self.offsets, shuffled, "right") - 1
        return self.firsts[group] + shuffled - self.offsets[group]


class EpochOrder:
    """The permutation of some sequences in each epoch. seed: 32 bits"""

    def __init__(self, sequences: Sequences, seed: int):
        self.sequences, self._seed = sequences, seed
        self._firsts, self._sizes = sequences.packing.firsts, np.diff(sequences.packing.firsts)
        # Permutations of many groups take long. Batches that are read ahead have sequences of few
        # epochs and windows.
        self._windows = functools.lru_cache(2)(self._windows_of)
        self._window = functools.lru_cache(8)(self._window_of)

    def window(self, epoch: int, place: int) -> Window:
        """The window with the sequence at a place of an epoch."""
        _, places = self._windows(epoch)
        return self._window(epoch, int(np.searchsorted(places, place, "right")) - 1)

    def _window_of(self, epoch: int, number: int) -> Window:
        groups, places = self._windows(epoch)
        inside = np.sort(groups[number * WINDOW : (number + 1) * WINDOW])
        offsets = np.append(0, np.cumsum(self._sizes[inside]))
        seed = (self._seed + epoch) % 2**32
        if number:
            seed = int(mix(np.array([seed + (number << 32)], np.uint64))[0]) % 2**32
        return Window(int(places[number]), seed, inside, self._firsts[inside], offsets)

    def unread(self, epoch: int, place: int) -> Stream:
        """The tokens of the sequences from a place of an epoch on, and of none."""
        packing, stream = self.sequences.packing, self.sequences.stream
        groups, begins = self._windows(epoch)
        window = self.window(epoch, place)
        later = groups[WINDOW * int(np.searchsorted(begins, place, "right")) :]
        ranges = [packing.group_range(group) for group in later.tolist()]
        places = range(place - window.place, int(window.offsets[-1]))
        for number in window.sequences(places).tolist():
            ranges += packing.ranges(number)
        packed = packing.group_range(len(groups) - 1)[1]
        if packed < len(stream):
            ranges.append((packed - 1, len(stream)))
        starts, ends = np.array(sorted(ranges)).T
        # Neighbouring ranges have a token in common, the last target of one.
        apart = np.append(starts[1:] > np.maximum.accumulate(ends)[:-1], True)
        merged = zip(starts[np.append(True, apart[:-1])], ends[apart], strict=True)
        return make_stream(*np.array(stream.in_corpus(merged)).T)

    def _windows_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups in the order of an epoch, and the place of each window's first sequence."""
        groups = np.arange(len(self._sizes))
        if len(groups) > WINDOW:
            key = mix(np.array([self._seed + (epoch << 32)], np.uint64))
            groups = np.argsort(mix(groups.astype(np.uint64) + key), kind="stable")
        ends = np.cumsum(self._sizes[groups])
        return groups, np.append(0, ends[WINDOW - 1 : -1 : WINDOW])


class Leg(NamedTuple):
    """Ordinals from `first` on, up to the next leg: of whole epochs, or of what was left of one.

    epoch: the first one; done: the part of it that was read before
    """

    first: int
    epoch: int
    done: float
    order: EpochOrder

    def place(self, ordinal: int) -> tuple[int, int]:
        """The epoch of an ordinal, and its place among the leg's sequences of that epoch."""
        epochs, place = divmod(ordinal - self.first, len(self.order.sequences))
        return self.epoch + epochs, place


class Order:
    """The order of a source.

    make: (stream, sequence length) → its sequences; stream: all of the source's
    seed: `data.seed`; name: the source's, which has an order of its own
    """

    def __init__(
        self, make: Callable[[Stream, int], Sequences], stream: Stream, seed: int, name: str
    ):
        self._make, self._stream, self._name = make, stream, name
        # Grain adds the epoch to its seed of 32 bits. A digest spreads the seeds, so that
        # neighbouring ones do not share epochs.
        text = f"{seed}{name and ' '}{name}"
        self._seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        self._legs: list[Leg] = []
        self._length = 0

    @property
    def sequences(self) -> Sequences:
        """The sequences of the entire stream, cut with the first length."""
        return self._legs[0].order.sequences

    def cut(self, ordinal: int, length: int) -> None:
        """From an ordinal on, sequences have this length. Ordinals ascend from call to call."""
        if length == self._length:
            return
        self._length, epoch = length, 0
        whole = EpochOrder(self._make(self._stream, length), self._seed)
        # Of later legs nothing was read.
        self._legs = [leg for leg in self._legs if leg.first < ordinal]
        if self._legs:
            epoch, place = self._legs[-1].place(ordinal)
            if place:
                unread = self._legs[-1].order.unread(epoch, place)
                rest = EpochOrder(self._make(unread, length), self._seed)
                done = 1 - len(unread) / len(self._stream)
                if not rest.sequences.packing.repeated:
                    self._legs.append(Leg(ordinal, epoch, done, rest))
                    ordinal += len(rest.sequences)
                epoch += 1
        self._legs.append(Leg(ordinal, epoch, 0.0, whole))

    def at(self, ordinal: int) -> Draw:
        """The sequence of an ordinal."""
        leg = self._leg(ordinal)
        epoch, place = leg.place(ordinal)
        window, sequences = leg.order.window(epoch, place), leg.order.sequences
        (number,) = window.sequences([place - window.place]).tolist()
        return Draw(self._name, ordinal, epoch, number, sequences.ranges(number), sequences)

    def window(self, ordinal: int) -> tuple[list[tuple[int, int]], int]:
        """The ranges of the corpus with the tokens of the window in which an ordinal is, ascending,
        and the first ordinal of the next window: what can be read ahead."""
        leg = self._leg(ordinal)
        epoch, place = leg.place(ordinal)
        window, sequences = leg.order.window(epoch, place), leg.order.sequences
        groups = map(sequences.packing.group_range, window.groups.tolist())
        return sequences.stream.in_corpus(groups), ordinal - place + window.place + int(
            window.offsets[-1]
        )

    def count_of(self, epochs: float) -> int:
        """The number of ordinals in a number of epochs."""
        begun = [leg for leg in self._legs if leg.epoch + leg.done <= epochs] or self._legs[:1]
        leg, later = begun[-1], self._legs[len(begun) :]
        epoch, part = divmod(epochs - leg.epoch, 1)
        count = len(leg.order.sequences)
        inside = max(0.0, part - leg.done) / (1 - leg.done)
        ordinals = leg.first + int(epoch) * count + int(inside * count)
        # The rest of an epoch is left out where it is too short for the next leg's sequences.
        return min([ordinals, *(each.first for each in later[:1])])

    def _leg(self, ordinal: int) -> Leg:
        return next(leg for leg in reversed(self._legs) if leg.first <= ordinal)
