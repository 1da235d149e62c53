"""Elastic meshes: which sizes give way, that the batch and a device's memory stay, and that
everything else is an error as before."""

import pytest

from jaxtrain import config as cfg
from jaxtrain.config import ConfigError
from jaxtrain.config.rules import checks, mesh_rules

BASE = cfg.replace(
    cfg.Config(), {"mesh.elastic": True, "data.batch_size": 96, "pipeline.microbatches": 2}
)


def sizes(asked: dict, devices: int) -> tuple[int, int, int]:
    """(replica, data, microbatches) of a config that passes every check on so many devices."""
    config = checks.check_devices(cfg.replace(BASE, asked), devices)
    return config.mesh.replica, config.mesh.data, config.pipeline.microbatches


@pytest.mark.parametrize(
    ("replica", "data", "devices", "found"),
    [
        (1, 4, 4, (1, 4, 2)),
        (1, 4, 2, (1, 2, 4)),
        (1, 4, 1, (1, 1, 8)),
        (1, 4, 3, (1, 3, 4)),  # a device has fewer sequences in a microbatch rather than more
        (1, 4, 8, (1, 8, 1)),
        (2, 4, 4, (1, 4, 4)),  # replicas go first
        (2, 4, 2, (1, 2, 8)),
        (2, 4, 6, (2, 3, 4)),
        (2, 2, 3, (1, 3, 4)),
        (2, 4, 16, (4, 4, 1)),
        (2, -1, 3, (1, 3, 2)),
        (2, -1, 8, (2, 4, 2)),
        (1, -1, 4, (1, 4, 2)),
        (-1, 2, 3, (3, 1, 2)),
    ],
)
def test_replica_and_data_give_way(replica, data, devices, found):
    assert sizes({"mesh.replica": replica, "mesh.data": data}, devices) == found


def test_the_other_axes_stay():
    asked = {"mesh.data": 4, "mesh.stage": 2, "mesh.model": 2}
    assert sizes(asked, 8) == (1, 2, 4)
    with pytest.raises(
        ConfigError,
        match=r"mesh.data=4 × mesh.stage=2 × mesh.model=2 = 16 is not the 6 devices: use ",
    ):
        sizes(asked, 6)


def test_what_does_not_divide_is_the_error_that_it_was():
    asked = {"mesh.data": 4, "data.batch_size": 16}
    for devices in (3, 5):
        texts = []
        for is_elastic in (True, False):
            with pytest.raises(ConfigError, match="mesh.data=4 does not fit") as raised:
                sizes(asked | {"mesh.elastic": is_elastic}, devices)
            texts.append(str(raised.value).partition(": use ")[0])
        assert texts[0] == texts[1]


def test_replicas_that_train_apart_stay_as_many():
    apart = {"mesh.replica": 2, "mesh.data": 4, "train.diloco_inner_steps": 10}
    assert sizes(apart, 4) == (2, 2, 4)
    with pytest.raises(ConfigError):
        sizes(apart, 3)


def test_without_the_setting_nothing_gives_way():
    with pytest.raises(ConfigError, match="mesh.data=4 does not fit"):
        checks.check_devices(cfg.replace(BASE, {"mesh.elastic": False, "mesh.data": 4}), 2)


def test_a_files_table_keeps_its_microbatches(tmp_path):
    config = cfg.replace(BASE, {"mesh.data": 4, "pipeline.schedule": f"csv:{tmp_path}/table.csv"})
    assert mesh_rules.adapted(config, 2).pipeline.microbatches == 2


def test_the_line_says_what_gave_way():
    asked = cfg.replace(BASE, {"mesh.replica": 2, "mesh.data": 4})
    say = lambda devices: mesh_rules.elastic_notes(asked, checks.check_devices(asked, devices))
    changed = "mesh.replica 2 → 1, pipeline.microbatches 2 → 4"
    assert (
        say(4) == [f"elastic: {changed} for the 4 devices at hand; a step still has 96 sequences"]
        and say(8) == []
    )


def test_a_checkpoint_of_another_size_is_continued():
    asked = cfg.replace(BASE, {"mesh.data": 4})
    stored = checks.check_devices(asked, 2).resolve()
    checks.check_resume(stored, asked, checks.Environment(4, "cpu"))
