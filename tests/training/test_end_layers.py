"""Models with layers at both ends, dense ones before those with experts and modules that predict
further tokens: the losses and gradients of one plain loop (plain_loop.py) on every layout, and
checkpoints that every layout restores. Layers that differ by a pattern:
tests/runtime/test_kinds.py."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import optax
import pytest
from support import ROOT, matrix, plain_loop, small
from support.checkpoint_state import assert_same

from jaxtrain import config as configs
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.config import Config
from jaxtrain.config.recipes import load_recipe
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.schedule import by_name
from jaxtrain.schedule.files import order_csv, table_csv
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.training.state import TrainState, stored_shapes
from jaxtrain.training.step import Step, make_step

SMALL = small.PLAIN_LAYER | {
    "model.width": 16,
    "model.heads": 2,
    "model.mlp_width": 16,
    "model.experts": 4,
    "model.expert_width": 8,
    "model.balance_loss": 0.01,
    "data.sequence_length": 8,
    "data.batch_size": 12,
    "optimizer.clip_norm": plain_loop.CLIP,
}

# --- the matrix -----------------------------------------------------------------------------------

ALL_LAYERS = (7, 12, 26)  # dense ones and ones with experts
DENSE, DEPTHS = (1, 2, 3), (0, 1, 2)
STAGES = (2, 3, 4)
SPLITS = {  # the devices of a stage
    "one device": {},
    "experts": {"mesh.expert": 2},
    **{f"zero {zero}": {"mesh.data": 2, "parallel.zero": zero} for zero in (1, 2, 3)},
}
MICROBATCHES = (3, 6)
REMATS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("none", ()),
    ("selective", ()),
    ("full", ()),
    ("full", ("layer_input",)),
)
CSV, IN_CELLS = "csv", ", overlapped"
OVERLAPPED = f"dualpipe_v{IN_CELLS}"
SCHEDULES = {  # with the chunks of a stage
    "1f1b": 1,
    "interleaved": 2,
    "zb_h1": 1,
    "zb_v": 2,
    "dualpipe_v": 2,
    f"1f1b{IN_CELLS}": 1,
    f"interleaved{IN_CELLS}": 2,
    OVERLAPPED: 2,
    "auto": 0,
    CSV: 2,
}
# What a file's table is made from, and the form in which it is written.
FILES = (
    ("zb_v", "table"),
    (OVERLAPPED, "table"),
    ("interleaved", "table"),
    ("zb_v", "order"),
    (OVERLAPPED, "order"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with so many layers in all, on so many stages."""

    layers: int
    dense: int
    depth: int
    stages: int
    schedule: str
    split: str
    remat: tuple[str, tuple[str, ...]]
    microbatches: int
    file: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        source = f" ({' '.join(self.file)})" if self.file[0] else ""
        saved = f" {','.join(self.remat[1])}" if self.remat[1] else ""
        return (
            f"{self.layers}L-{self.dense}dense-{self.depth}mtp-{self.stages}st-{self.schedule}"
            f"{source}-{self.split}-{self.remat[0]}{saved}-{self.microbatches}mb"
        )

    @property
    def fits(self) -> bool:
        """Whether every chunk but the first and the last has a layer with experts."""
        return self.layers - self.dense >= self.stages * SCHEDULES[self.schedule] - 2

    @property
    def pairs(self) -> frozenset:
        """Every two of its values."""
        values = dataclasses.asdict(self)
        if not self.file[0]:
            del values["file"]
        return frozenset(itertools.combinations(values.items(), 2))

    def layout(self, folder: pathlib.Path) -> dict:
        """The settings of its layout. folder: where the file of a table is written"""
        name, overlap = schedule_of(self.schedule)
        if self.schedule == CSV:
            path = folder / f"{self}.csv"
            path.write_text(self.text())
            # a table's own cells say that they are overlapped, an order's do with this setting
            name, overlap = f"csv:{path}", self.file == (OVERLAPPED, "order")
        return {
            "mesh.data": 1,
            "mesh.stage": self.stages,
            "mesh.expert": 1,
            **SPLITS[self.split],
            "pipeline.schedule": name,
            "pipeline.repeats": SCHEDULES[self.schedule],
            "pipeline.overlap": overlap,
            "pipeline.remat": self.remat[0],
            "pipeline.save": self.remat[1],
            "pipeline.microbatches": self.microbatches,
        }

    def config(self, folder: pathlib.Path) -> Config:
        """Resolved; `folder` as for `layout`."""
        model = {
            "model.layers": self.layers - self.dense,
            "model.dense_layers": self.dense,
            "model.mtp_depth": self.depth,
        }
        return configs.replace(small.SMALL, SMALL | model | self.layout(folder)).resolve()

    def text(self) -> str:
        """The text of its file."""
        source, form = self.file
        name, overlap = schedule_of(source)
        spec = TableSpec(
            name,
            self.stages,
            SCHEDULES[source],
            self.microbatches,
            remat_full=self.remat[0] == "full",
            vocabulary="end_stages",
            overlap=overlap,
        )
        write = table_csv.to_csv if form == "table" else order_csv.to_order_csv
        return write(by_name.make_table(spec))


