"""Random configs that cannot work, and whether what the trainer says about them is true: for
tests/by_hand/fuzz.py; nothing is trained here.

`draw_invalid` draws flags over configs/tiny.py that are refused on so many simulated devices.
`refusal_holds` asks the trainer's own checks, in this process and without jax, takes the flags out
of the error line as a shell would, puts them behind the others and checks again:
everything that a run checks before it compiles must pass at the first try, and no flag of the
suggestion may be idle.
"""

import math
import pathlib
import random
import re
import shlex
import threading
from typing import Any

from jaxtrain import cli, config as cfg, train_command as train
from jaxtrain.config import ConfigError
from jaxtrain.config.flags import SHARED_FLAGS, apply, read_flags
from jaxtrain.config.recipes import load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment, first_violation
from jaxtrain.config.rules.mesh_rules import AXES, on_mesh
from jaxtrain.pipeline.run_checks import RULES_WITH_TABLES
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.run.exit_status import RunError
from jaxtrain.schedule.orders import SCHEDULES

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
DEVICES = (1, 2, 3, 4, 6, 7, 8, 8, 8, 12, 16)
ODD_SIZES = (
    -7,
    -1,
    0,
    1,
    2,
    3,
    5,
    6,
    7,
    9,
    11,
    12,
    13,
    16,
    17,
    64,
    1000,
    1_000_003,
    2**31 - 1,
    2**31,
)
NO_VALUES = (
    "",
    "x",
    "1.5",
    "1e3",
    "nan",
    "-inf",
    "true",
    "None",
    "(1,)",
    '("a"',
    "3,2,2,1",
    "1,,x",
    "3 2",
    "'",
)
WORDS = (
    "auto",
    "none",
    "1f1b",
    "csv:absent.csv",
    "csv:",
    "ring",
    "inteleaved",
    "Float32",
    "step ",
    "",
)


def draw_base(chance: random.Random) -> dict[str, Any]:
    """Settings of a small model and its layout, which often work and need not."""
    heads, dim = chance.choice((2, 4, 6, 8)), chance.choice((4, 8, 16))
    settings: dict[str, Any] = {
        "model.layers": chance.choice((2, 4, 6, 8, 9)),
        "model.heads": heads,
        "model.width": heads * dim,
        "model.kv_heads": chance.choice((0, 0, heads, 1, 2)),
        "data.sequence_length": chance.choice((16, 32, 48, 64)),
        "data.batch_size": chance.choice((8, 12, 16, 24)),
        "mesh.stage": chance.choice((1, 2, 2, 3, 4)),
        "mesh.model": chance.choice((1, 1, 2, 3)),
        "pipeline.microbatches": chance.choice((1, 2, 3, 4)),
        "pipeline.schedule": chance.choice((*SCHEDULES, "auto")),
        "pipeline.repeats": 0,
        "pipeline.remat": chance.choice(("full", "selective", "none")),
        "parallel.zero": chance.choice((0, 1, 2, 3)),
    }
    if chance.random() < 0.3:
        settings |= {
            "mesh.data": chance.choice((1, 2, 3, 4)),
            "mesh.replica": chance.choice((1, 2)),
        }
    if chance.random() < 0.2:
        settings |= {
            "mesh.context": chance.choice((1, 2)),
            "parallel.context": chance.choice(("all_gather", "ulysses", "ring")),
        }
    if chance.random() < 0.3:
        settings |= {
            "model.experts": chance.choice((4, 6, 8)),
            "mesh.expert": chance.choice((1, 2)),
            "model.router_groups": 2,
        }
    if chance.random() < 0.2:
        settings |= {
            "model.attention": "mla",
            "model.kv_heads": 0,
            "model.kv_rank": 8,
            "model.rope_head_dim": 4,
        }
    if "model.experts" in settings and chance.random() < 0.4:
        settings |= {
            "model.dense_layers": chance.choice((0, 1, 2)),
            "parallel.expert_nodes": chance.choice((1, 2)),
        }
    if chance.random() < 0.3:
        settings |= {
            "parallel.ends": chance.choice(("auto", "replicated", "sharded")),
            "pipeline.overlap": chance.choice((False, True)),
        }
    if chance.random() < 0.2:
        settings |= {"model.mtp_depth": chance.choice((1, 2))}
    if chance.random() < 0.2:
        settings |= {"mesh.replica": 2, "train.diloco_inner_steps": 5, "precision.outer": "int8"}
    if chance.random() < 0.2:
        settings |= {
            "pipeline.layer_costs": (1.0,) * settings["model.layers"],
            "pipeline.times": (2.0, 2.0, 1.0),
        }
    return settings


