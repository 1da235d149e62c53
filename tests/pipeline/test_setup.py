"""From a config to tables and placement: what is chosen, and one line for what does not fit."""

import dataclasses
import itertools

import pytest
from support import small

from jaxtrain import config as configs
from jaxtrain.config import ConfigError
from jaxtrain.config.rules.checks import Environment, error_of
from jaxtrain.pipeline.run_checks import RULES_WITH_TABLES
from jaxtrain.pipeline.setup import make_setup, times_of
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.model import model_of
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.files.order_csv import to_order_csv
from jaxtrain.schedule.files.table_csv import to_csv
from jaxtrain.schedule.orders import SCHEDULES
from jaxtrain.schedule.table import Op
from jaxtrain.schedule.table_spec import TableSpec


def setup(schedule="1f1b", repeats=0, stages=4, microbatches=8, **changes):
    return make_setup(
        small.config(
            (1, stages, 1), schedule, repeats, microbatches, {"model.layers": 12} | changes
        )
    )


def test_repeats_are_the_schedules_fewest():
    for schedule, known in SCHEDULES.items():
        assert len(setup(schedule).table.stage_of) == 4 * known.least_repeats, schedule


def test_remat_decides_about_recompute_ops():
    has = {
        remat: bool((setup(**{"pipeline.remat": remat}).table.op == Op.R).any())
        for remat in ("full", "selective", "none")
    }
    assert has == {"full": True, "selective": False, "none": False}


def test_gpipe_computes_its_last_unit_again_too():
    """Its Bs do not follow their Fs: residuals of one microbatch at a time, where there would be
    all."""
    slots = setup("gpipe").train.pool_sizes
    assert (slots["residual_b"], slots["residual_w"]) == (1, 1)
    assert setup("gpipe", **{"pipeline.remat": "none"}).train.pool_sizes["residual_b"] == 8


def test_units_of_uneven_chunks():
    made = setup(**{"pipeline.chunk_layers": (2, 5, 3, 2), "pipeline.layers_per_op": 2})
    assert made.placement.sizes == (2, 2, 2, 1, 2, 1, 2) and made.table.stage_of == (
        0,
        1,
        1,
        1,
        2,
        2,
        3,
    )
    # of a stage's work, 12 layers over 4 stages
    assert made.shares == tuple(n / 3 for n in made.placement.sizes)


def test_chunks_without_layers():
    """As in Llama 3's pipeline of 126 layers in 16 stages of 8 chunks: embedding and head stand
    alone."""
    made = setup("interleaved", 4, **{"model.layers": 14})
    assert made.placement.sizes == (0, *(1,) * 14, 0)
    assert made.placement.layers_of(3, 3) == range(14, 14)
    assert made.shares[0] == made.shares[-1] == 0
    fifteen = setup("interleaved", 4, **{"model.layers": 15})
    assert fifteen.placement.sizes == (*(1,) * 15, 0)


def test_chunks_by_costs():
    costs = (1.0,) * 8 + (4.0,) * 4  # six a stage: no cut does better than eight
    made = setup(**{"pipeline.layer_costs": costs})
    shares = [made.shares[made.table.stage_of.index(s)] for s in range(4)]
    assert max(shares) == pytest.approx(8 / 6) and sum(shares) == pytest.approx(4)


def test_times():
    cfg = small.config((1, 4, 1), changes={"model.layers": 12})
    m = cfg.model
    layer = 4 * 32 * 32 + 3 * 32 * 64
    assert model_of(cfg.model, 16).layer().per_token == layer
    experts = {
        "model.experts": 8,
        "model.experts_per_token": 2,
        "model.shared_experts": 1,
        "model.expert_width": 16,
    }
    with_experts = model_of(small.config(changes=experts).model, 16)
    # what a token takes; the router
    assert with_experts.layer().per_token == 4 * 32 * 32 + 3 * 32 * 3 * 16 + 32 * 8
    head = 3 * m.vocab_size * m.width / (3 * layer)
    times = times_of(cfg)
    assert (times.F, times.B, times.W, times.R) == (1, 1, 1, 1) and times.head == pytest.approx(
        head
    )
    given = lambda *numbers: dataclasses.astuple(
        times_of(configs.replace(cfg, {"pipeline.times": numbers}))
    )[:6]
    assert given(2.0, 3.0, 4.0) == (2, 3, 4, 0, 2, pytest.approx(2 * head))
    assert given(2.0, 3.0, 4.0, 5.0, 6.0, 7.0) == (2, 3, 4, 5, 6, 7)


def test_a_large_vocabulary_is_shared():
    assert setup(stages=8, **{"model.vocab_size": 4096}).table.vocabulary == "parallel"
    for where in ("parallel", "end_stages"):
        assert setup(**{"pipeline.vocabulary": where}).table.vocabulary == where


