"""The command `python -m jaxtrain.schedule`: output, files, JSON, and one line for whatever is
wrong. Most run in this process; what a terminal, a pipe or a start has to say runs as one."""

import contextlib
import io
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from by_hand.fuzz_configs import suggested
from support import ROOT

from jaxtrain import cli, schedule_flags, show_schedule as schedule
from jaxtrain.config.flags import read_flags, settled
from jaxtrain.schedule.by_name import NAMES
from jaxtrain.schedule.orders import SCHEDULES
from jaxtrain.schedule_flags import FLAGS, check_flags
from jaxtrain.show_schedule import shown_by

KEYS = {
    "ticks",
    "step_time",
    "bubble_fraction",
    "bubble_fraction_span",
    "bubble_fraction_coupled",
    "peak_residuals",
    "pool_sizes",
}
# Qi et al. 2023, in ms, with 8 stages and 24 microbatches
PUBLISHED = "--times=18.522,18.086,9.337,0.601"


def process(*arguments, **given):
    """The command as a process, ended."""
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.schedule", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        **given,
    )


def run(*arguments, cwd=None):
    """The same of the command in this process, which has imported what it needs."""
    status, out, err = 0, io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = schedule.main(arguments) or 0
        except SystemExit as ended:
            status = ended.code or 0
    return subprocess.CompletedProcess(arguments, int(status), out.getvalue(), err.getvalue())


def figures(*arguments, cwd=None) -> dict:
    done = run("--json", *arguments, cwd=cwd)
    # a slow machine may say how far it is
    assert done.returncode == 0 and "error" not in done.stderr
    return json.loads(done.stdout)


def test_the_timeline_and_the_figures():
    flags = ("--schedule=zb_v", "--stages=4", "--microbatches=8", "--repeats=2")
    done = process(*flags)
    assert done.stdout == run(*flags).stdout
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert done.stdout.count("stage 3 ") >= 2 and "F1.0" in done.stdout
    assert "0.00% of the longest span" in done.stdout and "8 8 8 8 chunks" in done.stdout


def test_json():
    report = figures("--schedule=zb_v", "--stages=4", "--microbatches=8", "--repeats=2")
    assert report.keys() >= KEYS
    assert report["bubble_fraction_span"] == 0 and report["peak_residuals"] == [8, 8, 8, 8]
    # 48 chunk ops of half a unit each, and 3 of idle time.
    assert (report["ticks"], report["step_time"], report["step_time_coupled"]) == (51, 25.5, 25.5)
    assert report["bubble_fraction"] == pytest.approx(3 / 51)
    assert set(report["pool_sizes"]) == {
        "activation",
        "gradient",
        "residual_b",
        "residual_w",
        "weight_stash",
    }


def test_published_rates():
    shared = ("--stages=8", "--microbatches=24", PUBLISHED)
    assert figures("--schedule=1f1b", "--fused_backward", *shared)[
        "bubble_fraction_span"
    ] == pytest.approx(0.2431, abs=5e-4)
    assert figures("--schedule=zb_h1", *shared)["bubble_fraction_span"] == pytest.approx(
        0.1585, abs=5e-4
    )


def test_files_and_back(tmp_path):
    flags = ("--microbatches=6", "--times=2,2,1,0.1", "--recompute=2")
    done = run(
        "--schedule=interleaved", *flags, "--csv=t.csv", "--svg=t.svg", "--png=t.png", cwd=tmp_path
    )
    assert done.returncode == 0
    assert (tmp_path / "t.svg").read_text().startswith("<svg") and (
        tmp_path / "t.png"
    ).read_bytes().startswith(b"\x89PNG")
    one = figures("--schedule=interleaved", *flags)
    two = figures("--schedule=csv:t.csv", *flags, "--csv=again.csv", cwd=tmp_path)
    assert one == two and (tmp_path / "again.csv").read_text() == (tmp_path / "t.csv").read_text()


def test_compare_is_best_first_within_the_memory():
    flags = ("--compare", "--stages=4", "--microbatches=8", "--times=2,2,1,0.1", "--memory=4")
    rows = figures(*flags)
    assert len(rows) == len(NAMES) and sum(r["schedule"].startswith("auto") for r in rows) == 1
    fitting = [r for r in rows if r["fits"]]
    assert rows[: len(fitting)] == fitting and 2 <= len(fitting) < len(NAMES)
    assert all(r["memory"] <= 4 for r in fitting) and all(
        r["memory"] > 4 for r in rows[len(fitting) :]
    )
    times = [r["step_time_coupled"] for r in fitting]
    assert times == sorted(times) and any(
        r["schedule"].startswith("auto") for r in fitting if r["step_time_coupled"] == times[0]
    )
    text = run(*flags).stdout
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == [r["schedule"] for r in rows]


