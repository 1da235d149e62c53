"""Orders of ops in PyTorch's format: there and back, what is skipped, what is said of a wrong file,
and PyTorch itself as the other writer and reader."""

import re

import pytest
from support import in_transformers, pytorch_files

from jaxtrain.schedule.by_name import make_table, packed
from jaxtrain.schedule.files.order_csv import is_order_file, read_schedule, to_order_csv
from jaxtrain.schedule.files.table_csv import to_csv
from jaxtrain.schedule.orders import SCHEDULES, ChunkOrders
from jaxtrain.schedule.table import Op, Table
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check

CASES = [(2, 4), (3, 7), (4, 10), (4, 5), (1, 3)]


def orders_of(table: Table) -> list[list[tuple[int, int, int]]]:
    """Each stage's F, B and W."""
    orders: list[list] = [[] for _ in range(table.stages)]
    _, stages, *cells = (array.tolist() for array in table.busy)
    for stage, *task in zip(stages, *cells, strict=True):
        if task[0] != Op.R:
            orders[stage].append(tuple(task))
    return orders


def spec_of(orders: ChunkOrders, **changes) -> TableSpec:
    return TableSpec(f"csv:{orders.name}", orders.stages, 1, orders.microbatches, **changes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_comes_back_in_its_order(name, tmp_path):
    """In every packing that keeps a stage's order; with R, which PyTorch's format has not."""
    path = tmp_path / "order.csv"
    for stages, microbatches in CASES:
        repeats = SCHEDULES[name].least_repeats if stages > 1 else 1
        for packing, remat in (("late", False), ("early", True), ("spaced", False)):
            spec = TableSpec(name, stages, repeats, microbatches, permute=packing, remat_full=remat)
            table = make_table(spec)
            path.write_text(to_order_csv(table))
            orders = read_schedule(str(path))
            assert isinstance(orders, ChunkOrders)
            assert (orders.stages, orders.microbatches) == (stages, microbatches)
            assert orders.stage_of == table.stage_of and orders.orders == orders_of(table)
            again = packed(orders, spec_of(orders, permute=packing, remat_full=remat))
            check(again)
            if table.chunk_of == tuple(range(table.units)):
                assert orders_of(again) == orders.orders


# by hand: two ranks that hold a V
V_FILE = (
    "0F0,0F1,,3F0,3I0,0SEND_F1, (3F1;3B1)OVERLAP_F_B ,3W0,0RECV_B0,0B0,0BW1",
    "1UNSHARD,1F0,2F0,2B0,1F1,2F1,2W0,2B1,1B0,1B1,1REDUCE_GRAD,1RESHARD",
)


def test_the_actions_of_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes("\r\n".join(("\ufeff# a comment", *V_FILE, "")).encode())
    orders = read_schedule(str(path))
    assert orders.stage_of == (0, 1, 1, 0) and orders.name == "mine"
    f, b, w = int(Op.F), int(Op.B), int(Op.W)
    assert orders.orders[0] == [
        (f, 0, 0), (f, 0, 1), (f, 3, 0), (b, 3, 0), (f, 3, 1), (b, 3, 1), (w, 3, 1), (w, 3, 0),
        (b, 0, 0), (w, 0, 0), (b, 0, 1), (w, 0, 1),
    ]  # fmt: skip
    # 2B0 is an input's gradient, as in older files, for 2W0 is there; 2B1 is both
    assert orders.orders[1] == [
        (f, 1, 0), (f, 2, 0), (b, 2, 0), (f, 1, 1), (f, 2, 1), (w, 2, 0), (b, 2, 1), (w, 2, 1),
        (b, 1, 0), (w, 1, 0), (b, 1, 1), (w, 1, 1),
    ]  # fmt: skip


def test_overlapped_cells_come_back(tmp_path):
    """A pair of a file is one cell if that is asked for, and F, B and W otherwise; but not the pair
    of a microbatch's own F and B."""
    path, again = tmp_path / "mine.csv", tmp_path / "again.csv"
    path.write_text(to_order_csv(make_table(TableSpec("dualpipe_v", 3, 2, 7, overlap=True))))
    orders = read_schedule(str(path))
    for packing in ("late", "early", "spaced", "auto"):
        table = packed(orders, spec_of(orders, permute=packing, overlap=True, remat_full=True))
        check(table)
        assert table.overlapped.sum() == path.read_text().count("OVERLAP") > 10
        again.write_text(to_order_csv(table))
        assert again.read_text() == path.read_text()
        apart = packed(orders, spec_of(orders, permute=packing))
        assert not apart.overlaps and read_schedule(str(path)).orders == orders_of(apart)
    path.write_text("\n".join(V_FILE))
    orders = read_schedule(str(path))
    assert not orders.overlapped and not packed(orders, spec_of(orders, overlap=True)).overlaps
    with pytest.raises(ValueError, match="permute='aligned' takes no overlapped cells: use late"):
        path.write_text(again.read_text())
        orders = read_schedule(str(path))
        packed(orders, spec_of(orders, permute="aligned", overlap=True))


def test_overlapped_cells_that_wait_for_ever_are_refused(tmp_path):
    """1B1 waits for 1F1, which waits for 0F1, which shares a cell with the B that waits for 1B1."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B1,1B0\n")
    orders = read_schedule(str(path))
    check(packed(orders, spec_of(orders, permute="late")))
    with pytest.raises(ValueError, match="never finishes: F0.1 is next and waits for ever"):
        packed(orders, spec_of(orders, permute="late", overlap=True))


def test_which_of_the_two_formats_a_file_has(tmp_path):
    path = tmp_path / "t.csv"
    for text, is_order in (
        ("0F0,0B0\n", True),
        ("# x\n\n,0F0\n", True),
        ("(0F1;0B0)OVERLAP_F_B\n", True),
        (to_csv(make_table(TableSpec("1f1b", 2, 1, 2))), False),
        ("0,1\nF0.0,\n", False),
        ("", False),
    ):
        path.write_text(text)
        assert is_order_file(str(path)) == is_order
    assert not is_order_file(str(tmp_path / "absent.csv"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0X0\n", ", line 1, column '2': '0X0' has the unknown action 'X': use "),
        ("0F0,0RECVF0\n", "has the unknown action 'RECVF': use RECV_F"),
        ("0F0,0B\n", ", line 1, column '2': '0B' has no microbatch: write stage, action and "),
        ("0F0,F0\n", "'F0' is no action: write stage, action and microbatch, such as 0F3"),
        ("0F0,(0F1;0B0\n", "'(0F1;0B0' is no pair: write it such as (0F7;7B3)OVERLAP_F_B"),
        ("0F0,0B0\n1F0,1B0\n0F1,0B1\n", "line 3, column '1': 0F1: stage 0 belongs to the rank of "),
        ("0F0,0F0,0B0\n", "column '2': 0F0 stands already in line 1, column '1', as 0F0: use it"),
        ("0F0,0I0,0B0\n", "column '3': 0B0 stands already in line 1, column '2', as 0I0: use it"),
        ("0F0,0I0\n", ": 0W0 or 0B0 is missing: write it on the rank of stage 0"),
        ("0F0\n1F0,1B0\n", ": 0I0 or 0B0 is missing: write it on the rank of stage 0"),
        ("0F0,0B0,0F2,0B2\n", "column '3': 0F2 has microbatch 2, and microbatch 1 is in no action"),
        ("0F0,0B0\n2F0,2B0\n", "2F0 has stage 2, and stage 1 is in no action: number them from 0"),
        ("0F0,0B0\n,,\n1F0,1B0\n", ", line 2: the rank of this line computes nothing"),
        (
            "0F0,0B0\n2F0,2B0\n1F0,1B0\n3F0,3B0\n",
            ": stage 0 is on rank 0 and stage 1 on rank 2: put them on one rank or on neighbours",
        ),
        (
            "0B0,0F0\n",
            "line 1, column '1': 0B0 waits for 0F0 in line 1, column '2', which is never done",
        ),
        ("0F0,0B0\n1B0,1F0\n", "line 1, column '2': 0B0 waits for 1B0 in line 2, column '1'"),
    ],
)
def test_a_bad_file_is_answered_with_the_place(text, said, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_schedule(str(path))
    assert str(error.value).startswith(str(path)) and said in str(error.value)
    assert "\n" not in str(error.value)


# --- PyTorch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pytorch_files.SHA256)
def test_files_of_pytorchs_tests_come_back_in_their_order(name, tmp_path):
    """Of what stands in DualPipeV's file the overlapped cells, too."""
    path, again = tmp_path / name, tmp_path / "again.csv"
    text = pytorch_files.text_of(name)
    path.write_text(text)
    orders = read_schedule(str(path))
    tables = {
        overlap: packed(orders, spec_of(orders, overlap=overlap, permute="late"))
        for overlap in (False, True)
    }
    for table in tables.values():
        check(table)
        again.write_text(to_order_csv(table))
        assert orders_of(table) == orders.orders == read_schedule(str(again)).orders
    assert not tables[False].overlaps
    pairs = re.findall(r"\(.*?\)OVERLAP_F_B", text)
    assert re.findall(r"\(.*?\)OVERLAP_F_B", again.read_text()) == pairs
    assert bool(pairs) == (name == pytorch_files.DUALPIPEV)
    if pairs:
        both = text
        for i, w in re.findall(r"(\d+I\d+),(\d+W\d+)", text):
            if i.replace("I", "W") == w:  # we write both gradients as one action
                both = both.replace(f"{i},{w}", i.replace("I", "B"))
        assert again.read_text() == both


def expanded(text: str) -> list[list[str]]:
    """The computations of a file in PyTorch's letters, with I and W for both gradients."""
    lines = []
    for line in text.split():
        computed = re.findall(r"\b(\d+)(F|I|W|B)(\d+)\b", line)
        parts = [(s, letter, m) for s, op, m in computed for letter in ("IW" if op == "B" else op)]
        lines.append(["".join(part) for part in parts])
    return lines


@pytest.mark.full
@pytest.mark.skipif(
    not in_transformers.has("torch"),
    reason=f"no PyTorch here: {in_transformers.INSTALL_COMMAND}",
)
def test_pytorch_reads_ours_and_we_read_its(tmp_path):
    """Every schedule that PyTorch has, with and without sends; it takes what we write of it."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(), ours.mkdir()
    in_transformers.run_script("torch_orders.py", "make", theirs)
    written = []
    for path in sorted(theirs.iterdir()):
        orders = read_schedule(str(path))
        table = packed(orders, spec_of(orders, permute="late"))
        check(table)
        assert expanded(to_order_csv(table)) == expanded(path.read_text()), path.name
        if path.stem == "DualPipeV_4_8_10":
            ours_named = make_table(TableSpec("dualpipe_v", 4, 2, 10, permute="late"))
            f_and_b = lambda text: [
                [action for action in line if "W" not in action] for line in expanded(text)
            ]
            assert f_and_b(to_order_csv(ours_named)) == f_and_b(path.read_text())
        if not path.stem.endswith("_comms"):
            written.append(ours / path.name)
            written[-1].write_text(to_order_csv(table))
    for name in SCHEDULES:
        table = make_table(TableSpec(name, 4, SCHEDULES[name].least_repeats, 10, permute="late"))
        written.append(ours / f"{name}.csv")
        written[-1].write_text(to_order_csv(table))
    assert len(written) >= 40
    in_transformers.run_script("torch_orders.py", "read", *written)
