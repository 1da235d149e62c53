"""run/next_commands.py: the last lines of a run, as a shell takes them."""

import os
import shlex
import sys

from jaxtrain.run.next_commands import next_commands

FOLDER = "runs/it's one"
GENERATE, TRAIN = {"prompt": "def 'x"}, {"config.train.steps": 6}


def test_a_shell_takes_them():
    files, text, again = next_commands(FOLDER, GENERATE, TRAIN | {"cpu_devices": 4}, processes=1)
    assert files.startswith("files: runs/it's one: checkpoints/, config.json, ")
    python, *words = shlex.split(text.removeprefix("write text: "))
    assert os.path.samefile(python, sys.executable)
    assert words == ["-m", "jaxtrain.generate", f"--workdir={FOLDER}", "--prompt=def 'x"]
    assert shlex.split(again.removeprefix("train on: "))[1:] == [
        *("-m", "jaxtrain.train", f"--config={FOLDER}/config.json"),
        *("--config.train.steps=6", "--cpu_devices=4"),
    ]


def test_an_interpreter_in_this_folder_has_a_short_name(monkeypatch):
    monkeypatch.setattr(sys, "executable", os.path.join(os.getcwd(), ".venv/bin/python"))
    lines = next_commands(FOLDER, GENERATE, TRAIN, processes=1)
    assert all(line.split(": ")[1].startswith(".venv/bin/python -m ") for line in lines[1:])


def test_how_several_processes_were_started_is_the_user_s_to_know():
    *_, again = next_commands(FOLDER, GENERATE, TRAIN, processes=2)
    assert again == "train on: the same command with --config.train.steps=6"
