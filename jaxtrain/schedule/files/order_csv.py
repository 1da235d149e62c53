"""The order of ops of a schedule as a CSV file in the format of PyTorch's pipelining
(torch.distributed.pipelining.schedules, `_load_csv`), which torchtitan reads, too.

    0F0,0F1,2F0,,2F1,2B0,(0F2;2B1)OVERLAP_F_B,…      a line is a rank, in order
    ,1F0,1F1,3F0,3I0,3F1,3I1,3W0,…

A number before a letter is PyTorch's stage, which is a chunk or unit here; PyTorch's rank is a
stage here. The number after it is a microbatch.

    F   forward                          F
    I   gradient of the input            B
    W   gradient of the weights          W
    B   both gradients                   B and W, one after the other; `BW` in older files. Older
                                         files also write B for I: then they have a W of their own
    OVERLAP_F_B   F and both gradients   F and B in one overlapped cell where `TableSpec.overlap`
                                         asks for it, then W; without it F, B, W

Files give the order alone: empty cells are skipped, and so are actions that send, receive, gather
parameters and reduce gradients, which the runtime does by its own rules. packing.py finds the
ticks.

How to read this file: `read_schedule` reads either format, `_orders` this one; the functions behind
it read cells and check. `to_order_csv` writes. No JAX here.
"""

import difflib
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtrain.schedule.files.csv_text import FileError, read_text, split_line
from jaxtrain.schedule.files.table_csv import read_csv
from jaxtrain.schedule.orders import ChunkOrders
from jaxtrain.schedule.orders.stage_orders import Orders, Task
from jaxtrain.schedule.table import Op, ScheduleError, Table, TableError, directions

ACTION = re.compile(r"(\d{1,6})([A-Z_]+?)(\d{0,6})", re.ASCII)
PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
COMPUTES = {
    "F": (Op.F,),
    "I": (Op.B,),
    "W": (Op.W,),
    "B": (Op.B, Op.W),
    "BW": (Op.B, Op.W),
}
SKIPPED = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


class _Action(NamedTuple):
    """A computation of a file's cell.

    letters: a key of COMPUTES; line: the rank's; column: the cell's number in its line, from 1
    in_pair: a part of an OVERLAP_F_B
    """

    letters: str
    chunk: int
    microbatch: int
    line: int
    column: str
    in_pair: bool = False

    @property
    def name(self) -> str:
        """The action as the file has it."""
        return f"{self.chunk}{self.letters}{self.microbatch}"


# --- reading --------------------------------------------------------------------------------------


def read_schedule(path: str) -> Table | ChunkOrders:
    """The checked table of a file, or the checked orders of one in PyTorch's format. Raises
    ScheduleError, with file, line, column and what would be right."""
    text = read_text(path)
    if not _is_order(text):
        return read_csv(path, text)
    try:
        return _orders(text, pathlib.Path(path).stem)
    except FileError as error:
        raise error.of(path) from None


def is_order_file(path: str) -> bool:
    """True for a file in PyTorch's format; False for any other, also one that cannot be read."""
    try:
        return pathlib.Path(path).is_file() and _is_order(read_text(path))
    except ScheduleError:
        return False


def _is_order(text: str) -> bool:
    """True if the earliest line that is no comment has a cell that begins as an action does."""
    lines = (
        line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")
    )
    # "0F0,0F1,…", ",1F0,…" and "(0F2;2B1)OVERLAP_F_B"; the header of a table begins with "stage 0"
    return bool(re.search(r'(^|,)[\s"]*\(?\s*\d+[A-Za-z_]', next(lines, "")))


