"""Layouts beside a planned one: what training takes, reckoned as the plan is."""

import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.costs.hardware import load
from jaxtrain.plan import layout_flag
from jaxtrain.plan.nearby import nearby
from jaxtrain.plan.predict import exactly, predict

H100 = load("h100")
LAYOUTS = (
    {"mesh.data": 8, "mesh.model": 8, "pipeline.microbatches": 8},
    {"mesh.data": 4, "mesh.stage": 8, "mesh.model": 2, "pipeline.microbatches": 16},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=("one stage", "eight stages"))
def test_changes_are_what_train_takes(layout):
    """Each is on as many devices, passes every check, and is planned as it is alone; some are faster, and they are in order."""
    config = configs.replace(load_recipe(find_recipe("llama3_8b")), {"data.batch_size": 64, "pipeline.remat": "full", **layout})
    now = exactly(predict(config.resolve(), H100))
    changes = nearby(now)
    assert [change.seconds for change in changes] == sorted(change.seconds for change in changes) and changes[0].seconds < now.seconds
    assert {"pipeline.remat=none", "parallel.zero=3"} <= {f"{k}={v}" for change in changes for k, v in change.settings.items()}
    for change in changes:
        changed = configs.checks.check_devices(configs.replace(config, change.settings), 64, "gpu").resolve()
        other = predict(changed, H100)
        scale = now.seconds / now.work.step().seconds
        assert (scale == 1.0) == (now.in_flight is None) and change.seconds == pytest.approx(scale * other.work.step().seconds)
        differs = layout_flag.read(change.text)
        assert differs and differs == {key: layout_flag.of(changed)[key] for key in differs} != {
            key: layout_flag.of(now.config)[key] for key in differs
        }
