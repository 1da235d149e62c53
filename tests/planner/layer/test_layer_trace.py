"""A layer as the planner reads it (model.py, layer_trace.py) beside sums by hand, and beside the
operations of its ops (runtime/layers/backward_split.py), of random models and of layers with new
parts."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest
from support import trace_products

from benchmarks.model_forms import llama
from jaxtrain import config as configs
from jaxtrain.config import Config, ModelConfig
from jaxtrain.config.groups.model_settings import BIASED
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.devices.mesh import AbsentDevice, traced_for
from jaxtrain.models import transformer
from jaxtrain.models.grouped_query import Attention
from jaxtrain.models.layers import Dense, Norm, column_parallel, named
from jaxtrain.models.spec import Spec, binder, is_spec, parameter, specs
from jaxtrain.planner.layer import layer_trace
from jaxtrain.planner.layer.layer import BATCH, INPUTS, OUTPUTS, Layer
from jaxtrain.planner.layer.layer_collectives import joints
from jaxtrain.planner.layer.model import Model, model_of
from jaxtrain.runtime.layers.backward_split import LayerOp, LayerSplit, keep_named, keep_products
from jaxtrain.runtime.layers.equations import in_attention

TOKENS = 16
SMALL = llama(2, 40, 4, 2, 12, 56, 257, 64)


def random_model(seed: int) -> ModelConfig:
    """A resolved model with random settings; none whose settings break a rule."""
    rng = random.Random(seed)
    heads = rng.choice((1, 2, 3, 4, 6))
    values = {
        "width": rng.choice((24, 40, 65)),
        "heads": heads,
        "head_dim": rng.choice((8, 12, 22)),
        "activation": rng.choice(("swiglu", "gelu", "geglu", "clamped_swiglu")),
        "norm": rng.choice(("rmsnorm", "layernorm")),
        "norm_weight": rng.choice(("scale", "one_plus")),
        "parallel_block": rng.random() < 0.2,
        "mlp_width": rng.choice((0, 51)),
        "tied_embeddings": rng.random() < 0.5,
    }
    if not values["parallel_block"]:
        values["norm_place"] = rng.choice(("before", "after", "both"))
    biases = [part for part in BIASED if rng.random() < 0.4]
    if rng.random() < 0.3:
        values |= {"attention": "mla", "query_rank": rng.choice((0, 20)), "kv_rank": 16}
        values |= {"rope_head_dim": 4, "value_head_dim": rng.choice((0, 10))}
    else:
        values["kv_heads"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        values["qk_norm"] = rng.random() < 0.3
        values["qk_norm_over"] = rng.choice(("head", "projection"))
        values["attention_gate"] = rng.random() < 0.3
    if rng.random() < 0.5:
        values |= {"experts": rng.choice((2, 4, 8)), "experts_per_token": rng.choice((1, 2))}
        values |= {"shared_experts": rng.choice((0, 1, 2)), "expert_width": rng.choice((0, 20))}
        values |= {"dense_layers": rng.choice((0, 1)), "mtp_depth": rng.choice((0, 1))}
        values |= {"router_bias": rng.random() < 0.5, "shared_gate": rng.random() < 0.5}
    has_experts = values.get("experts", 0) > 0
    has_mlp = not has_experts or values["dense_layers"] or values["shared_experts"]
    left_out = set() if has_experts else {"router", "experts"}
    left_out |= set() if has_mlp else {"mlp"}
    left_out |= {"norm"} if values["norm"] == "rmsnorm" else set()
    values["biases"] = tuple(part for part in biases if part not in left_out)
    changes = {f"model.{name}": value for name, value in values.items()}
    return configs.replace(Config(), changes | {"mesh.data": 1}).resolve().model


def split_of(cfg: ModelConfig, dense: bool, keep) -> LayerSplit:
    """The layer of a model, cut into ops, for one sequence of TOKENS tokens."""
    block = transformer.Block(dataclasses.replace(cfg, attention_kernel="xla"), dense=dense)
    bind = binder(block)
    shape = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16 if s.cast else jnp.float32)
    params = jax.tree.map(shape, specs(block), is_leaf=is_spec)
    x = jax.ShapeDtypeStruct((1, TOKENS, cfg.width), jnp.bfloat16)
    extra = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    with traced_for(AbsentDevice("cpu")):
        return LayerSplit(lambda p, x, extra: bind(p)(x, extra), params, x, extra, keep)


def multiplications(split: LayerSplit, op: LayerOp, attention: bool) -> int:
    """Of an op's plain products: those of attention's core, or all others."""
    return sum(
        trace_products.multiplications(equation)
        for equation in split._equations[op]
        if equation.primitive.name == "dot_general" and in_attention(equation) == attention
    )


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 500))]
)
def test_a_random_layer(seed):
    """Its parameters are those of its specifications; the products' sizes are those that its
    forward, and selective remat's backward, multiply with."""
    cfg = random_model(seed)
    model = model_of(cfg, 64)
    parts = transformer.build(cfg)
    for dense in (False, True)[: 1 + (cfg.dense_layers > 0)]:
        layer = model.layer(dense)
        leaves = jax.tree.leaves(parts.specs["first"]["0"] if dense else parts.specs["layer"])
        assert layer.size == sum(spec.size for spec in leaves)
        assert sorted(a.shape for a in layer.arrays) == sorted(spec.shape for spec in leaves)
        if cfg.experts and not dense:  # their products are loops
            continue
        for save in ((), ("attention_norm",), ("qkv", "mlp_norm"), ("mlp_in", "attention_out")):
            split = split_of(cfg, dense, keep_named(save) if save else keep_products)
            forward = multiplications(split, LayerOp.FORWARD, attention=False)
            assert layer.per_token * TOKENS == forward
            core = multiplications(split, LayerOp.FORWARD, attention=True)
            assert layer.core * TOKENS**2 == core
            backward = multiplications(split, LayerOp.BACKWARD, attention=False)
            again = layer.made_again(lambda name, save=save: bool(save) and name not in save)
            assert backward == 2 * forward + again * TOKENS, save
    assert model.parameters() == parts.parameter_count - sum(
        spec.size for spec in jax.tree.leaves(parts.specs.get("predictors", {}))
    )