def schedule_of(name: str) -> tuple[str, bool]:
    """The values of `pipeline.schedule` and `pipeline.overlap`."""
    return name.removesuffix(IN_CELLS), name.endswith(IN_CELLS)


@functools.cache
def whole() -> tuple[Case, ...]:
    """Every number of layers × stages × schedule × remat. Files take turns; the other values are
    drawn, from a fixed seed, of those that fit."""
    files, random = itertools.cycle(FILES), np.random.default_rng(3)
    pick = lambda values: values[random.integers(len(values))]
    cases = []
    for layers, stages, schedule, remat in itertools.product(ALL_LAYERS, STAGES, SCHEDULES, REMATS):
        file = next(files) if schedule == CSV else ("", "")
        split, microbatches = pick(tuple(SPLITS)), pick(MICROBATCHES)
        if IN_CELLS in schedule + file[0]:
            microbatches = max(MICROBATCHES)  # with fewer, no cell has F and B
        numbers = split, remat, microbatches, file
        drawn = [
            Case(layers, dense, depth, stages, schedule, *numbers)
            for dense, depth in itertools.product(DENSE, DEPTHS)
        ]
        cases.append(pick([case for case in drawn if case.fits]))
    return tuple(cases)


WHOLE = whole()
# A chunk of the first stage has no layer.
SAMPLE = (Case(7, 1, 1, 2, "zb_v", "zero 3", REMATS[0], 3),)
PASSED = matrix.Passed(
    "end layers", pathlib.Path(__file__), *(pathlib.Path(m.__file__) for m in (plain_loop, small))
)


def grouped(cases: Sequence[Case]) -> list:
    """As parameters. Those of one model go to one process, which makes its reference once."""
    group = lambda case: f"ends-{case.layers}-{case.dense}-{case.depth}"
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(group(case)))
        for case in sorted(cases, key=group)
    ]


def check(case: Case, folder: pathlib.Path) -> None:
    cfg = case.config(folder)
    assert make_setup(cfg).table.overlaps == (IN_CELLS in case.schedule + case.file[0])
    plain_loop.assert_same(plain_loop.gradients(cfg), plain_loop.reference(cfg, 1))