def test_compare_overlaps_where_that_is_possible():
    flags = ("--compare", "--stages=2", "--microbatches=4")
    plain, overlapped = (
        {row["schedule"]: row["step_time_coupled"] for row in figures(*flags, *more)}
        for more in ((), ("--overlap=0.4",))
    )
    assert overlapped["gpipe"] == plain["gpipe"] and overlapped["zb_h1"] == plain["zb_h1"]
    assert overlapped["dualpipe_v"] < plain["dualpipe_v"]


def test_every_schedule_by_name():
    for name in NAMES:
        assert (
            figures(
                f"--schedule={name}",
                "--stages=3",
                "--microbatches=4",
                "--head=1",
                "--vocabulary=end_stages",
            )["microbatches"]
            == 4
        )


def test_vocabulary_parallelism_shares_a_large_head():
    flags = ("--schedule=1f1b", "--stages=4", "--microbatches=16", "--head=4")
    shared, alone = (figures(*flags, f"--vocabulary={v}") for v in ("parallel", "end_stages"))
    assert shared["step_time_coupled"] < alone["step_time_coupled"]
    assert max(shared["peak_residuals"]) <= max(alone["peak_residuals"]) + 2


def test_colour_on_a_terminal_alone():
    def on_a_terminal(**environment) -> bytes:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain.schedule", "--stages=2", "--microbatches=2"],
            env={k: v for k, v in os.environ.items() if k != "NO_COLOR"}
            | {"PYTHONPATH": str(ROOT)}
            | environment,
            stdout=theirs,
        )
        os.close(theirs)
        data = b""
        try:
            while chunk := os.read(ours, 4096):
                data += chunk
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert process.wait(60) == 0
        return data

    assert b"\x1b[48;2;" in on_a_terminal()
    assert b"\x1b" not in on_a_terminal(NO_COLOR="1")


