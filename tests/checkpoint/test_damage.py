"""No damage to a checkpoint is loaded without a word: each kind of damage to each kind of file, and
random ones.

A damaged step is passed over when a step is chosen, or restoring it is refused.
"""

import pathlib
import random
import shutil
from collections.abc import Callable

import pytest
import tensorstore as ts
from support.checkpoint_state import (
    Layout,
    abstract_state,
    assert_same,
    checkpointer,
    restored,
    state,
    stored_shapes,
)
from support.damage import DAMAGE, damage_numbers, files_of

from jaxtrain.checkpoint import storage
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.checkpoint.resuming import restore_newest
from jaxtrain.checkpoint.steps import CheckpointError, choose

LAYOUT = Layout(18, stages=2, chunks=2, data=2, model=2)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with steps 5 and 6; pieces of arrays lie in data files, for none is so small that it
    would be a part of the tree."""
    folder = tmp_path_factory.mktemp("original")
    saves = checkpointer(folder, LAYOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_write_spec", without_inline_values(storage._write_spec))
        for step in (5, 6):
            saves.save(step, state(LAYOUT), {})
        saves.close()
    return folder


def without_inline_values(write_spec: Callable) -> Callable:
    """`_write_spec` for a database that keeps no value of more than 20 bytes in its tree."""

    def small(value, info):
        spec = write_spec(value, info).to_json()
        spec["kvstore"]["config"] = spec["kvstore"].get("config", {}) | {
            "max_inline_value_bytes": 20
        }
        return ts.Spec(spec)

    return small


def notice(folder: pathlib.Path) -> str:
    """The line about the damaged step 6: of the choice that passes it over, or of the refusal to
    restore it. Fails if there is none."""
    choice = choose(folder, {})
    if choice.step == 5:
        assert choice.unrecognized[0].step == 6
        return str(choice)
    try:
        restored(folder, 6, LAYOUT)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("restored without a word")


def all_noticed(
    original: pathlib.Path, tmp_path: pathlib.Path, damages: list[tuple[str, str, int]]
) -> None:
    """damages: (kind, file in the step, seed)."""
    for kind, file, seed in damages:
        folder = tmp_path / f"{seed}"
        shutil.copytree(original, folder)
        DAMAGE[kind](folder / "6" / file, random.Random(seed))
        try:
            line = notice(folder)
        except AssertionError as error:
            raise AssertionError(f"{kind} of {file}, seed {seed}") from error
        assert "\n" not in line and ("6 (" in line or "/6/state: " in line), line
        shutil.rmtree(folder)


def random_damages(original: pathlib.Path, count: int) -> list[tuple[str, str, int]]:
    chance, files = random.Random(count), files_of(original / "6")
    return [(chance.choice(list(DAMAGE)), chance.choice(files), seed) for seed in range(count)]


def test_random_damage_is_noticed(original, tmp_path):
    all_noticed(original, tmp_path, random_damages(original, 20))


@pytest.mark.full
@pytest.mark.parametrize("count", [300])
def test_much_random_damage_is_noticed(original, tmp_path, count):
    all_noticed(original, tmp_path, random_damages(original, count))


def test_each_kind_of_damage_to_pieces_and_tree_is_noticed(original, tmp_path):
    """The largest data file has the pieces; the smaller ones are trees."""
    data = sorted((original / "6" / "state").glob("**/d/*"), key=lambda file: file.stat().st_size)
    files = [str(file.relative_to(original / "6")) for file in (data[-1], data[0])]
    all_noticed(
        original,
        tmp_path,
        [
            (kind, file, seed)
            for seed, (kind, file) in enumerate((k, f) for k in DAMAGE for f in files)
        ],
    )


def test_a_folder_that_is_gone_is_noticed(original, tmp_path):
    for name in ("meta", "state", "state/d", "state/ocdbt.process_0", "state/ocdbt.process_0/d"):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(original, folder)
        shutil.rmtree(folder / "6" / name)
        assert choose(folder, {}).step == 5, name


def test_a_damaged_piece_is_refused_with_its_array_and_step(original, tmp_path):
    """The choice does not read it; the one who restores that array does, and nobody else."""
    folder = tmp_path / "copy"
    shutil.copytree(original, folder)
    damage_numbers(folder / "6", "params.layers.mlp.w/c/7")
    assert choose(folder, {}).step == 6
    with pytest.raises(
        CheckpointError, match=r"6/state: params/layers/mlp/w cannot be read: its data is damaged$"
    ):
        restored(folder, 6, LAYOUT)
    part = lambda tree: {"params": {"embed": tree["params"]["embed"]}}
    embed = restore(folder, 6, part(abstract_state(LAYOUT)), part(stored_shapes(LAYOUT)))
    assert_same(embed, part(state(LAYOUT)))


def test_a_run_goes_on_from_the_newest_step_whose_arrays_are_whole(original, tmp_path):
    folder, chosen = tmp_path / "copy", []
    shutil.copytree(original, folder)
    shutil.copytree(folder / "6", folder / "7")
    for step in ("6", "7"):
        damage_numbers(folder / step, "params.layers.mlp.w/c/7")

    def choose_again(damaged):
        chosen.append(dict(damaged))
        return choose(folder, {}, damaged=damaged)

    what = (folder, abstract_state(LAYOUT), stored_shapes(LAYOUT))
    numbers, choice = restore_newest(choose(folder, {}), choose_again, *what)
    assert_same(numbers, state(LAYOUT))
    why = "params/layers/mlp/w cannot be read: its data is damaged"
    assert (choice.step, str(choice), chosen) == (
        5,
        f"6 ({why}), 7 ({why})",
        [{7: why}, {6: why, 7: why}],
    )
