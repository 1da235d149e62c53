"""`python -m jaxtrain.checkpoint`: steps listed, verified, shown, compared and deleted; one line
for whatever is wrong."""

import dataclasses
import errno
import functools
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from by_hand.fuzz_configs import suggested
from etils import epath
from support import ROOT, small
from support.damage import damage_numbers

from jaxtrain import config as configs
from jaxtrain.checkpoint import __main__ as command, manifest, reading, retention, steps, stores
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.config import recipes
from jaxtrain.run import streams
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

CONFIG = small.config((1, 2, 1), changes={"model.mlp_width": 512}).resolve()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run's folder with steps 3 and 6 of ones and of twos, and 6 with a NaN in its embedding; 3
    has the lower validation loss."""
    folder = tmp_path_factory.mktemp("run")
    step = make_step(CONFIG, small.mesh_of(CONFIG))
    saves = Checkpointer(
        folder / "checkpoints",
        stored_shapes(step.layout, step.optimizer),
        retention.Retention(5, best=1),
    )
    for number, value in ((3, 1), (6, 2)):
        state = jax.tree.map(
            lambda a, value=value: jax.device_put(np.full(a.shape, value, a.dtype), a.sharding),
            step.abstract_state(),
        )
        changed = configs.replace(CONFIG, {"optimizer.learning_rate": value / 100})
        about = {"wall_s": 12.5, "checksum": "ab" * 32, "tokenizer": {"kind": "bytes"}}
        meta = Meta(config=configs.to_dict(changed), step=number, **about)
        saves.save(number, state, dataclasses.asdict(meta))
        saves.evaluated(number, float(value))
    saves.close()
    return folder


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs the command in this process → (status, lines on standard output, standard error)."""

    monkeypatch.setattr(retention, "DELETION_S", 0.1)

    def call(*argv) -> tuple[int, list[str], str]:
        try:
            status = streams.run(command.main, [str(word) for word in argv])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return call


def test_ls_and_verify(run, here):
    status, (head, *rows), _ = here("ls", run)
    assert status == 0 and head.split() == ["step", "size", "saved", "validation", "loss"]
    assert [(row.split()[0], row.split()[-2:]) for row in rows] == [
        ("3", ["1.0000", "complete"]),
        ("6", ["2.0000", "complete"]),
    ]
    assert here("verify", run)[:2] == (0, here("verify", run / "checkpoints")[1])
    damage_numbers(run / "checkpoints" / "6", "params.layers.mlp.up.weight/c/1")
    (run / "checkpoints" / "3" / "manifest.json").unlink()
    shutil.copytree(run / "checkpoints" / "6", run / "checkpoints" / "9.broken-1")
    _, (_, three, six, broken), _ = here("ls", run)
    assert (
        three.endswith("it has no manifest.json")
        and six.endswith("complete")
        and broken.startswith("9.broken-1  ")
    )
    status, lines, _ = here("verify", run)
    folder = run / "checkpoints"
    assert (
        status == 74
        and lines[0] == f"{folder}/3: it has no manifest.json"
        and lines[1] == "3: 1 damaged"
    )
    assert lines[2].startswith(f"{folder}/6: state: params/layers/mlp/up/weight[1:2, 0:") and lines[
        2
    ].endswith("is damaged")
    assert lines[3] == "6: 1 damaged"


def test_verify_names_each_damaged_file(run, here):
    folder = run / "checkpoints" / "6"
    for name in ("meta/metadata", "state/_METADATA", "_CHECKPOINT_METADATA"):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b" ", b"\t", 1))
    assert here("verify", run, "--step=3")[0] == 0
    status, lines, _ = here("verify", run, "--step=6")
    assert status == 74
    assert lines == [
        *(
            f"{folder}: {name} is damaged"
            for name in ("_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA")
        ),
        "6: 3 damaged",
        f"verified 1 step, {reading.in_units(stores.size_of(epath.Path(folder)))}: 6 damaged",
    ]


def total(*folders) -> str:
    return reading.in_units(sum(stores.size_of(epath.Path(folder)) for folder in folders))