def test_a_file_is_followed(tmp_path):
    path = tmp_path / "mine.csv"
    table = make_table(TableSpec("zb_v", 4, 2, 8, vocabulary="end_stages"))
    path.write_text(to_csv(table))
    made = setup(f"csv:{path}", **{"pipeline.remat": "none"})
    assert (
        made.table.stage_of == table.stage_of
        and (made.table.op == table.op).all()
        and made.table.vocabulary == "end_stages"
    )
    fewer = setup(f"csv:{path}", **{"pipeline.remat": "none", "model.layers": 6})
    assert fewer.placement.sizes == (0, 1, 1, 1, 1, 1, 1, 0)
    wrong = {
        "pipeline.remat='full' needs R ops": {},
        "pipeline.vocabulary='parallel' is not that of csv:": {
            "pipeline.remat": "none",
            "pipeline.vocabulary": "parallel",
        },
        "pipeline.chunk_layers=(6, 6) has another number": {
            "pipeline.remat": "none",
            "pipeline.chunk_layers": (6, 6),
        },
        "model.layers=5 are fewer than the units": {"pipeline.remat": "none", "model.layers": 5},
        "pipeline.microbatches=4 is not the 8 of the table": {
            "pipeline.remat": "none",
            "pipeline.microbatches": 4,
        },
    }
    for message, changes in wrong.items():
        with pytest.raises(ConfigError) as found:
            setup(f"csv:{path}", **changes)
        assert message in str(found.value) and "\n" not in str(found.value)


def test_an_order_from_a_file_is_packed_as_a_named_schedule(tmp_path):
    """With recomputation, chunks cut into ops and any place of the vocabulary, as the config
    says."""
    path = tmp_path / "zb_v.csv"
    path.write_text(to_order_csv(make_table(TableSpec("zb_v", 4, 2, 8))))
    for changes in (
        {},
        {"pipeline.remat": "none", "pipeline.vocabulary": "end_stages"},
        {"pipeline.layers_per_op": 1, "pipeline.permute": "late"},
        {"pipeline.chunk_layers": (1, 1, 1, 1, 2, 2, 2, 2)},
        {"pipeline.chunk_layers": (0, 1, 2, 2, 2, 2, 3, 0)},
        {"model.layers": 6},
        {"model.layers": 6, "model.experts": 4, "model.dense_layers": 1},
    ):
        named, made = setup("zb_v", **changes), setup(f"csv:{path}", 0, **changes)
        assert made.table.cells == named.table.cells and made.placement == named.placement
        assert made.table.vocabulary == named.table.vocabulary
    for message, changes in {
        "pipeline.microbatches=4 is not the 8 of": {"pipeline.microbatches": 4},
        "model.layers=5 are fewer than the units": {"model.layers": 5},
        "pipeline.chunk_layers=(6, 6) has another number": {"pipeline.chunk_layers": (6, 6)},
    }.items():
        with pytest.raises(ConfigError) as error:
            setup(f"csv:{path}", 0, **changes)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_chunk_with_fewer_layers_than_units_in_the_file_is_refused(tmp_path):
    path = tmp_path / "cut.csv"
    path.write_text(to_csv(make_table(TableSpec("gpipe", 2, 1, 4, units_per_chunk=(2, 2)))))
    with pytest.raises(
        ConfigError,
        match=r"pipeline.chunk_layers=\(11, 1\) leaves a chunk fewer layers than it has units "
        r".*chunk_layers=$",
    ):
        setup(
            f"csv:{path}", 0, 2, 4, **{"pipeline.remat": "none", "pipeline.chunk_layers": (11, 1)}
        )


def test_what_a_file_needs_is_suggested_at_once(tmp_path):
    """Stages, microbatches and remat of the table, with the mesh and the batch that follow from
    them."""
    path = tmp_path / "my table.csv"
    path.write_text(to_csv(make_table(TableSpec("zb_v", 4, 2, 6, vocabulary="end_stages"))))
    config = configs.replace(
        configs.Config(),
        {"model.layers": 8, "mesh.stage": 2, "mesh.model": 3, "pipeline.schedule": f"csv:{path}"},
    )
    environment = Environment(8, "cpu", configs.Config(), rules=RULES_WITH_TABLES)
    error = error_of(config, environment)
    assert error is not None
    changes = error.fixes[0]
    assert error_of(configs.replace(config, changes), environment) is None
    assert (changes["mesh.stage"], changes["pipeline.microbatches"], changes["pipeline.remat"]) == (
        4,
        6,
        "selective",
    )
    assert set(changes) == {
        "mesh.stage",
        "mesh.model",
        "pipeline.microbatches",
        "pipeline.remat",
        "data.batch_size",
    }


