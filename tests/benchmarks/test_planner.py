"""The planner beside published runs."""

import statistics

import errors_by_kind
import planner
import pytest


def test_errors():
    """Of all rows; constants are fitted to those of six sources, not to Llama 3's."""
    errors = {row.name: abs(row.error) for row in planner.rows()}
    assert len(errors) == 26
    assert statistics.median(errors.values()) < 0.1
    assert max(errors.values()) < 0.2, max(errors, key=errors.get)


def test_the_documentation_and_the_file_of_plans_have_today_s_errors():
    """`python benchmarks/planner.py --write` brings them up to date."""
    groups = planner.groups()
    counted = errors_by_kind.counted(groups)
    assert errors_by_kind.VALIDATION.read_text() == errors_by_kind.validation(counted)
    text = errors_by_kind.PAGE.read_text()
    assert errors_by_kind.page(groups, text) == text
    readme = (errors_by_kind.ROOT / "README.md").read_text()
    for name, end in (("rows of 2025 and 2026", "published rows"), (planner.NOT_FITTED, "that")):
        sizes = [abs(run.error) for run in groups[name]]
        assert f"{statistics.median(sizes):.1%} " in readme and f" on {len(sizes)} {end} " in readme


def test_a_row_of_another_table_is_predicted(tmp_path, capsys):
    """With the columns of rows_2026.csv, as rows have that nobody here has seen."""
    lines = (planner.FOLDER / "rows_2026.csv").read_text().splitlines()
    chosen = [line for line in lines if line.startswith(("row,", "40,", "145,", "16,"))]
    (path := tmp_path / "rows.csv").write_text("\n".join(chosen))
    planner.main([f"--rows={path}", "--markdown"])
    out = capsys.readouterr().out
    assert "| 145: Llama-3-70B on 64 h100, bfloat16 | torchtitan | " in out
    assert "2 rows of 2025 and 2026" in out and "1 not planned: 16 (" in out


@pytest.mark.parametrize("row", planner.rows(), ids=lambda row: row.name)
def test_a_layout_uses_the_run_s_devices_and_batch(row):
    assert str(row.work.layout.devices) in row.name.replace(",", "") or "torchtitan" in row.name
    assert row.work.layout.microbatches >= 1


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("framework", "caffe", "framework 'caffe' is not known (jaxtrain, megatron2021, "),
        ("framework", "megatron_core@25.11", "a release is read in source)"),
        ("device_kind", "", "device_kind '' is no device"),
        ("devices", "0", "devices '0' is no number of devices"),
        ("rate", "nan", "rate 'nan' is no positive number"),
        ("rate", "-5", "rate '-5' is no positive number"),
        ("rate_unit", "parsecs", "rate_unit 'parsecs' is not s, TFLOP/s/… or tokens/s/…"),
        ("flags", "model.layers", "flags 'model.layers' is no SETTING=VALUE"),
        ("flags", "model.wings=2", "flags 'model.wings=2' is no SETTING=VALUE"),
        ("rate", None, "has no column rate"),
        ("", "", "cannot be read as a table"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(tmp_path, capsys, column, value, said):
    path = tmp_path / "rows.csv"
    if column:
        (row,) = (row for row in planner.read("rows_2026") if row["row"] == "40")
        row[column] = value
        text = "\n".join(",".join(f'"{cell}"' for cell in cells) for cells in (row, row.values()))
        path.write_text(text.replace('"rate",', "") if value is None else text)
    with pytest.raises(SystemExit) as ended:
        planner.main([f"--rows={path}"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"--rows={path}" in error and said in error
