"""tests/by_hand/try_docs.py: which commands it finds, its parts, what it makes of a command's
end, and what it remembers. All of them: --full."""

import json
import subprocess
import sys

import pytest
from support import ROOT

from by_hand import try_docs
from by_hand.try_docs import STEPS, Command, Ended

COMMANDS = try_docs.commands()


def test_the_commands_of_the_documents_are_found():
    """Each once, without its comment, from blocks and tables; a table of settings has none, and
    test.sh is left out."""
    texts = [command.text for command in COMMANDS]
    assert len(texts) == len(set(texts)) > 60 and all(
        text.startswith(("scripts/train.sh", "python ")) for text in texts
    )
    assert not any("test.sh" in text or "#" in text for text in texts)
    assert (
        texts[0] == "scripts/train.sh"
        and 'python -m jaxtrain.generate --workdir=runs/tiny --prompt="def main"' in texts
    )
    assert {
        "scripts/train.sh --replay=100",
        "python benchmarks/gpu.py --minutes=8 --json=gpu.json",
    } <= set(texts)
    assert {command.program for command in COMMANDS} > {
        "scripts/train.sh",
        "jaxtrain.launch",
        "jaxtrain.plan",
        "benchmarks/overhead.py",
    }


def test_parts_share_the_commands_and_keep_groups_together():
    parts = [
        [command for command in COMMANDS if try_docs.in_part(command, number, 3)]
        for number in (1, 2, 3)
    ]
    assert sorted(command.text for part in parts for command in part) == sorted(
        command.text for command in COMMANDS
    )
    groups = [{command.group for command in part} for part in parts]
    assert all(groups) and not groups[0] & groups[1] | groups[1] & groups[2] | groups[0] & groups[2]
    tiny = [command.text for command in COMMANDS if command.group == "runs/tiny"]
    assert {
        "scripts/train.sh",
        "scripts/train.sh --replay=100",
        "python -m jaxtrain.checkpoint verify runs/tiny",
    } <= set(tiny)
    assert [command.program for command in COMMANDS if command.group == "mine.csv"] == [
        "jaxtrain.schedule",
        "scripts/train.sh",
    ]


def test_the_list(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["try_docs.py", "--list", "--part=2/3"])
    assert try_docs.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        command.text for command in COMMANDS if try_docs.in_part(command, 2, 3)
    ]
    monkeypatch.setattr(sys, "argv", ["try_docs.py", "--part=4/3"])
    with pytest.raises(SystemExit):
        try_docs.main()
    assert "4/3 is no part such as 2/4" in capsys.readouterr().err


def log_step(folder, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")


def test_training_takes_few_steps_and_a_replay_the_last_one(tmp_path):
    log_step(tmp_path / "runs" / "tiny", 40)
    words = lambda text: try_docs.words_to_run(Command(text), tmp_path)
    assert words("scripts/train.sh --workdir=runs/new") == [
        f"{ROOT}/scripts/train.sh",
        "--workdir=runs/new",
        f"--config.train.steps={STEPS}",
    ]
    assert (
        words("scripts/train.sh --config.train.steps=300")[-1]
        == f"--config.train.steps={40 + STEPS}"
    )
    assert words("scripts/train.sh --replay=100")[1:] == ["--replay=40", "--config.train.steps=40"]
    assert words("python -m jaxtrain.train --config=llama3_8b --dry_run")[1:] == [
        "-m",
        "jaxtrain.train",
        "--config=llama3_8b",
        "--dry_run",
    ]
    launched = words("python -m jaxtrain.launch --processes=2 -- --workdir=runs/two")
    assert launched[0] == sys.executable and launched[-1] == f"--config.train.steps={STEPS}"


REFUSAL = "error: --device=cuda finds no NVIDIA GPU: use --device=cpu --tiny\n"


@pytest.mark.parametrize(
    ("text", "ended", "wrong"),
    [
        ("scripts/train.sh", Ended(0, "step 20", ""), ""),
        ("scripts/train.sh", Ended(1, "step 20", ""), "status 1"),
        (
            "scripts/train.sh --workdir=runs/other",
            Ended(0, "step 20", ""),
            "step 20 is not logged in runs/other",
        ),
        (
            "python -m jaxtrain.schedule",
            Ended(0, "1f1b", "Traceback (most recent call last):"),
            "a traceback, status 0",
        ),
        ("python -m jaxtrain.schedule", Ended(0, "", ""), "nothing on standard output"),
        (
            "python -m jaxtrain.schedule --csv=mine.csv",
            Ended(0, "1f1b", ""),
            "mine.csv was not written",
        ),
        ("python -m jaxtrain.train --dry_run --json", Ended(0, "{}", ""), ""),
        (
            "python -m jaxtrain.train --dry_run --json",
            Ended(0, "{} and more", ""),
            "standard output is not a JSON object",
        ),
        ("python benchmarks/gpu.py --json=gpu.json", Ended(2, "", REFUSAL), ""),
        ("python benchmarks/gpu.py --json=gpu.json", Ended(2, "", REFUSAL + "more\n"), "status 2"),
        ("python benchmarks/overhead.py", Ended(2, "", REFUSAL), "status 2"),
    ],
)
def test_what_a_command_promises(tmp_path, text, ended, wrong):
    log_step(tmp_path / "runs" / "tiny", STEPS)
    assert try_docs.what_is_wrong(Command(text), tmp_path, ended, 0) == wrong


def test_what_has_passed_is_not_run_again(tmp_path, capsys):
    good, bad = (
        Command("python -c \"print('well')\""),
        Command("python -c 'import time; time.sleep(60)'"),
    )
    assert [trial.command for trial in try_docs.try_all([good], tmp_path, patience=60)] == []
    assert [trial.command for trial in try_docs.try_all([good, bad], tmp_path, patience=0.1)] == [
        bad.text
    ]
    out = capsys.readouterr().out
    assert (
        "ok " in out
        and "failed" in out
        and "no end after 0.1 s: nothing was printed" in out
        and "1 of 2 commands end as promised" in out
    )
    assert try_docs.try_all(
        [good], tmp_path, patience=60
    ) == [] and capsys.readouterr().out.startswith("before ")
    assert try_docs.try_all(
        [good], tmp_path, patience=60, remembered=False
    ) == [] and capsys.readouterr().out.startswith("ok ")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
    assert any(path.read_text() == "well\n" for path in (tmp_path / "logs").glob("*.log"))


def test_the_commit_is_that_of_the_repository():
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert try_docs.commit().partition("-")[0] == git.stdout.strip()


GROUPS = list(dict.fromkeys(command.group for command in COMMANDS))


@pytest.mark.full
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.xdist_group(group)) for group in GROUPS]
)
def test_the_commands_end_as_promised(group, tmp_path):
    chosen = [command for command in COMMANDS if command.group == group]
    assert try_docs.try_all(chosen, tmp_path, patience=1800) == []
