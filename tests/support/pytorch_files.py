"""Two files of PyTorch's own tests (test/distributed/pipelining/artifacts), made from what their
schedules are, and checked by their checksums."""

import hashlib
from collections.abc import Iterator

DUALPIPEV, ZB1P = "dualpipev_4rank_10mb.csv", "zb1p_2rank_2stagep_compute.csv"
SHA256 = {
    DUALPIPEV: "16ce4a29936e4c5ad774098add32489b4937942e3f5ab0108f17d2826b184529",
    ZB1P: "0dd1690c4034ac9d644a32eb48c8540873c6e4a6f8db14919c9b67e9818958db",
}


def text_of(name: str) -> str:
    """The text of a file, byte for byte PyTorch's."""
    lines = dualpipev(4, 10) if name == DUALPIPEV else zb1p(8)
    text = "".join(",".join(line) + "\n" for line in lines)
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256[name], name
    return text


class _Rank:
    """A rank's line: actions of chunks with their next microbatches."""

    def __init__(self):
        self.line: list[str] = []
        self._next: dict[str, int] = {}
        self._weights: list[str] = []  # whose gradients wait

    def named(self, chunk: int, letter: str) -> str:
        kind = f"{chunk}{'F' if letter == 'F' else 'B'}"
        microbatch = self._next[kind] = self._next.get(kind, -1) + 1
        if letter == "I":
            self._weights.append(f"{chunk}W{microbatch}")
        return f"{chunk}{letter}{microbatch}"

    def add(self, *actions: tuple[int, str]) -> None:
        self.line += [self.named(*action) for action in actions]

    def weights(self) -> None:
        """The earliest gradient of weights that waits."""
        self.line.append(self._weights.pop(0))

    def pair(self, forward: int, backward: int) -> None:
        actions = self.named(forward, "F"), self.named(backward, "B")
        self.line.append(f"({';'.join(actions)})OVERLAP_F_B")

    @property
    def waits(self) -> bool:
        return bool(self._weights)


def dualpipev(ranks: int, microbatches: int) -> Iterator[list[str]]:
    """DualPipe in a V, step by step as its authors number them."""
    for r in range(ranks):
        rank, down, back, after = _Rank(), r, 2 * ranks - 1 - r, ranks - r - 1
        rank.add(*[(down, "F")] * (2 * after))
        rank.add(*[(down, "F"), (back, "F")] * (r + 1))
        for _ in range(after):
            rank.add((back, "I"))
            rank.weights()
            rank.add((back, "F"))
        for i in range(microbatches - 2 * ranks + r + 1):
            if i == 0 and after == 0:
                rank.add((down, "F"), (back, "B"))
            else:
                rank.pair(down, back)
            rank.pair(back, down)
        for _ in range(after):
            rank.add((back, "B"))
            rank.pair(back, down)
        # from the middle on without the gradients of weights
        for i in range(2 * (r + 1)):
            rank.add(((back, down)[i % 2], "B" if i < r + 1 else "I"))
        for _ in range(after):
            rank.weights()
            rank.add((down, "I"))
        while rank.waits:
            rank.weights()
        yield rank.line


def zb1p(microbatches: int) -> Iterator[list[str]]:
    """Interleaved 1F1B with two stages on each of two ranks, whose second rank is one behind with
    W. B is the input's gradient, as in older files; an empty cell is an idle step."""
    for r in range(2):
        pairs = [(k, k + 1) for k in range(0, microbatches, 2)]
        forward = [f"{c}F{k}" for pair in pairs for c in (r, 2 + r) for k in pair]
        backward = [(c, k) for pair in pairs for c in (2 + r, r) for k in pair]
        b, w = ([f"{c}{letter}{k}" for c, k in backward] for letter in "BW")
        if r == 0:
            line = [*forward[:3], "", forward[3]]
            for i, (of_b, of_w) in enumerate(zip(b, w, strict=True)):
                line += [of_b, of_w, *forward[i + 4 : i + 5]]
        else:
            line = ["", *forward[:2]]
            for i, of_b in enumerate(b):
                line += [*forward[i + 2 : i + 3], of_b, *w[max(0, i - 1) : i]]
            line.append(w[-1])
        yield line
