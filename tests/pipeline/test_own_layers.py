"""What a layer of one's own cannot have is refused before a run, in one line that names it."""

import pytest

from jaxtrain import config as configs
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.rules import checks
from jaxtrain.pipeline.run_checks import RULES

FILE = """
import dataclasses
import jax, jax.numpy as jnp
from flax import nnx

class Good(nnx.Module):
    context = "local"

    def __init__(self, width, *, rngs, inner: int = 16, gate: bool = True,
                 sizes: tuple[int, ...] = (1,), kind: str | None = None,
                 ends: tuple[int, ...] | None = None, names=("a",)):
        assert (type(inner), type(gate), {*map(type, sizes)}) == (int, bool, {int})
        assert ends in (None, (2, 3)) and names in (("a",), ("b", "c"))
        self.w = nnx.Param(jnp.ones((width, inner)), axes=("width", "mlp"))

    def __call__(self, x, positions, segments):
        w = self.w[...].astype(x.dtype)
        return x + x @ w @ w.T

def parameter(*args, **metadata):
    class Layer(Good):
        def __init__(self, width, *, rngs):
            self.w = nnx.Param(*args, **metadata)
    return Layer

def call(run):
    class Layer(Good):
        def __call__(self, x, positions, segments):
            return run(self, x)
    return Layer

def add_to_mean(self, x, positions, segments):
    self.mean[...] = self.mean[...] + x.mean()
    return x

def branch(self, x):
    if x.sum() > 0:
        return x
    return -x

class Mean(Good):
    def __init__(self, width, *, rngs):
        self.mean = nnx.BatchStat(jnp.zeros(()))
    __call__ = add_to_mean

class Dropout(Good):
    def __init__(self, width, *, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
    def __call__(self, x, positions, segments):
        return self.drop(x)

class Even(Good):
    @dataclasses.dataclass
    class Settings:
        inner: int
        def __post_init__(self):
            if self.inner % 2:
                raise ValueError(f"inner={self.inner} is odd")

class Checked(Good):
    @dataclasses.dataclass(frozen=True, slots=True)
    class Settings:
        inner: int = 16
        def __post_init__(self):
            assert self.inner > 0, "inner is not positive"

class Annotated(Good):
    def __init__(self, width, *, rngs, size: "Unknown" = 1):
        pass

Shorter = call(lambda self, x: x[:, 1:])
Pair = call(lambda self, x: (x, None))
Float32 = call(lambda self, x: x.astype("float32"))
Branch = call(branch)
Axis = parameter(jnp.ones((4, 4)), axes=("width", "mlq"))
Batch = parameter(jnp.ones((4, 4)), axes=("width", "batch"))
Joined = parameter(jnp.ones((4, 4)), axes=(("data", "model"), None))
Axes = parameter(jnp.ones((4, 4)), axes=("width",))
Twice = parameter(jnp.ones((4, 4)), axes=("mlp", "heads"))
Integer = parameter(jnp.ones(4, "int32"))
Odd = parameter(jnp.ones((128, 15)), axes=("width", "mlp"))
class Reads(Good):
    context = ""
class Raises(Good):
    def __init__(self, width, *, rngs):
        raise RuntimeError("first line\\nsecond line")
class Narrow(Good):
    def __call__(self, x, positions):
        return x
number = 3
"""
BRANCH_LINE = FILE.split("\n").index("    if x.sum() > 0:") + 1
RAISES_LINE = FILE.split("\n").index('        raise RuntimeError("first line\\nsecond line")') + 1
NO_STATE = "in its call: a layer has no state and draws no random numbers"
FAULTS = {
    "Shorter": "returns [2, 127, 128] for an input of [2, 128, 128]",
    "Pair": "returns a tuple, and not an array like its input",
    "Float32": "returns float32 for an input of bfloat16 (precision.compute): end with .astype",
    "Axis": "has a parameter w with the unknown axis 'mlq' (mlp?)",
    "Batch": "has a parameter w with the unknown axis 'batch' (they are width, heads, kv_heads, ",
    "Joined": "has a parameter w with the unknown axis ('data', 'model') (they are width, heads, ",
    "Axes": "has a parameter w of shape (4, 4) with 1 axes, ('width',)",
    "Twice": "has a parameter w with axes ('mlp', 'heads'), and mesh.model can split one of them",
    "Integer": "has a parameter w of int32, which no optimizer can train: make it an nnx.Variable",
    "Mean": f"changes mean (BatchStat) {NO_STATE}",
    "Dropout": f"changes drop.rngs.count (RngCount) {NO_STATE}",
    "Branch": "cannot be called with (x, positions, segments): layers.py, line "
    f"{BRANCH_LINE}, raises TracerBoolConversionError: ",
    "Raises": f"cannot be constructed: layers.py, line {RAISES_LINE}, raises RuntimeError: first",
    "Narrow": "cannot be called with (x, positions, segments): TypeError: ",
    "Annotated": "has annotations that cannot be read: NameError: name 'Unknown' is not defined",
    "number": "names 3, which is no class of flax.nnx.Module",
    "Absent": "names Absent, which layers.py does not define: it has ",
}
MESH = {
    "Odd": ("mesh.model=2 does not divide the 15 of w in ", {"mesh.model": 1}),
    "Reads": ("mesh.context=2 splits sequences, and ", {"mesh.context": 1}),
}
SETTINGS = {
    ("Good", "iner=3"): "has model.block_settings.iner='3', which Good does not know (inner?)",
    ("Good", "inner=x"): "has model.block_settings.inner='x', which is no int",
    ("Good", "gate=3"): "has model.block_settings.gate='3', which is no bool",
    ("Good", "sizes=1+x"): "has model.block_settings.sizes='1+x', which is no int",
    ("Good", "inner"): "has 'inner', which is not NAME=VALUE",
    ("Even", "inner=3"): "is refused by Even: inner=3 is odd",
    ("Checked", "inner=0"): "is refused by Checked: inner is not positive",
    ("Even", "other=3"): "has model.block_settings.other='3', which Even does not know",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "layers.py"
    path.write_text(FILE)
    return path


def check(**settings) -> None:
    paths = {name.replace("__", "."): value for name, value in settings.items()}
    config = configs.replace(Config(), {"precision.compute": "bfloat16"} | paths)
    checks.check(config, checks.Environment(8, "cpu", rules=RULES))


def refusal(**settings) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check(**settings)
    assert "\n" not in str(error.value)
    return error.value


def test_a_good_one_has_its_settings(file):
    tuples = ("sizes=1+2", "sizes=1,2", "ends=2+3", "names=b,c")
    for text in ("inner=8", "gate=false", "kind=a", *tuples):
        check(model__block=f"{file}:Good", model__block_settings=(text,), mesh__model=2)
    check(model__block=f"{file}:Checked", model__block_settings=("inner=8",))
    check(model__mixer=f"{file}:Good", mesh__context=2)
    check(model__pattern=("full", "block"), model__block=f"{file}:Good")


@pytest.mark.parametrize("name", FAULTS)
def test_one_line_about_each_fault(file, name, monkeypatch):
    monkeypatch.chdir(file.parent)
    error = refusal(model__block=f"layers.py:{name}")
    assert error.field == "model.block" and error.rule.startswith(FAULTS[name])


def test_a_mixer_s_faults_are_its_own(file):
    error = refusal(model__mixer=f"{file}:Shorter", model__pattern=("full", "mixer"))
    assert error.field == "model.mixer" and error.rule.startswith(FAULTS["Shorter"])


@pytest.mark.parametrize("name", MESH)
def test_axes_that_it_does_not_have(file, name):
    rule, fix = MESH[name]
    error = refusal(model__block=f"{file}:{name}", mesh__context=2, mesh__model=2)
    assert str(error).startswith(rule) and f"model.block='{file}:{name}'" in str(error)
    assert error.fixes[0] == fix


@pytest.mark.parametrize(("name", "text"), SETTINGS)
def test_settings_are_checked(file, name, text):
    error = refusal(model__block=f"{file}:{name}", model__block_settings=(text,))
    assert error.field == "model.block_settings" and error.rule.startswith(SETTINGS[name, text])
    # nothing is suggested but a name that is near
    nearest = ("inner=3",) if text == "iner=3" else None
    assert error.fixes[0].get("model.block_settings") == nearest


def test_a_kind_s_settings_are_mended_in_its_entries(file):
    kinds = (f"block.block={file}:Good", "block.block_settings.iner=3", "block.heads=2")
    error = refusal(model__pattern=("full", "block"), model__kinds=kinds)
    mended = (f"block.block={file}:Good", "block.heads=2", "block.block_settings.inner=3")
    assert error.fixes[0] == {"model.kinds": mended}


def test_a_setting_without_a_default_is_needed(file):
    error = refusal(model__block=f"{file}:Even")
    assert error.rule == "lacks model.block_settings.inner, which has no default"
