"""PyTorch's pipelining as a second writer and reader of files with orders, run by in_transformers.

make FOLDER        writes the file of every schedule that PyTorch has, for several ranks, stages and
                   microbatches: NAME_RANKS_STAGES_MICROBATCHES.csv, and of the same with sends and
                   receives NAME_…_comms.csv
read FILE…         reads each by PyTorch's parser, which checks it, and adds sends and receives
"""

import pathlib
import re
import sys
import types

from torch.distributed.pipelining import schedules

# not 1F1B, whose last rank begins with 1F1 and has no 1F0 (torch 2.13, two ranks)
SINGLE = ("GPipe",)
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stage(ranks: int, stages: int, index: int) -> types.SimpleNamespace:
    """What a schedule asks of a stage, without its module and its processes."""
    return types.SimpleNamespace(
        group_size=ranks,
        group_rank=0,
        num_stages=stages,
        stage_index=index,
        is_first=index == 0,
        is_last=index == stages - 1,
        submod=None,
        has_backward=True,
    )


def schedule_of(name: str, ranks: int, stages: int, microbatches: int):
    """PyTorch's schedule."""
    made = schedules.get_schedule_class(name)
    loss = lambda output, target: output
    if name in SINGLE:
        return made(stage(ranks, stages, 0), microbatches, loss_fn=loss)
    return made([stage(ranks, stages, i) for i in range(stages // ranks)], microbatches, loss)


def write(path: pathlib.Path, order: dict) -> None:
    """An order as PyTorch's `_dump_csv` writes it."""
    lines = (",".join(str(action or "") for action in order[rank]) for rank in sorted(order))
    path.write_text("\n".join(lines) + "\n")


def make(folder: str) -> None:
    for ranks, microbatches in ((2, 4), (2, 7), (3, 6), (4, 10), (4, 8)):
        for name in (*SINGLE, *LOOPED, *V_SHAPED):
            for local in (1,) if name in SINGLE else (2,) if name in V_SHAPED else (2, 3):
                stages = ranks * local
                if name in V_SHAPED and microbatches < stages:
                    continue
                if name in LOOPED and microbatches % ranks:
                    continue
                known = schedule_of(name, ranks, stages, microbatches)
                path = pathlib.Path(folder, f"{name}_{ranks}_{stages}_{microbatches}.csv")
                write(path, known.pipeline_order)
                comms = getattr(known, "pipeline_order_with_comms", None)
                if comms:
                    write(path.with_name(path.stem + "_comms.csv"), comms)


def read(path: str) -> None:
    """Raises AssertionError unless PyTorch takes the file."""
    lines = pathlib.Path(path).read_text().split()
    numbers = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)F(\d+)", ",".join(lines))]
    ranks, stages = len(lines), max(numbers)[0] + 1
    microbatches = max(microbatch for _, microbatch in numbers) + 1
    stages_of_rank = [stage(ranks, stages, i) for i in range(max(1, stages // ranks))]
    runtime = schedules._PipelineScheduleRuntime(stages_of_rank, microbatches)
    runtime._load_csv(path)
    assert len(runtime.pipeline_order_with_comms) == ranks


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    for argument in arguments:
        {"make": make, "read": read}[command](argument)
