"""config.json files that nobody wrote: those of CONFIGS with fields changed, removed and added, and
in the older form. Each is read as a model, which is written and read again as the same one and
whose rules fill every parameter once, or is refused by a line that names a field."""

import random
import re

import pytest
from support.hf_imported import laid_out
from support.hf_models import CONFIGS, older

from jaxtrain.config import Config
from jaxtrain.hf.families import FAMILIES
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.model_config import differing, read_model, write_model

CASES = 15  # of each family
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 20, 24)
WRONG = (None, 0, -1, 1.5, "4", True, [], {}, float("nan"), 10**400, ["full_attention"])
SCALINGS = (
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0},
    {"type": "yarn", "factor": 32.0, "beta_fast": None, "mscale": 1, "mscale_all_dim": 0},
    {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 7, "truncate": False},
    {"rope_type": "yarn"},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default"}},
)
ADDED = {
    "attn_logit_softcapping": 30.0,
    "index_topk": 2048,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_nextn_predict_layers": 1,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "some_field": 1,
    "use_sliding_window": True,
}


def changed(values: dict, draw: random.Random) -> dict:
    """A config.json with up to four changes."""
    values = dict(values)
    for _ in range(draw.randrange(5)):
        kind = draw.choice(["size", "size", "flip", "remove", "remove", "wrong", "add", "rope"])
        name = draw.choice([name for name in values if name != "model_type"])
        if kind == "size":
            name = draw.choice([name for name, value in values.items() if type(value) is int])
            values[name] = draw.choice(SIZES)
        elif kind == "flip" and isinstance(values[name], bool):
            values[name] = not values[name]
        elif kind == "remove":
            del values[name]
        elif kind == "wrong":
            values[name] = draw.choice(WRONG)
        elif kind == "add":
            name = draw.choice(list(ADDED))
            values[name] = ADDED[name]
        elif kind == "rope":
            values[draw.choice(["rope_parameters", "rope_scaling"])] = draw.choice(SCALINGS)
    if draw.random() < 0.3 and isinstance(values.get("rope_parameters", {}), dict):
        values = older(values)
    return values


def known_fields(kind: str) -> set[str]:
    """The fields of a family, whether they are in a file or not."""
    family = FAMILIES[kind]
    written = write_model(Config(model=read_model(CONFIGS[kind], "")[1]).fill().model, family, 8)
    return {*written, *family.aliases, "num_nextn_predict_layers", "max_position_embeddings"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_read_or_refused(kind):
    draw, known = random.Random(kind), known_fields(kind)
    configs = [values for values in CONFIGS.values() if values["model_type"] == kind]
    outcomes = {"read": 0, "refused": 0}
    for _ in range(CASES):
        values = changed(draw.choice(configs), draw)
        try:
            family, model, _ = read_model(values, "config.json")
        except HfError as error:
            outcomes["refused"] += 1
            named = re.match(r"config\.json: (\w+)", str(error))
            assert named and named[1] in {*values, *known}, (str(error), values)
            assert "\n" not in str(error)
            continue
        outcomes["read"] += 1
        written = write_model(Config(model=model).fill().model, family, 64)
        assert not [*differing(read_model(written, "config.json")[1], model)], values
        laid_out(values)  # raises unless the rules fill every parameter once
    assert min(outcomes.values()) >= CASES // 8, outcomes