def test_a_broken_file_is_refused_with_schedules_that_work(tmp_path):
    path = tmp_path / "broken.csv"
    path.write_text("stage 0,stage 1,permute\nF0.0,,soon\n")
    config = configs.replace(
        configs.Config(), {"mesh.stage": 2, "pipeline.schedule": f"csv:{path}"}
    )
    error = error_of(config, Environment(2, "cpu", rules=RULES_WITH_TABLES))
    assert error is not None and str(error).count(": use ") == 1
    assert str(error).endswith(": use --config.pipeline.schedule=gpipe (or 1f1b)")


@pytest.mark.parametrize("permute", ["auto", "late", "aligned", "early", "spaced"])
@pytest.mark.parametrize("repeats", [0, 1, 2, 3])
def test_without_a_bound_of_its_own_auto_always_finds_a_table(permute, repeats):
    """Aligned rows hold more than late ones, more chunks a stage more than one."""
    for stages, remat in itertools.product((2, 4), ("full", "none")):
        changes = {"pipeline.permute": permute, "pipeline.remat": remat}
        table = setup("auto", repeats, stages, **changes).table
        assert table.name.startswith("auto-") and (
            not repeats or len(table.stage_of) == repeats * stages
        )


@pytest.mark.parametrize("chunks", [(5, 7), (2, 4, 3, 3)])
def test_auto_takes_chunks_as_they_are(chunks):
    made = setup("auto", 0, 2, **{"pipeline.chunk_layers": chunks})
    assert made.placement.sizes == chunks


def test_a_file_without_backward_is_refused(tmp_path):
    file = tmp_path / "forward.csv"
    file.write_text("stage 0,stage 1\nF0.0,\nF0.1,F0.0\n,F0.1\n")
    with pytest.raises(
        ConfigError,
        match="has F ops alone, and training needs their B and W: use "
        "--config.pipeline.schedule=gpipe",
    ):
        setup(f"csv:{file}", 0, 2, 2, **{"pipeline.remat": "none"})


def test_dense_layers_first_take_time_with_the_embedding():
    moe = {"model.experts": 4, "model.expert_width": 32, "model.mlp_width": 128}
    changes = moe | {"model.dense_layers": 2}
    cfg = small.config((1, 2, 1), changes=changes)
    dense, layer = 4 * 32 * 32 + 3 * 32 * 128, 4 * 32 * 32 + 2 * 3 * 32 * 32 + 32 * 4
    assert times_of(cfg).embed == pytest.approx(2 * 2 * dense / (layer * 4 / 2))
    assert times_of(small.config((1, 2, 1), changes=moe)).embed == 0
    # planned ones are those of the layers, which send nothing to experts
    planned = times_of(small.config((1, 2, 1), changes=changes | {"train.hardware": "h100"}))
    work = step_model_of(cfg, load("h100"))
    assert planned.embed == pytest.approx(1e3 * work.dense_layers.seconds / 2, rel=1e-3)


def test_stages_with_dense_layers_or_predictions_have_fewer_others():
    heavy = {"model.experts": 4, "model.dense_layers": 2, "model.layers": 10, "model.mtp_depth": 1}
    times = {"pipeline.times": (1.0, 1.0, 1.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.9)}
    sizes = lambda schedule, **more: (
        setup(schedule, stages=2, **heavy, **times, **more).placement.sizes
    )
    # a layer takes 3 · 2 / 10, the dense ones 1.8, the head 0.3
    assert sizes("1f1b") == (4, 6)
    assert sizes("1f1b", **{"pipeline.chunk_layers": (7, 3)}) == (7, 3)
    assert sizes("zb_v") == (2, 4, 3, 1)


def test_too_little_memory_names_what_is_enough():
    with pytest.raises(
        ConfigError, match=r"pipeline.memory=0.1 is too little for any table found: use "
    ) as found:
        setup("auto", **{"pipeline.memory": 0.1})
    enough = float(str(found.value).split("use --config.pipeline.memory=")[1])
    assert setup("auto", **{"pipeline.memory": enough}).table.name.startswith("auto-")


def test_the_line_for_people():
    heavy = setup(
        **{
            "pipeline.times": (1.0, 1.0, 1.0, 0.0, 0.0, 3.0),
            "pipeline.vocabulary": "end_stages",
            "pipeline.remat": "none",
        }
    )
    said = "which the busiest stage, which works 1.6 times the mean, has no work); "
    assert said in heavy.describe()
    assert "busiest" not in setup(**{"pipeline.times": (1.0, 1.0, 1.0)}).describe()
    assert (
        "% (the part of a step in which a stage has no work); " in setup().describe()
        and setup(stages=1).describe() == "8 microbatches one after the other"
    )