@pytest.mark.parametrize("recipe", ["tiny", "mixtral_8x7b", "deepseek_v3"])
def test_a_recipe_s_layer(recipe):
    config = load_recipe(find_recipe(recipe)).fill()
    m = config.model
    layer = model_of(m, config.data.sequence_length).layer()
    attention = [p for p in layer.products if not p.of_mlp]
    experts = [p for p in layer.products if p.experts]
    if m.attention == "gqa":
        assert [(p.inputs, p.outputs, p.split, p.makes) for p in attention] == [
            (m.width, (m.heads + 2 * m.kv_heads) * m.head_dim, OUTPUTS, "qkv"),
            (m.heads * m.head_dim, m.width, INPUTS, "attention_out"),
        ]
    else:
        assert [(p.names[0].split(".")[1], p.split, p.makes) for p in attention] == [
            ("compress", "", "latent"),
            ("query", OUTPUTS, "qkv"),
            ("expand", OUTPUTS, "qkv"),
            ("out", INPUTS, "attention_out"),
        ]
    if m.experts:
        assert [(p.inputs, p.outputs, p.experts, p.read) for p in experts] == [
            (m.width, 2 * m.expert_width, m.experts, True),
            (m.expert_width, m.width, m.experts, False),
        ]
        sizes = (array.size for array in layer.arrays if "expert" in array.axes)
        assert sum(sizes) == 3 * m.experts * m.width * m.expert_width
    assert layer.norms_and_sums == 4


# --- layers with new parts ------------------------------------------------------------------------


class Scaled(transformer.Block):
    """A block whose output has a learned factor."""

    def __init__(self, cfg, *args, **kwargs):
        super().__init__(cfg, *args, **kwargs)
        self.factor = parameter(Spec((1,), ("width",), constant=1.0))

    def __call__(self, x_BTD, *args):
        return super().__call__(x_BTD, *args) * self.factor[...].astype(x_BTD.dtype)


class Normed(transformer.Block):
    """A block with a third norm."""

    def __init__(self, cfg, *args, **kwargs):
        super().__init__(cfg, *args, **kwargs)
        self.third_norm = Norm(cfg)

    def __call__(self, x_BTD, *args):
        return self.third_norm(super().__call__(x_BTD, *args))


class Gated(transformer.Block):
    """A block whose attention has a gate for each number of its result."""

    def __init__(self, cfg, *args, **kwargs):
        super().__init__(cfg, *args, **kwargs)
        self.attention = GatedAttention(cfg, 0.02)