@pytest.fixture
def places(run, monkeypatch):
    """Beside the run: links, copies and names that are like a step's; the current folder is the one
    above."""
    folder = run / "checkpoints"
    (run / "profile").mkdir()
    for name in ("6.broken-1", "../../copied"):
        shutil.copytree(folder / "6", folder / name)
    (folder / "9.orbax-checkpoint-tmp").mkdir()
    (run.parent / "latest").symlink_to(folder / "6")
    (run.parent / "run_link").symlink_to(run)
    (run.parent / "empty").mkdir()
    (run.parent / "numbers" / "7").mkdir(parents=True)
    (run.parent / "unsaved" / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    monkeypatch.chdir(run.parent)
    return run


def test_verify_says_what_it_has_verified(places, here):
    """All steps or one, by whatever name; what is set aside or under way is no step."""
    steps_3_6 = (
        f"verified 2 steps, {total(places / 'checkpoints' / '3', places / 'checkpoints' / '6')}: "
        "all complete"
    )
    for place in (places, f"{places}/", "run", "./run/../run", "run/checkpoints", "run_link"):
        assert here("verify", place)[:2][0] == 0 and here("verify", place)[1][-1] == steps_3_6
    step_6 = f"verified 1 step, {total(places / 'checkpoints' / '6')}: all complete"
    for place in (
        "run/checkpoints/6",
        "run/checkpoints/6/",
        "latest",
        "copied",
        "run/checkpoints/6.broken-1",
    ):
        status, lines, _ = here("verify", place)
        assert (status, lines[-1], len(lines)) == (0, step_6, 2), place
    assert here("verify", "run", "--step=6")[1] == here("verify", "run/checkpoints/6")[1]
    assert here("verify", "run/checkpoints/6", "--step=6")[0] == 0
    damage_numbers(places / "checkpoints" / "6", "params.layers.mlp.up.weight/c/1")
    for place, verified in {
        "run": "2 steps",
        "run/checkpoints/6": "1 step",
        "latest": "1 step",
    }.items():
        status, lines, _ = here("verify", place)
        assert (
            status == 74
            and lines[-1].startswith(f"verified {verified}, ")
            and lines[-1].endswith(": 6 damaged")
        )
    for path in (places / "checkpoints" / "6").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    lines = [
        "run/checkpoints/6: an empty folder",
        "6: 1 damaged",
        "verified 1 step, 0 B: 6 damaged",
    ]
    assert here("verify", "run/checkpoints/6")[:2] == (74, lines)


def test_the_other_commands_take_the_same_places(places, here):
    assert [row.split()[0] for row in here("ls", "run")[1]] == [
        "step",
        "3",
        "6",
        "6.broken-1",
        "9.orbax-checkpoint-tmp",
    ]
    assert [row.split()[0] for row in here("ls", "run/checkpoints/3/")[1]] == ["step", "3"]
    assert here("ls", "latest")[1][1].split()[0] == "6" and here("ls", "unsaved")[0] == 0
    for place in ("run/checkpoints/6.broken-1", "copied", "latest"):
        assert here("show", place)[1][0].partition(": ")[2].startswith("step 6, 12 s of training")
        assert here("diff", "run", place)[1][-1].startswith("0 arrays differ; ")
    assert here("prune", "unsaved", "--unfinished")[1][-1].startswith("1 folders, ")


def test_a_step_that_a_run_deletes_meanwhile_is_not_damaged(places, here, monkeypatch):
    """And one whose deletion was interrupted is."""
    damages = command.reading.damages

    def delete_first(folder, *rest):
        if folder.name == "3":
            command.retention.delete([folder])
        yield from damages(folder, *rest)

    monkeypatch.setattr(command.reading, "damages", delete_first)
    status, lines, _ = here("verify", "run")
    assert (
        status == 0
        and lines[0] == "3: was deleted while it was read"
        and lines[-1].startswith("verified 1 step, ")
    )
    (places / "checkpoints" / "6" / "manifest.json").unlink()
    status, lines, _ = here("verify", "run")
    assert status == 74 and lines[-1].endswith(": 6 damaged")


def save_as(step, copy) -> None:
    """A copy of a step that is one of its own number."""
    shutil.copytree(step, copy)
    meta = json.loads((copy / "meta" / "metadata").read_text()) | {"step": int(copy.name)}
    (copy / "meta" / "metadata").write_text(json.dumps(meta))
    (copy / "manifest.json").unlink()
    manifest.write(epath.Path(copy))


def test_a_copied_step_is_not_complete_and_takes_no_place(run, here):
    """Nor a renamed one, nor a link to another one's step: `prune` keeps and names them."""
    folder = run / "checkpoints"
    shutil.copytree(folder / "6", folder / "109")
    save_as(folder / "3", folder / "7")
    (folder / "7").rename(folder / "108")
    (folder / "107").symlink_to("3")
    rows = here("ls", run)[1][3:]
    assert [row.split()[0] for row in rows] == ["107", "108", "109"]
    assert [row.split("  ")[-1].strip() for row in rows] == [
        f"its meta is of step {n}" for n in (3, 7, 6)
    ]
    status, lines, _ = here("verify", run)
    assert status == 74 and lines[-1].endswith(": 107, 108, 109 damaged")
    status, lines, err = here("prune", run, "--keep=1", "--yes")
    assert status == 0 and [line.split()[1] for line in lines[:-1]] == [str(folder / "3")]
    assert err.splitlines() == [
        f"note: {folder}/{n} is left: its meta is of step {of}"
        for n, of in ((107, 3), (108, 7), (109, 6))
    ]
    assert sorted(path.name for path in folder.iterdir() if path.name.isdigit()) == [
        *("107", "108", "109", "6")
    ]


def test_prune_deletes_nothing_through_a_link(run, here):
    folder = run / "checkpoints"
    shutil.copytree(folder, run / "other")
    shutil.rmtree(folder / "3")
    for name, target in (
        ("3", "../other/3"),
        ("5.broken-1", "../other/6"),
        ("9.orbax-checkpoint-tmp", "../other/6"),
    ):
        (folder / name).symlink_to(target)
    before = sorted(map(str, (run / "other").rglob("*")))
    assert here("prune", run, "--keep=1", "--broken", "--unfinished", "--yes")[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["6", "validation_losses.json"]
    folder.rename(run / "elsewhere")
    folder.symlink_to("elsewhere")
    status, _, err = here("prune", run, "--keep=1", "--yes")
    assert status == 2 and err.startswith(f"error: '{folder}' is a link, through which prune del")
    assert err.strip().endswith(f"prune {run}/elsewhere --keep=1 --yes=true")
    assert here("prune", folder, "--keep=1", "--yes")[0] == 0
    assert sorted(map(str, (run / "other").rglob("*"))) == before


def test_one_step_without_permission_is_named_and_the_others_are_listed(run, here, monkeypatch):
    scandir, listdir = os.scandir, os.listdir

    def refusing(do):
        def call(path="."):
            if str(path).endswith("/3"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return do(path)

        return call

    monkeypatch.setattr(os, "listdir", refusing(listdir))  # root may read everything
    monkeypatch.setattr(os, "scandir", refusing(scandir))
    _, (_, three, six), _ = here("ls", run)
    assert three.endswith("it cannot be read: Permission denied") and six.endswith("complete")
    status, lines, _ = here("verify", run)
    assert status == 74 and lines[-1].endswith(": 3 damaged") and "6: complete" in lines[2]
    save_as(run / "checkpoints" / "6", run / "checkpoints" / "7")
    assert here("prune", run, "--keep=1", "--yes")[2].startswith("note: ")
    assert steps.step_numbers(run / "checkpoints") == [3, 7]


def test_what_cannot_be_deleted_is_named_after_the_others_are(run, here, monkeypatch):
    folder, remove = run / "checkpoints", stores.remove
    for step in (7, 8):
        save_as(folder / "6", folder / str(step))

    def refusing(path):
        if path.name == "3":
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path)

    monkeypatch.setattr(stores, "remove", refusing)
    status, _, err = here("prune", run, "--keep=1", "--yes")
    assert status == 74 and err == (f"error: {folder}: not all is deleted (3: Permission denied)\n")
    assert steps.step_numbers(folder) == [3, 8]


@pytest.mark.parametrize(
    "content",
    [
        b'{"3": 1' + b"0" * 400 + b"}",
        b"[" * 10**6,
        b'{"' + b"3" * 5000 + b'": 1}',
        b'{"3": {}}',
        b"[3]",
        b"{",
    ],
    ids=["digits", "depth", "key", "object", "list", "cut off"],
)
def test_damaged_validation_losses_are_said_and_replaced(run, here, content):
    file = run / "checkpoints" / "validation_losses.json"
    file.write_bytes(content)
    status, lines, err = here("ls", run)
    assert status == 0 and [line.split()[-1] for line in lines[1:]] == ["complete"] * 2
    assert err.startswith(f"note: {file} is not used (") and err.count("\n") == 1 and len(err) < 400
    retention.note_losses(epath.Path(run / "checkpoints"), (3, 6), {6: 2.0})
    assert here("ls", run)[2] == "" and json.loads(file.read_text()) == {"6": 2.0}


def test_a_run_that_saves_and_deletes_faster_than_it_is_read(places, here, monkeypatch):
    """It has others by then, of which the newest is read first; a deletion in the middle of a
    listing is no error."""
    damages, folder = command.reading.damages, places / "checkpoints"

    def save_and_delete(step, *rest):
        if step.name in ("3", "6"):
            for new in range(3):
                save_as(step, folder / f"{10 * (new + int(step.name))}")
            command.retention.delete([step])
        yield from damages(step, *rest)

    monkeypatch.setattr(command.reading, "damages", save_and_delete)
    status, lines, _ = here("verify", "run")
    assert status == 0 and [line.partition(":")[0] for line in lines[:-1]] == ["3", "6", "80"], (
        lines
    )
    assert lines[-1].startswith("verified 1 step, ") and lines[-1].endswith(": all complete")


WITHOUT = {  # place → the line about it
    "rum": "'rum' does not exist: use run",
    "empty": "'empty' has no checkpoints: use ",
    "numbers": "'numbers' has no checkpoints: use ",
    "run/metrics.jsonl": "'run/metrics.jsonl' is a file: use run",
    "run/profile": "'run/profile' has no checkpoints: use run",
    "run/checkpoints/6/state": (
        "'run/checkpoints/6/state' has no checkpoints: use run/checkpoints/6"
    ),
    "run/checkpoints/9.orbax-checkpoint-tmp/": (
        "'run/checkpoints/9.orbax-checkpoint-tmp' is a save that did not end, or is under way: use "
    ),
    ".": "'.' has no checkpoints: use copied",
}


def test_a_place_without_checkpoints_is_an_error(places, here):
    """In every command; what the line says to use works, but for prune the folder of a step."""
    (places / "metrics.jsonl").touch()
    for place, message in WITHOUT.items():
        for name in ("ls", "verify", "show", "diff", "prune"):
            rest = ["run"] if name == "diff" else ["--keep=1"] if name == "prune" else []
            status, out, err = here(name, place, *rest)
            assert (status, out, err.count("\n")) == (2, [], 1) and err.startswith(
                f"error: {message}"
            ), err
            nearest = err.strip().rpartition(": use ")[2]
            status, _, err = here(name, nearest, *rest)
            assert status == 0 or (status == 2 and name == "prune" and "is one of them" in err), (
                nearest
            )


def test_nothing_to_verify_is_an_error(places, here):
    assert here("verify", "unsaved") == (
        2,
        [],
        "error: unsaved/checkpoints has no checkpoint to verify, only 5.orbax-checkpoint-tmp\n",
    )
    for step in ("3", "6"):
        shutil.rmtree(places / "checkpoints" / step)
    assert here("verify", "run") == (
        *(2, []),
        "error: run/checkpoints has no checkpoint to verify, only 6.broken-1, "
        "9.orbax-checkpoint-tmp\n",
    )


def test_show(run, here):
    status, lines, _ = here("show", run, "--statistics")
    assert (
        status == 0
        and lines[0]
        == f"{run}/checkpoints/6: step 6, 12 s of training, corpus abababababab, tokenizer bytes"
    )
    assert "  optimizer.learning_rate = 0.02" in lines
    (up,) = (line.split() for line in lines if line.startswith("params/layers/mlp/up/weight"))
    numbers = np.prod([int(word.strip("[],")) for word in up[1:4]])
    assert up[4] == "float32" and up[-4:] == ["2", "2", f"{2 * numbers**0.5:.6g}", "0"]
    assert here("show", run / "checkpoints" / "3")[1][0].startswith(f"{run}/checkpoints/3: step 3")


def test_diff(run, here):
    a, b = run / "checkpoints" / "3", run
    status, lines, _ = here("diff", a, b)
    assert status == 0 and "  optimizer.learning_rate: 0.01 → 0.02" in lines
    (up,) = (
        line.split()
        for line in here("diff", a, b, "--all")[1]
        if line.startswith("params/layers/mlp/up/weight")
    )
    assert up[1:] == ["1", "0.5", "100.0%"]
    assert lines[-1].endswith("0 are the same") and "20 are listed" in lines[-1]
    assert here("diff", a, a)[1][-1].startswith("0 arrays differ; ")


def test_prune(run, here):
    folder = run / "checkpoints"
    for name in ("9", "9.broken-1", "12.orbax-checkpoint-tmp"):
        shutil.copytree(folder / "6", folder / name)
    meta = json.loads((folder / "9" / "meta" / "metadata").read_text())
    (folder / "9" / "meta" / "metadata").write_text(json.dumps(meta))
    (folder / "9" / "manifest.json").unlink()
    flags = ["--keep=1", "--keep_best=1", "--broken", "--unfinished"]
    status, lines, _ = here("prune", run, "--keep=1", "--broken", "--unfinished")
    going = ["3", "9.broken-1", "12.orbax-checkpoint-tmp"]
    assert status == 0 and sorted(line.split()[2] for line in lines[:-1]) == sorted(
        f"{folder}/{name}" for name in going
    )
    assert lines[-1].startswith("3 folders, ") and lines[-1].endswith(
        "would be deleted: --yes deletes them"
    )
    assert (folder / "3").exists()
    # What is not complete counts for nothing: 6 is the newest, and 3 the best.
    status, lines, _ = here("prune", run, *flags, "--yes")
    assert status == 0 and sorted(path.name for path in folder.iterdir()) == [
        "3",
        "6",
        "9",
        "validation_losses.json",
    ]
    assert not (run / "run.lock").exists() and steps.choose(folder, {}).step == 6


def test_mean(run, here, tmp_path):
    """Ones and twos, of a run and of a step of it; a step of another model and a damaged one."""
    out, last = tmp_path / "mean", run / "checkpoints" / "6"
    status, lines, err = here("mean", run, last, f"--out={out}")
    assert status == 0 and lines[0].startswith(f"{out}: step 0 with the mean of "), err
    step = reading.open_step(epath.Path(out) / "checkpoints" / "0")
    found = {name: np.unique(np.asarray(a.read().result())) for name, a in step.arrays.items()}
    assert all(
        numbers.tolist() == [np.float32(5 / 3) if name.startswith("params/") else 0]
        for name, numbers in found.items()
    )
    assert steps.fault(step.folder) == "" and recipes.load_recipe(str(out / "config.json"))
    other = shutil.copytree(run, tmp_path / "other") / "checkpoints" / "6"
    meta = json.loads((other / "meta" / "metadata").read_text())
    meta["config"]["model"]["activation"] = "gelu"
    (other / "meta" / "metadata").write_text(json.dumps(meta))
    again = f"--out={tmp_path / 'again'}"
    status, _, err = here("mean", run, other, again)
    assert status == 2 and "model.activation='gelu', and " in err and err.count("\n") == 1
    damage_numbers(last, "params.embed.table")
    status, _, err = here("mean", run, again)
    assert status == 74 and "params/embed/table" in err and err.count("\n") == 1
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["lst", "RUN"],
            "'lst' is no command of jaxtrain checkpoint: use one of ls, verify, show, diff, prune, "
            "mean",
        ),
        (
            ["RUN"],
            "'RUN' is no command of jaxtrain checkpoint: use one of ls, verify, show, diff, prune, "
            "mean",
        ),
        (["ls"], "ls is about one folder, not 0: use jaxtrain checkpoint ls DIR"),
        (
            ["diff", "RUN"],
            "diff is about two steps or runs, not 1: use jaxtrain checkpoint diff A B",
        ),
        (["ls", "nowhere"], "'nowhere' does not exist: use "),
        (
            ["prune", "RUN/checkpoints/3"],
            "prune is about all steps of a run, and 'RUN/checkpoints/3' is one of them: use "
            "jaxtrain checkpoint",
        ),
        (
            ["prune", "RUN/checkpoints/3", "--broken"],
            "prune is about all steps of a run, and 'RUN/checkpoints/3' is one",
        ),
        (
            ["show", "RUN/checkpoints/3", "--step=6"],
            "--step=6 is no checkpoint of RUN/checkpoints/3, which is a step (it has 3): use "
            "--step=3",
        ),
        (
            ["verify", "RUN", "--step=5"],
            "--step=5 is no checkpoint of RUN/checkpoints (it has 3, 6): use --step=6",
        ),
        (
            ["show", "RUN", "--step=5"],
            "--step=5 is no checkpoint of RUN/checkpoints (it has 3, 6): use --step=6",
        ),
        (
            ["prune", "RUN"],
            "prune without a policy deletes nothing: use --keep=3 (and --keep_every, --keep_best)",
        ),
        (["ls", "RUN", "--steps=3"], "--steps is an unknown flag"),
        (
            ["verify", "RUN", "--step", "5"],
            "--step=5 is no checkpoint of RUN/checkpoints (it has 3, 6): use --step=6",
        ),
        (["verify", "RUN", "--step=x"], "--step='x' is not an integer\n"),
        (["--step", "-7", "verify", "RUN"], "--step=-7 must be at least -1: use --step=-1"),
        (
            ["show", "--statistics=x", "RUN", "--step=5"],
            "--statistics='x' is not a boolean: use --statistics=true --step=6",
        ),
        (
            ["diff", "RUN", "--all=x"],
            "--all='x' is not a boolean: use --all=true (and diff is about two steps or runs, "
            "not 1: use jaxtrain",
        ),
        (
            ["ls", "nowhere", "--colour"],
            "--colour is an unknown flag: use --help, which lists all flags (and 'nowhere' "
            "does not exist: ",
        ),
        (["prune", "RUN", "--keep=x"], "--keep='x' is not an integer\n"),
        (
            ["mean", "RUN", "--steps=3,5", "--out=NEW"],
            "RUN/checkpoints has no step '5': use",
        ),
        (["mean", "RUN/checkpoints/3"], "mean is about several steps, not 1: use jaxtrain checkp"),
        (["mean"], "mean is about several steps, not 0: use jaxtrain checkpoint mean DIR --steps"),
        (["mean", "RUN", "--out=RUN"], "--out=RUN is no new folder: use another name"),
    ],
)
def test_one_line_for_what_is_wrong(original, here, tmp_path, argv, message):
    """What is suggested works behind the rest."""
    names = {"RUN": str(original), "NEW": str(tmp_path / "new")}
    words = [functools.reduce(lambda w, n: w.replace(n, names[n]), names, word) for word in argv]
    status, out, err = here(*words)
    assert status == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"error: {message.replace('RUN', str(original))}"), err
    if (use := suggested(err)) and " (and " not in err and "unknown flag" not in err:
        assert here(*words, *use)[0] == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--step", "3", "verify", "RUN"],
        ["verify", "--step", "3", "RUN"],
        ["verify", "RUN", "--step", "3"],
    ],
    ids=" ".join,
)
def test_values_after_a_blank_and_flags_anywhere(original, here, argv):
    status, lines, err = here(*(word.replace("RUN", str(original)) for word in argv))
    assert (
        status == 0
        and not err
        and lines[0].startswith("3: complete")
        and "6: " not in "".join(lines)
    )


def test_help_needs_no_jax():
    program = "import sys; from jaxtrain.checkpoint.__main__ import main; main(['--help'])"
    check = "import sys, jaxtrain.checkpoint.__main__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "prune DIR" in done.stdout