def spoil(chance: random.Random) -> tuple[str, str]:
    """A setting and a text for it that may not work: of another size, another choice, out of
    bounds, of another type."""
    kind = chance.random()
    paths = list(cfg.fields())
    if kind < 0.45:  # the sizes that have to fit each other
        path = chance.choice(
            [f"mesh.{axis}" for axis in AXES]
            + [p for p in paths if p.startswith(("model.", "pipeline.")) or "batch" in p]
        )
    else:
        path = chance.choice(paths)
    field = cfg.fields()[path]
    if kind > 0.93:
        return path, chance.choice(NO_VALUES)
    if cfg.setting_of(field).choices.names:
        return path, str(chance.choice((*cfg.setting_of(field).choices.names, *WORDS)))
    if field.type is bool:
        return path, chance.choice(("true", "false", "maybe", "2"))
    if field.type is int:
        return path, str(chance.choice(ODD_SIZES))
    if field.type is float:
        return path, str(chance.choice((-1.0, 0.0, 0.1, 0.5, 1.0, 3.0, 1e9, math.inf)))
    if cfg.item_type(field.type) in (int, float):
        return path, ",".join(
            str(chance.choice((0, 1, 2, 3, -1))) for _ in range(chance.randint(0, 7))
        )
    if path == "data.cache":
        return "train.sample_prompt", "it's  a prompt"
    return path, chance.choice(
        ("text", "absent", "a,b", "a,a", "stdlib", "none", "bytes", "with blank", "")
    )


def flags_of(settings: dict[str, Any]) -> list[str]:
    return [f"--config.{path}={cfg.value_text(value)}" for path, value in settings.items()]


def draw_invalid(chance: random.Random, devices: int = 8) -> list[str]:
    """Flags that the trainer refuses on `devices` simulated devices: a base, and one to three
    settings that are spoilt."""
    while True:
        spoilt = [spoil(chance) for _ in range(chance.randint(1, 3))]
        flags = flags_of(draw_base(chance)) + [f"--config.{path}={text}" for path, text in spoilt]
        if not works(flags, devices):
            return flags


def works(flags: list[str], devices: int) -> bool:
    """Whether a run with these flags would begin to compile; without a search for what would do."""
    reading = read_flags(flags, "", (*SHARED_FLAGS, *train.FLAGS), with_config=True)
    recipe = load_recipe(RECIPE)
    config = apply(recipe, reading.overrides)
    environment = Environment(devices, "cpu", recipe, rules=RULES_WITH_TABLES)
    if reading.errors or first_violation(config, environment):
        return False
    make_setup(on_mesh(config, devices).resolve())
    return True


def config_of(flags: list[str]) -> cfg.Config:
    """The config that flags make of the recipe; nothing is checked."""
    return apply(
        load_recipe(RECIPE),
        read_flags(flags, "", (*SHARED_FLAGS, *train.FLAGS), with_config=True).overrides,
    )


# ast.parse, by which flags are read, fails now and then in several threads of CPython 3.11
_parsing = threading.Lock()


def refusal_of(flags: list[str], devices: int) -> str:
    """The error line that the flags end with, "" if they work. Threads may call it."""
    try:
        with _parsing:
            config, namespace = cli.parse(
                [f"--config={RECIPE}", f"--cpu_devices={devices}", *flags], "", train.FLAGS
            )
        environment = Environment(devices, "cpu", namespace.recipe, rules=RULES_WITH_TABLES)
        checks.check(config, environment)
        make_setup(on_mesh(config, devices).resolve())
    except (ConfigError, RunError) as error:
        return f"error: {error}"
    return ""


def suggested(line: str) -> list[str]:
    """The flags of an error line's suggestion, as a shell takes them."""
    _, use, text = line.partition(" (and ")[0].rpartition(": use --")
    words: list[str] = []
    for word in shlex.split("--" + (text.rpartition(" (or ")[0] or text)) if use else []:
        if not word.startswith("--"):
            break
        words.append(word)
    return words


def refusal_holds(flags: list[str], devices: int) -> str | None:
    """What is wrong with the refusal of these flags; None if all is as it should be."""
    line = refusal_of(flags, devices)
    if not line:
        return "it is not refused"
    if "\n" in line or not line.startswith("error: "):
        return f"it is not one line that begins with error: {line!r}"
    try:
        words = suggested(line)
    except ValueError as error:
        return f"no shell can read its suggestion ({error}): {line}"
    if not words:  # nothing stands for a text that is no value, or for a file that is missing
        unread = re.search(r"=('.*'|\S*) (is not an? |is neither |is no folder )", line)
        return None if unread else f"it suggests no flags: {line}"
    again = refusal_of([*flags, *words], devices).removeprefix("error: ")
    if again and f"{again})" not in line:  # what no flag mends was said
        return f"what it suggests is refused: {line} → {again}"
    for idle in words if len(words) > 1 else ():
        if works([*flags, *(word for word in words if word != idle)], devices):
            return f"{idle} is idle: {line}"
    return None