class GatedAttention(Attention):
    def __init__(self, cfg, *args):
        super().__init__(cfg, *args)
        shape = cfg.width, cfg.heads * cfg.head_dim
        self.new_gate = Dense(*shape, ("width", "heads"), cfg.init_std, bias=False)

    def __call__(self, x_BTD, *args):
        gate_BTO = jax.nn.sigmoid(column_parallel(x_BTD, self.new_gate)[0])
        row_parallel = self.out.row_parallel
        self.out.row_parallel = lambda y_BTO: row_parallel(y_BTO * gate_BTO)
        return super().__call__(x_BTD, *args)


@pytest.mark.parametrize(
    ("block", "parameters", "multiplied", "joints", "inner"),
    [(Scaled, 1, 0, 0, 0), (Normed, 40, 0, 1, 0), (Gated, 40 * 48, 40 * 48, 0, 2 * 48)],
)
def test_a_new_part(block, parameters, multiplied, joints, inner, monkeypatch):
    """Each is counted without a line about it."""
    plain = SMALL.layer()
    layer_trace.layer_of.cache_clear()
    monkeypatch.setattr(transformer, "Block", block)
    layer = dataclasses.replace(SMALL).layer()
    layer_trace.layer_of.cache_clear()
    assert layer.size - plain.size == parameters
    assert layer.per_token - plain.per_token == multiplied
    assert layer.norms_and_sums - plain.norms_and_sums == joints
    assert layer.inner - plain.inner == inner
    names = {array.name for array in layer.arrays} - {array.name for array in plain.arrays}
    assert len(names) == 1
    # the gradients of factor and norm read the last product's result
    assert layer.products[-1].read == (block is not Gated)


def layer_with(monkeypatch, arrays: dict[str, Spec], call) -> Layer:
    """SMALL's layer where a block has more arrays, and `call(block, x, attention)` in the place of
    its own; attention is a function of a normed x."""

    class Changed(transformer.Block):
        def __init__(self, cfg, *args, **kwargs):
            super().__init__(cfg, *args, **kwargs)
            for name, spec in arrays.items():
                setattr(self, name, parameter(spec))

        def __call__(self, x_BTD, positions_BT):
            return call(self, x_BTD, lambda y_BTD: self.attention(y_BTD, positions_BT))

    layer_trace.layer_of.cache_clear()
    monkeypatch.setattr(transformer, "Block", Changed)
    layer = dataclasses.replace(SMALL).layer()
    layer_trace.layer_of.cache_clear()
    return layer


