"""The reader of traces: of each platform's form, written as text, and what cannot be read. Real
ones: test_measured_step.py."""

import pytest
from jax.profiler import ProfileData

from jaxtrain.planner.programs.trace import TraceError, TraceEvent, events_of, read


def plane(
    name: str, *lines: str, events: dict[int, str], stats: dict[int, str] | None = None
) -> str:
    """A plane's text; events: names by number; stats: those of their values."""
    metadata = [
        f'event_metadata {{ key: {n} value {{ id: {n} name: "{text}" }} }}'
        for n, text in events.items()
    ]
    metadata += [
        f'stat_metadata {{ key: {n} value {{ id: {n} name: "{text}" }} }}'
        for n, text in (stats or {}).items()
    ]
    return f'planes {{ name: "{name}" {" ".join([*lines, *metadata])} }}'


def line(name: str, *events: str) -> str:
    return f'lines {{ name: "{name}" timestamp_ns: 1000 {" ".join(events)} }}'


def event(number: int, begin_us: int, us: int, **values: object) -> str:
    """stats: s3="text" or i3=1, of the stat with number 3."""
    fields = {"s": "str_value", "i": "int64_value"}
    stats = [
        f"stats {{ metadata_id: {k[1:]} {fields[k[0]]}: {repr(v).replace(chr(39), chr(34))} }}"
        for k, v in values.items()
    ]
    return (
        f"events {{ metadata_id: {number} offset_ps: {begin_us * 10**6} duration_ps: {us * 10**6} "
        f"{' '.join(stats)} }}"
    )


def found(*planes: str) -> dict[int, list[tuple[str, int, int]]]:
    """device → (instruction, or the kernel's name where it names none; its begin and length in
    µs)."""
    read_events = events_of(ProfileData.from_text_proto(" ".join(planes)), "jit_train")
    times = lambda e: (round(1e6 * e.begin) - 1, round(1e6 * (e.end - e.begin)))
    return {
        device: [(e.instruction or f"<{e.kernel}>", *times(e)) for e in events]
        for device, events in read_events.items()
    }


def test_simulated_devices():
    stats = {1: "hlo_module", 2: "hlo_op", 3: "device_ordinal"}
    own = lambda number, begin, device, op: event(
        number, begin, 5, s1="jit_train", s2=op, i3=device
    )
    threads = [
        line("tf_XLAEigen/1", own(1, 0, 0, "dot.1"), event(3, 5, 0), own(1, 6, 1, "dot.1")),
        line(
            "tf_XLAEigen/2", event(2, 0, 5, s1="jit__finite", s2="add", i3=0), own(2, 20, 1, "add")
        ),
    ]
    other = plane("/host:metadata", line("x", event(1, 0, 1)), events={1: "x"})
    host = plane("/host:CPU", *threads, events={1: "dot.1", 2: "add", 3: "end: dot.1"}, stats=stats)
    assert found(other, host) == {0: [("dot.1", 0, 5)], 1: [("dot.1", 6, 5), ("add", 20, 5)]}


def test_a_gpu():
    """A kernel in a graph names no instruction; those of other programs do not count, nor lines
    that are no streams."""
    stats = {1: "hlo_module", 2: "hlo_op"}
    stream = line(
        "Stream #7(Compute)",
        event(1, 0, 4, s1="jit_train", s2="fusion.2"),
        event(2, 5, 3),
        event(1, 9, 9, s1="jit_f", s2="fusion.2"),
    )
    nccl = line("Stream #9(NCCL)", event(3, 1, 2, s1="jit_train", s2="all-reduce-start.1"))
    derived = line("XLA Launches", event(1, 0, 99, s1="jit_train", s2="fusion.2"))
    names = {1: "loop_add_fusion_2", 2: "nvjet_hsh", 3: "ncclDevKernel_AllReduce"}
    assert found(plane("/device:GPU:1", stream, nccl, derived, events=names, stats=stats)) == {
        1: [("fusion.2", 0, 4), ("<nvjet_hsh>", 5, 3), ("all-reduce-start.1", 1, 2)]
    }


def test_a_tpu():
    """Instructions are named alone or with their whole text; those outside of the program's runs
    are another's."""
    modules = line("XLA Modules", event(4, 0, 10), event(5, 20, 10), event(4, 40, 10))
    ops = line("XLA Ops", event(1, 0, 4), event(2, 4, 2), event(2, 22, 2), event(1, 41, 4))
    beside = line("Async XLA Ops", event(3, 1, 8))
    steps = line("Steps", event(6, 0, 50))
    names = {
        1: "%fusion.3 = bf16[8,4]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput",
        2: "copy.1",
        3: "%all-gather-start.2 = (bf16[4]) x(%a)",
    }
    names |= {4: "jit_train(123456)", 5: "jit_train_other(7)", 6: "3"}
    planes = [
        plane("/device:TPU:0", modules, ops, beside, steps, events=names),
        plane("/device:TPU:0 SparseCore 0", ops, events=names),
    ]
    assert found(*planes) == {
        0: [("fusion.3", 0, 4), ("copy.1", 4, 2), ("fusion.3", 41, 4), ("all-gather-start.2", 1, 8)]
    }
    assert TraceEvent("a", "k", 0.0, 1.0).end == 1.0


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="has no trace"):
        read(tmp_path, "jit_train")
    (tmp_path / "plugins").mkdir()
    file = tmp_path / "plugins" / "vm.xplane.pb"
    file.write_bytes(b"\xff\xff no protobuf")
    with pytest.raises(TraceError, match="vm.xplane.pb"):
        read(tmp_path, "jit_train")
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(plane("/host:CPU", events={})))
    with pytest.raises(TraceError, match="has no event of jit_train"):
        read(tmp_path, "jit_train")
