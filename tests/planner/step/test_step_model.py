"""What a config's step is assumed to be by the hardware that it is planned for."""

import pytest
from support import small

from jaxtrain import config as configs
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.step.step_model import GATHER_OVERLAP, step_model_of


@pytest.mark.parametrize("name", GATHER_OVERLAP)
def test_as_much_of_zeros_collectives_overlaps_as_libtpu_makes_asynchronous(name):
    changes = {"mesh.data": 8, "mesh.stage": 1, "mesh.model": 1, "parallel.zero": 3}
    config = configs.replace(small.config(), changes | {"parallel.reduce": "auto"}).resolve()
    step = step_model_of(config, load(name)).step()
    hidden, exposed = step.hidden.get("data", 0.0), step.exposed["data"]
    assert hidden / (hidden + exposed) == pytest.approx(GATHER_OVERLAP[name], abs=0.02)