def test_ctrl_c_in_a_search_is_one_line_and_leaves_no_file(tmp_path):
    """On a terminal the search shows in place how far it is; what was drawn is gone before the
    line."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxtrain.schedule",
            "--schedule=auto",
            "--stages=64",
            "--microbatches=1024",
            "--csv=t.csv",
            "--svg=t.svg",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            if b"%" not in said and b"%" in chunk:
                process.send_signal(signal.SIGINT)
            said += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert (
        process.wait(60) == 130 and process.stdout.read() == b"" and list(tmp_path.iterdir()) == []
    )
    shown, _, last = said.rpartition(b"\r\x1b[K")
    assert (
        b"auto [" in shown
        and b"\n" not in shown
        and last == b"stopped: no file is half written\r\n"
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    old, link, pipe = tmp_path / "old.csv", tmp_path / "link.csv", tmp_path / "pipe"
    old.write_text("before")
    link.symlink_to(old)

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            cli.write_output(str(link), b"after")
    assert old.read_text() == "before" and {p.name for p in tmp_path.iterdir()} == {
        "old.csv",
        "link.csv",
    }
    cli.write_output(str(link), b"after")
    assert old.read_text() == "after" and link.is_symlink()
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    cli.write_output(str(pipe), b"through")
    assert reader.communicate(timeout=60)[0] == b"through" and pipe.is_fifo()
    monkeypatch.setattr(cli, "READER_S", 0.1)
    with pytest.raises(cli.FlagsError, match="cannot be written \\(nobody reads it\\)"):
        cli.write_output(str(pipe), b"to nobody")


def test_a_large_table_is_cut_where_it_is_shown_and_whole_in_its_files(tmp_path):
    done = run(
        "--schedule=zb_h1",
        "--stages=24",
        "--microbatches=500",
        "--csv=t.csv",
        "--svg=t.svg",
        cwd=tmp_path,
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) < 500 and "stage 7: 7; …; stage 16: 16" in lines[0]
    cut = next(line for line in lines if "are not shown" in line)
    first, last = map(int, re.findall(r"\d+", cut)[:2])
    starts = [int(line.split()[1]) for line in lines if line.strip().startswith("tick ")]
    assert (
        cut.startswith(f"ticks {first} to {last} are not shown: --csv=FILE writes all")
        and last + 1 in starts
        and max(starts) > last
    )
    ticks = (tmp_path / "t.csv").read_text().count("\n") - 2
    assert ticks > last and re.search(rf"^ticks +{ticks} ", done.stdout, re.MULTILINE)
    drawing = ElementTree.fromstring((tmp_path / "t.svg").read_text())
    paths = drawing.findall("{http://www.w3.org/2000/svg}path")
    assert len(paths) == 24 * 3 and sum(path.get("d").count("h") for path in paths) == 24 * 500 * 3


def test_a_table_through_a_pipe(tmp_path):
    """A file is read once."""
    table = process(
        "--schedule=1f1b", "--stages=2", "--microbatches=3", "--csv=/dev/stdout", "--json"
    ).stdout.rpartition("\n{")[0]
    done = process("--schedule=csv:/dev/stdin", "--json", input=table)
    assert done.returncode == 0 and json.loads(done.stdout)["microbatches"] == 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pictures_in_docs_are_of_the_present_tables(name, tmp_path):
    done = run(
        f"--schedule={name}", "--stages=4", "--microbatches=8", f"--svg={tmp_path / 'now.svg'}"
    )
    assert done.returncode == 0
    stored = (ROOT / "docs" / "schedules" / f"{name}.svg").read_text()
    assert stored == (tmp_path / "now.svg").read_text(), (
        f"draw docs/schedules/{name}.svg again, and look at it"
    )


@pytest.mark.parametrize(
    ("flags", "use"),
    [
        (["--microbatches=1000000"], "--microbatches=46"),
        (["--repeats=2147483647"], "--repeats=1"),
        (["--stages=1000003", "--microbatches=1000003"], "--microbatches=1 --stages=13"),
        (
            ["--ops_per_chunk=1000003", "--schedule=interleaved", "--repeats=1000003"],
            "--ops_per_chunk=1 --repeats=8",
        ),
    ],
)
def test_what_is_too_large_is_refused_with_what_is_not(monkeypatch, capsys, flags, use):
    """By a bound that tables are made for in no time; the real one allows some ten seconds."""
    monkeypatch.setattr(schedule_flags, "MOST_CELLS", 400)
    assert schedule.main(flags) == 2
    line = capsys.readouterr().err.strip()
    assert "is more than 400 tasks: use " in line and line.rpartition(": use ")[2] == use
    schedule.main([*flags, *use.split()])


def test_a_comparison_makes_many_tables_and_has_a_lower_bound(monkeypatch, capsys):
    """All schedules of as many tasks as one may have took minutes."""
    assert schedule_flags.MOST_COMPARED_CELLS < schedule_flags.MOST_CELLS
    monkeypatch.setattr(schedule_flags, "MOST_COMPARED_CELLS", 200)
    assert schedule.main(["--compare", "--microbatches=46"]) == 2
    line = capsys.readouterr().err.strip()
    assert "--microbatches=46 with" in line and "is more than 200 tasks" in line
    schedule.main(["--microbatches=46"])  # one table of them is made
    schedule.main(["--compare", *line.rpartition(": use ")[2].split()])


def test_help_and_a_start_without_jax():
    done = process("--help")
    assert done.returncode == 0 and all(
        f"--{flag}" in done.stdout
        for flag in ("times", "compare", "fused_backward", "memory", "head")
    )
    code = (
        "import sys; from jaxtrain.show_schedule import main; main(['--json']); "
        "sys.exit(len({'jax', 'matplotlib'} & {*sys.modules}))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
        ).returncode
        == 0
    )


def _passes_with_what_is_suggested(arguments: list[str], line: str, folder: pathlib.Path) -> None:
    words = [word for word in suggested(line) if word != "--help,"]
    if words and " (and " not in line:
        flags = read_flags([*arguments, *words], "", FLAGS, with_config=False)
        with contextlib.chdir(folder):
            settled(flags, lambda reading: shown_by(check_flags(reading.namespace)))


def test_a_mistake_ends_the_process():
    done = process("--stages=-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --stages=-1 must be at least 1: use --stages=1\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--schedule=zb_v", "--repeats=3"],
            "--repeats=3 does not fit schedule='zb_v', which has exactly 2 chunks on a stage: "
            "use --repeats=2",
        ),
        (
            ["--schedule=nonsense"],
            f"'nonsense' is unknown: use --schedule=gpipe (or {', '.join(NAMES[1:])})",
        ),
        (["--schedule=zbh1"], "--schedule='zbh1' is unknown: use --schedule=zb_h1"),
        (["--stages=-1"], "--stages=-1 must be at least 1: use --stages=1"),
        (["--stages=two"], "--stages='two' is not an integer"),
        (
            ["--times=1,2,3"],
            "--times='1,2,3' is not four times F,B,W,message, of which F, B or W is more than "
            "0: use --times=1,1,1,0",
        ),
        (["--times=1,1,-1,0"], "--times='1,1,-1,0' is not four times"),
        (["--times=nan,1,1,0"], "--times='nan,1,1,0' is not four times"),
        (
            ["--recompute=much"],
            "--recompute='much' is not a time, such as that of F: use --recompute=1",
        ),
        (["--head=inf"], "--head=inf is not a finite number"),
        (["--times=1e308,1,1,0", "--png=t.png"], "and none more than 1e+15: use --times=1,1,1,0"),
        (["--embed=1e308", "--png=t.png"], "--embed=1e+308 must be at most 1e+15: use --embed=0.0"),
        (
            ["--permute=soon"],
            "--permute='soon' is unknown: use --permute=auto (or late, aligned, early, spaced)",
        ),
        (
            ["--vocabulary=shared"],
            "--vocabulary='shared' is unknown: use --vocabulary=parallel (or end_stages)",
        ),
        (
            ["--schedule=zb_h1", "--fused_backward"],
            "--fused_backward does not fit --schedule='zb_h1', whose W's stand apart: use "
            "--schedule=gpipe (or 1f1b, interleaved)",
        ),
        (
            ["--schedule=zb_v", "--overlap=0.5"],
            "--overlap=0.5 does not fit --schedule='zb_v', where no F and B of other microbatches "
            "stand side by side: use --schedule=1f1b (or interleaved, dualpipe_v)",
        ),
        (
            ["--schedule=dualpipe_v", "--overlap=0.5", "--permute=aligned"],
            "--permute='aligned' packs no overlapped cells: use --permute=auto",
        ),
        (
            ["--schedule=dualpipe_v", "--overlap=some"],
            "--overlap='some' is not a time: use --overlap=0",
        ),
        (
            ["--schedule=auto", "--memory=0.1"],
            "--memory=0.1 is too little for any table found: use --memory=1.0",
        ),
        (
            ["--compare", "--png=x.png"],
            "--png needs one schedule, and --compare shows all: use --compare=false",
        ),
        (
            ["--svg=absent/x.svg"],
            "--svg='absent/x.svg' cannot be written (No such file or directory): use --svg=x.svg",
        ),
        (
            ["--schedule=csv:absent.csv"],
            "'absent.csv' cannot be read (No such file or directory): use a file that python "
            "-m jaxtrain.schedule",
        ),
        (
            ["--schedule=csv:bad.csv"],
            "bad.csv, line 2 (tick 0), column 'stage 1': F0.0 waits for F0.0 of stage 0 in "
            "line 2, whose message can be read from line 3",
        ),
        (
            ["--schedule=csv:good.csv", "--stages=3"],
            "--stages=3 is not what the CSV file has: use --stages=1",
        ),
        (
            ["--schedule=csv:good.csv", "--recompute=1"],
            "--recompute=1 is the time of R, and the CSV file has no R: use --recompute=",
        ),
        (["--colour"], "--colour is an unknown flag"),
        (
            ["--schedule=1f1B", "--recompute=a b"],
            "--schedule='1f1B' is unknown: use --schedule=1f1b --recompute=1",
        ),
        (
            ["--stages=four", "--repeats=x", "--microbatches="],
            "--stages='four' is not an integer (and --repeats='x' is not an integer; "
            "--microbatches='' is not an integer)",
        ),
        (
            ["--vocabulary=x", "--fused_backward", "--ops_per_chunk=2"],
            "use --vocabulary=parallel --fused_backward=false",
        ),
        (["--stages=x", "--schedule=auto", "--memory=0.1"], "--stages='x' is not an integer\n"),
        (
            ["--png=" + "a" * 5000],
            " cannot be written (File name too long): use --png=schedule.png",
        ),
        (
            ["--compare=x", "--svg=/proc/x.svg", "--row=nan"],
            "use --compare=false --row=0.0 --svg=x.svg",
        ),
        (
            ["--stages=x", "--schedule=csv:absent.csv"],
            "--stages='x' is not an integer\n",
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments, said, tmp_path):
    (tmp_path / "bad.csv").write_text("stage 0,stage 1\nF0.0,F0.0\n,B0.0\nB0.0,W0.0\nW0.0,\n")
    (tmp_path / "good.csv").write_text("stage 0\nF0.0\nB0.0\nW0.0\n")
    before = sorted(tmp_path.iterdir())
    done = run(*arguments, *([] if "--compare" in arguments else ["--csv=out.csv"]), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    _passes_with_what_is_suggested(arguments, done.stderr, tmp_path)
    assert (
        done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
    )
    assert sorted(tmp_path.iterdir()) == before