HEADS = ("heads", "latent", "width")
SHAPES = {
    "transposed": ((8, 40), HEADS[1:], "btd,rd->btr", (40, 8, "")),
    "vector": ((40,), HEADS[2:], "btd,d->bt", (40, 1, "")),
    "to heads": ((40, 4, 6), ("width", *HEADS[:2]), "btd,dnh->btnh", (40, 24, OUTPUTS)),
    "from heads": ((4, 10, 6), HEADS, "btnh,nhd->btd", (40, 6, INPUTS)),
    "in heads": ((4, 10, 6), HEADS, "btnh,nhk->btnk", (10, 24, BATCH)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_product_over_any_dimensions(case, monkeypatch):
    """None of them is of experts, though some have three dimensions."""
    shape, axes, formula, expected = SHAPES[case]

    def call(block, x_BTD, attention):
        x = x_BTD.reshape(*x_BTD.shape[:2], 4, 10) if formula.startswith("btnh") else x_BTD
        y = jnp.einsum(formula, x, block.more[...].astype(x.dtype))
        return x_BTD + y.reshape(*x.shape[:2], -1).sum(-1, keepdims=True)

    (product,) = layer_with(monkeypatch, {"more": Spec(shape, axes)}, call).products
    assert (product.inputs, product.outputs, product.split) == expected
    assert product.experts == 0 and not product.read


def test_a_number_a_reshaped_matrix_and_a_convolution(monkeypatch):
    arrays = {
        "wide": Spec((4, 10, 40), HEADS),
        "near": Spec((3, 1, 40), ("latent", "latent", "width")),
        "number": Spec((), (), constant=1.0),
    }

    def call(block, x_BTD, attention):
        wide, near = (a[...].astype(x_BTD.dtype) for a in (block.wide, block.near))
        kwargs = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": 40}
        x_BTD = x_BTD * block.number[...].astype(x_BTD.dtype) @ wide.reshape(40, 40).T
        return jax.lax.conv_general_dilated(x_BTD, near, (1,), ((2, 0),), **kwargs)

    products = layer_with(monkeypatch, arrays, call).products
    assert [product[1:4] for product in products] == [(40, 40, OUTPUTS), (3, 40, "")]


def test_calls_of_one_matrix_and_of_one_value(monkeypatch):
    """The same MLP twice: each time it gathers and sums. Two calls that read one value share its
    gather, and not the sum of its gradient."""
    twice = layer_with(monkeypatch, {}, lambda block, x, _: block.mlp(block.mlp(x)))
    assert [len(of) for of in joints(twice)[:3]] == [2, 2, 2]
    side = layer_with(monkeypatch, {}, lambda block, x, attention: attention(x) + block.mlp(x))
    assert [len(of) for of in joints(side)[:3]] == [1, 2, 2]
    assert len({product.gradient for product in side.products if product.split == INPUTS}) == 1
    plain = [product for product in SMALL.layer().products if product.split == INPUTS]
    assert len({product.gradient for product in plain}) == 2


def test_a_name_saves_the_products_that_it_is_a_sum_of(monkeypatch):
    """A value behind a gate has them not: the backward reads both factors."""

    def call(block, x_BTD, attention):
        gate_BTD = block.mlp(x_BTD)
        return named("mlp_norm", jax.nn.sigmoid(gate_BTD) * attention(x_BTD))

    *_, gate, _, out = layer_with(monkeypatch, {}, call).products
    assert gate.makes == out.makes == "" and gate.read and out.read
    halved = layer_with(monkeypatch, {}, lambda block, x, _: named("qkv", 0.5 * block.mlp(x)))
    assert halved.products[-1].makes == "qkv" and not halved.products[-1].read


def test_the_same_config_is_traced_once():
    config = load_recipe(find_recipe("tiny")).fill()
    assert model_of(config.model, 16) is model_of(config.model, 16)
    assert isinstance(model_of(config.model, 16), Model)


# --- code of one's own ----------------------------------------------------------------------------


MIXER = """
import jax, jax.numpy as jnp
from flax import nnx

class Mixer(nnx.Module):
    def __init__(self, width, rngs):
        draw = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) / 8)
        self.inward, self.outward, self.gate = draw(width, 24), draw(24, width), draw(width)

    def __call__(self, x, positions, segments):
        y = jnp.cumsum(x @ self.inward[...].astype(x.dtype), 1) / 9
        step = lambda state, token: (state + jnp.tanh(token @ W), token)
        W = self.inward[...].astype(x.dtype)[:24]
        _, y = jax.lax.scan(step, jnp.zeros_like(y[:, 0]), y.swapaxes(0, 1))
        y = y.swapaxes(0, 1)
        scores = jnp.einsum("bti,bsi->bts", y, y) / 9
        return jnp.einsum("bts,bsi->bti", scores, y) @ self.outward[...].astype(x.dtype) * (
            jax.nn.sigmoid(self.gate[...].astype(x.dtype) * x)
        )
"""


@pytest.mark.parametrize("field", ["model.block", "model.mixer"])
@pytest.mark.parametrize("code", ["mamba2.py:Mamba2", "gated_deltanet.py:GatedDeltaNet", ""])
def test_code_of_one_s_own(field, code, tmp_path):
    """A layer has the products of its trace, in scans, too, which stay whole, and of tokens with
    tokens; and the parameters of its module."""
    if not code:
        (tmp_path / "mixer.py").write_text(MIXER)
        code = f"{tmp_path / 'mixer.py'}:Mixer"
    else:
        code = f"layers/{code}"
    cfg = configs.replace(load_recipe(find_recipe("tiny")), {field: code, "mesh.data": 1})
    cfg = configs.replace(cfg, {"data.sequence_length": 256, "mesh.stage": 1}).resolve().model
    block = transformer.block_of(cfg)
    shape = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16 if s.cast else jnp.float32)
    params = jax.tree.map(shape, specs(block), is_leaf=is_spec)
    x = jax.ShapeDtypeStruct((1, 256, cfg.width), jnp.bfloat16)
    call = lambda p, x, positions: binder(block)(p)(x, positions)
    trace = jax.make_jaxpr(call)(params, x, jax.ShapeDtypeStruct((1, 256), jnp.int32))
    layer = model_of(cfg, 256).layer()
    assert layer.per_token * 256 == trace_products.in_trace(trace.jaxpr)
    assert layer.core == layer.scores == 0 < layer.mixing
    assert layer.size == sum(s.size for s in jax.tree.leaves(specs(block), is_leaf=is_spec))