def _orders(text: str, name: str) -> ChunkOrders:
    """The orders of a file's text. Raises FileError."""
    ranks = [
        (number, list(_actions(line, number)))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for number, actions in ranks:
        if not actions:
            raise FileError("the rank of this line computes nothing: give it a stage", number)
    every = [action for _, actions in ranks for action in actions]
    microbatches, chunks = _count(every, "microbatch"), _count(every, "chunk")
    stage_of = _stage_of([actions for _, actions in ranks], chunks)
    # Older files write B for the gradient of the input, if the microbatch has a W of its own.
    with_w = {(a.chunk, a.microbatch) for a in every if a.letters == "W"}
    actions_of_task: dict[Task, _Action] = {}
    orders: Orders = []
    overlapped: set[Task] = set()
    for _, actions in ranks:
        order: list[Task] = []
        for action in actions:
            ops: tuple[Op, ...] = COMPUTES[action.letters]
            if action.letters == "B" and action[1:3] in with_w:
                ops = (Op.B,)
            for op in ops:
                task = (int(op), action.chunk, action.microbatch)
                if task in actions_of_task:
                    earlier = actions_of_task[task]
                    raise FileError(
                        f"{action.name} stands already in line {earlier.line}, column "
                        f"{earlier.column!r}, as {earlier.name}",
                        action.line,
                        action.column,
                        use="it once",
                    )
                actions_of_task[task] = action
                order.append(task)
        orders.append(order)
        overlapped |= {
            task for task, b in itertools.pairwise(order) if _share_a_cell(actions_of_task, task, b)
        }
    _check_complete(actions_of_task, chunks, microbatches)
    _check_ends(orders, actions_of_task, chunks)
    return ChunkOrders(name, stage_of, microbatches, orders, frozenset(overlapped))


def _share_a_cell(actions: dict[Task, _Action], task: Task, following: Task) -> bool:
    """True for an F and the B after it that a file has as one OVERLAP_F_B. A microbatch's own B
    waits for its F, and shares no cell with it."""
    # (0F2;2B1)OVERLAP_F_B gives F0.2, B2.1 and W2.1: F and B are neighbours in the order, and come
    # from one cell of the file.
    f, b = actions[task], actions[following]
    one_cell = f.in_pair and b.in_pair and (f.line, f.column) == (b.line, b.column)
    return one_cell and (task[0], following[0]) == (Op.F, Op.B) and task[2] != following[2]


def _actions(line: str, number: int) -> Iterator[_Action]:
    """The computations of a rank's line, in order."""
    for index, field in enumerate(split_line(line, number), 1):
        column = str(index)
        parts, pair = [field], PAIR.fullmatch(field)
        if pair:
            parts = [part.strip() for part in pair[1].split(";")]
        elif field.startswith("("):
            raise FileError(
                f"{field[:40]!r} is no pair: write it such as (0F7;7B3)OVERLAP_F_B",
                number,
                column,
            )
        for part in filter(None, parts):
            match = ACTION.fullmatch(part)
            letters = match[2] if match else ""
            if not match or (letters not in SKIPPED and not (letters in COMPUTES and match[3])):
                raise _no_action(part, letters, number, column)
            if letters in COMPUTES:
                yield _Action(
                    letters, int(match[1]), int(match[3]), number, column, pair is not None
                )


def _no_action(part: str, letters: str, line: int, column: str) -> FileError:
    """The error of a cell that is no action. letters: those after its stage, if any."""
    form = "write stage, action and microbatch, such as 0F3"
    if letters in COMPUTES:
        return FileError(f"{part[:40]!r} has no microbatch: {form}", line, column)
    if letters:
        near = difflib.get_close_matches(letters, [*COMPUTES, *SKIPPED], n=1, cutoff=0.6)
        rule = f"{part[:40]!r} has the unknown action {letters[:40]!r}"
        return FileError(rule, line, column, use=near[0] if near else "F, I, W or B")
    return FileError(f"{part[:40]!r} is no action: {form}", line, column)


def _count(actions: Sequence[_Action], field: str) -> int:
    """The number of microbatches or chunks. Raises FileError if one below the largest is in no
    action."""
    noun = "stage" if field == "chunk" else field
    # Numbers 0 1 3 have the gap 2, which is below their count, so 3 is one too many. Numbers 0 1 2
    # have the gap 3, their count.
    present = {getattr(action, field) for action in actions}
    gap = next(number for number in range(len(present) + 1) if number not in present)
    if gap < len(present):
        beyond = next(action for action in actions if getattr(action, field) > gap)
        raise FileError(
            f"{beyond.name} has {noun} {getattr(beyond, field)}, and {noun} {gap} is in no action: "
            "number them from 0 on",
            beyond.line,
            beyond.column,
        )
    return gap


def _stage_of(ranks: Sequence[Sequence[_Action]], chunks: int) -> tuple[int, ...]:
    """The rank that holds each chunk. Raises FileError for a chunk on two of them, and for
    consecutive chunks on ranks that are not neighbours."""
    # chunk → its rank, and the action that put it there, for the error
    holder: dict[int, tuple[int, _Action]] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            other, earlier = holder.setdefault(action.chunk, (rank, action))
            if other != rank:
                raise FileError(
                    f"{action.name}: stage {action.chunk} belongs to the rank of line "
                    f"{earlier.line}, by its {earlier.name}: leave it to one rank",
                    action.line,
                    action.column,
                )
    stage_of = tuple(holder[chunk][0] for chunk in range(chunks))
    try:
        directions(stage_of, len(ranks))
    except TableError as error:
        # PyTorch's words: its ranks are stages here, its stages units.
        raise FileError(error.rule.replace("stage", "rank").replace("unit", "stage")) from None
    return stage_of


def _check_complete(actions: dict[Task, _Action], chunks: int, microbatches: int) -> None:
    """Raises FileError unless every chunk has F, B and W of every microbatch."""
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            for op, letters in ((Op.F, "F"), (Op.B, "I"), (Op.W, "W")):
                if (int(op), chunk, microbatch) not in actions:
                    both = f" or {chunk}B{microbatch}" if letters != "F" else ""
                    raise FileError(
                        f"{chunk}{letters}{microbatch}{both} is missing: write it on the rank of "
                        f"stage {chunk}"
                    )


def _check_ends(orders: Orders, actions: dict[Task, _Action], chunks: int) -> None:
    """Raises FileError for a rank that waits for ever."""

    def waits_for(task: Task) -> Task | None:
        """The task before it that is not done yet."""
        op, chunk, microbatch = task
        # of the last chunk's B, the head stands in the tick of its F
        before = {
            Op.F: [(Op.F, chunk - 1)],
            Op.B: [(Op.F, chunk), (Op.B, chunk + 1)],
            Op.W: [(Op.B, chunk)],
        }[Op(op)]
        tasks = [(int(op), chunk, microbatch) for op, chunk in before if 0 <= chunk < chunks]
        return next((task for task in tasks if task not in done), None)

    # Each rank does its tasks as far as those that they wait for are done, round by round. A rank
    # that has tasks left when no rank moves waits for ever.
    done: set[Task] = set()
    at = [0] * len(orders)
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and waits_for(order[at[rank]]) is None:
                done.add(order[at[rank]])
                at[rank] += 1
                moving = True
    for rank, order in enumerate(orders):
        if at[rank] < len(order):
            action = actions[order[at[rank]]]
            awaited = waits_for(order[at[rank]])
            assert awaited is not None
            source = actions[awaited]
            raise FileError(
                f"{action.name} waits for {source.name} in line {source.line}, column "
                f"{source.column!r}, which is never done: move it after that",
                action.line,
                action.column,
            )


# --- writing --------------------------------------------------------------------------------------


def to_order_csv(table: Table) -> str:
    """The text of a file in PyTorch's format with a table's order: a line a stage, whose numbers
    are units. R is part of PyTorch's backward, and is left out."""
    # B0 and W0 one after the other are one action "0B0"; a B without its W is "0I0". An F and a B
    # of one cell become a pair, for which the F's action is taken back from the list.
    lines = []
    of_b = (array[table.overlapped].tolist() for array in (table.b_unit, table.b_microbatch))
    overlapped = {(Op.B, unit, microbatch) for unit, microbatch in zip(*of_b, strict=True)}
    for order in table.orders:
        tasks = [task for task in order if task.op != Op.R]
        actions: list[str] = []
        following = iter([*tasks[1:], None])
        for op, unit, microbatch in (remaining := iter(tasks)):
            after = next(following)
            letters = {Op.F: "F", Op.B: "I", Op.W: "W"}[Op(op)]
            if op == Op.B and after == (Op.W, unit, microbatch):
                letters = "B"
                next(remaining), next(following)
            action = f"{unit}{letters}{microbatch}"
            if (op, unit, microbatch) in overlapped:
                action = f"({actions.pop()};{action})OVERLAP_F_B"
            actions.append(action)
        lines.append(",".join(actions))
    return "\n".join(lines) + "\n"