def test_the_matrix_has_what_it_should():
    assert len(set(WHOLE)) == len(WHOLE) == 360 and all(case.fits for case in WHOLE)
    pairs = set().union(*(case.pairs for case in WHOLE))
    values = {
        "layers": ALL_LAYERS,
        "dense": DENSE,
        "depth": DEPTHS,
        "stages": STAGES,
        "schedule": tuple(SCHEDULES),
        "split": tuple(SPLITS),
        "remat": REMATS,
    }
    for (a, of_a), (b, of_b) in itertools.combinations(values.items(), 2):
        assert pairs >= {((a, x), (b, y)) for x, y in itertools.product(of_a, of_b)}, (a, b)
    assert {case.file for case in WHOLE if case.schedule == CSV} == set(FILES)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_same_gradients(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", grouped(WHOLE))
def test_same_gradients_in_the_whole_matrix(case, tmp_path):
    if case in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    check(case, tmp_path)
    PASSED.add(case)


# --- checkpoints ----------------------------------------------------------------------------------

ONE_DEVICE = {
    "mesh.data": 1,
    "mesh.stage": 1,
    "mesh.expert": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "pipeline.overlap": False,
    "pipeline.save": (),
}
ZERO = {"mesh.data": 2, "mesh.expert": 1, "parallel.zero": 3}
RECIPE = {"model.layers": 6, "data.batch_size": 12}  # of deepseek_tiny, for 8 chunks and any layout


def state_of(step: Step, trees: Sequence[dict]) -> TrainState:
    """The state with these parameters and moments (plain)."""
    params, *moments = trees
    state = small.first_state(step, params)
    put = lambda like, a: jax.device_put(np.asarray(a), like.sharding)
    laid_out = lambda old, new: jax.tree.map(put, old, small.from_plain(step.layout, new))
    old = [optax.tree_utils.tree_get(state.optimizer, name) for name in ("mu", "nu")]
    mu, nu = map(laid_out, old, moments)
    return dataclasses.replace(
        state, optimizer=optax.tree_utils.tree_set(state.optimizer, mu=mu, nu=nu)
    )


def check_checkpoints(layouts: Sequence[Config], folder: pathlib.Path) -> None:
    """The state of each layout is saved, and restored on one device and on the layouts beside it in
    the list; that of one device is restored on all."""
    one = configs.replace(layouts[0], ONE_DEVICE).resolve()
    random = np.random.default_rng(5)
    some = lambda a: random.standard_normal(a.shape, np.float32)
    params = plain_loop.weights(one)
    trees = [params, *(jax.tree.map(some, params) for _ in ("mu", "nu"))]
    steps = [make_step(cfg, small.mesh_of(cfg)) for cfg in (one, *layouts)]
    states = []
    for number, step in enumerate(steps):
        with jax.set_mesh(step.mesh):
            states.append(state_of(step, trees))
            manager = Checkpointer(folder / str(number), stored_shapes(step.layout, step.optimizer))
            manager.save(1, states[-1], {})
            manager.close()
    for number in range(len(steps)):
        near = {0, (number - 1) % len(steps), (number + 1) % len(steps)}
        for target in (near if number else set(range(len(steps)))) - {number}:
            step = steps[target]
            shapes = stored_shapes(step.layout, step.optimizer)
            with jax.set_mesh(step.mesh):
                state = restore(folder / str(number), 1, step.abstract_state(), shapes)
                assert_same(state, states[target])


def layouts_of(cases: Sequence[Case], folder: pathlib.Path, recipe: bool = False) -> list[Config]:
    """The configs of cases of one model, and after each that splits experts the same with ZeRO-3
    over data in its place. recipe: of configs/deepseek_tiny.py"""
    found = []
    for case in cases:
        cfg = case.config(folder)
        if recipe:
            base = load_recipe(ROOT / "configs" / "deepseek_tiny.py")
            cfg = configs.replace(base, RECIPE | case.layout(folder)).resolve()
        with_experts = case.split == "experts"
        found += [cfg, *([configs.replace(cfg, ZERO).resolve()] if with_experts else [])]
    return found


def test_checkpoints(tmp_path):
    cases = [
        Case(7, 1, 1, 3, CSV, "one device", REMATS[1], 6, ("interleaved", "table")),
    ]
    check_checkpoints(layouts_of(cases, tmp_path, recipe=True), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "dense", "depth", "recipe"),
    [(7, 1, 2, False), (12, 2, 1, False), (26, 3, 2, False), (7, 1, 1, True)],
)
def test_checkpoints_of_all_layouts(layers, dense, depth, recipe, tmp_path):
    """In an order by chance, so that neighbours have unlike placements."""
    files, splits, cases = itertools.cycle(FILES), itertools.cycle(("one device", "experts")), []
    for schedule, stages in itertools.product(SCHEDULES, STAGES):
        numbers = next(splits), REMATS[1], 6, next(files) if schedule == CSV else ("", "")
        cases.append(Case(layers, dense, depth, stages, schedule, *numbers))
    np.random.default_rng(4).shuffle(cases)
    check_checkpoints(layouts_of(cases, tmp_path, recipe), tmp_path)
