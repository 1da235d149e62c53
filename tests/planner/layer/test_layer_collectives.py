"""A layer's collectives over `model` follow from the description of its products and parameters."""

import dataclasses

import pytest

from benchmarks.model_forms import llama
from jaxtrain.config import ParallelConfig, PrecisionConfig
from jaxtrain.config.saved_values import PRODUCTS
from jaxtrain.planner.layer.collective_time import StepCollectives
from jaxtrain.planner.layer.layer import INPUTS, OUTPUTS, Layer, ParameterShape, Product
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import GATHER, SCATTER, SUM
from jaxtrain.planner.layer.model import Model
from jaxtrain.planner.layer.settings import FLOAT32, StepSettings

WIDTH, TOKENS, ITEM = 64, 32, 2
MODEL = llama(4, WIDTH, 8, 8, 8, 192, 256, TOKENS)
FP8 = StepSettings(precision=PrecisionConfig(matmul="fp8"))
LAYER = MODEL.layer()
ROW = TOKENS * WIDTH * ITEM  # bytes of an activation as wide as the layer
SELECTIVE = {"remat": "selective", "stage": 2}
NAMED = {**SELECTIVE, "save": PRODUCTS}  # as by default, but for products without a name


def array(name: str, *shape: int, split: bool = False) -> ParameterShape:
    """A parameter, whose last dimension `model` may split."""
    axes = (*[""] * (len(shape) - 1), "model" * split)
    return ParameterShape(name, shape, axes, len(shape) > 1, len(shape) > 1)


def sent(
    monkeypatch, layer: Layer, op: str, unread: bool = False, fp8: bool = False, **layout
) -> dict[str, float]:
    """Bytes by kind of a layer's collectives over `model`."""
    monkeypatch.setattr(Model, "layer", lambda model, dense: layer)
    step = StepCollectives(MODEL, Layout(model=4, **layout), FP8 if fp8 else StepSettings())
    sizes = dict.fromkeys((GATHER, SCATTER, SUM), 0.0)
    for kind, axes, size, times, *_ in step.layer(op, unread=unread):
        assert axes == ("model",)
        sizes[kind] += size * times
    return sizes


def with_part(arrays: tuple = (), products: tuple = ()) -> Layer:
    """The layer with further parameters, and with products before its MLP's."""
    before, after = LAYER.products[:2], LAYER.products[2:]
    return dataclasses.replace(
        LAYER, arrays=(*LAYER.arrays, *arrays), products=(*before, *products, *after)
    )


def changes(monkeypatch, layer: Layer, **layout) -> dict[tuple[str, str], float]:
    """(op, kind) → bytes that a layer sends more than the plain one."""
    return {
        (op, kind): more
        for op in "FRBW"
        for kind, size in sent(monkeypatch, layer, op, **layout).items()
        if (more := size - sent(monkeypatch, LAYER, op, **layout)[kind])
    }


@pytest.mark.parametrize(
    "parameter, size",
    [
        (array("third_norm.scale", WIDTH), FLOAT32 * WIDTH),
        (array("scale", 1), FLOAT32),
        (array("attention.out.bias", WIDTH), ITEM * WIDTH),  # added in the compute type
        (array("mixing.weight", WIDTH, 3), ITEM * WIDTH * 3),
        (array("attention.query.bias", WIDTH, split=True), 0),
    ],
)
def test_a_parameter_that_all_devices_have_is_summed(monkeypatch, parameter, size):
    """Its gradient is, in W: a third norm, a learned number, a bias behind a row-parallel
    product."""
    expected = {("W", SUM): size} if size else {}
    assert changes(monkeypatch, with_part((parameter,))) == expected


def gate(makes: str = "", read: bool = True, value: int = 90, call: int = 90) -> Layer:
    """A layer whose attention's output has a gate. value: what it is made of; call: by which"""
    names = ("attention.gate.weight",)
    return with_part(
        (array(*names, WIDTH, WIDTH, split=True),),
        (Product(names, WIDTH, WIDTH, OUTPUTS, value, call, makes=makes, read=read),),
    )


def test_a_gate_of_attention_s_input_shares_its_all_gather(monkeypatch):
    """B makes the gate again, whose value has no name, although it has queries and keys. Gradients
    of products of one call are one sum."""
    attention = LAYER.products[0]
    shared = gate(value=attention.value, call=attention.call)
    assert changes(monkeypatch, shared, stage=2) == {}
    assert changes(monkeypatch, shared, **SELECTIVE) == {}
    assert changes(monkeypatch, shared, **NAMED) == {("B", GATHER): ROW}
    assert changes(monkeypatch, gate(value=attention.value)) == {("B", SCATTER): ROW}
    called = {("F", GATHER): ROW / 2, ("R", GATHER): ROW / 2, ("W", GATHER): ROW / 2}
    of_fp8 = changes(monkeypatch, gate(value=attention.value), fp8=True)
    assert of_fp8 == called | {("B", SCATTER): ROW}  # each call rounds what it gathers


def test_a_gate_of_another_value_gathers_it(monkeypatch):
    """F and W gather what it reads, and B sums the gradient."""
    gathered = {("F", GATHER): ROW, ("R", GATHER): ROW, ("B", SCATTER): ROW, ("W", GATHER): ROW}
    assert changes(monkeypatch, gate(), stage=2) == gathered
    named = {("B", GATHER): ROW} | gathered
    assert changes(monkeypatch, gate(), **SELECTIVE) == gathered
    assert changes(monkeypatch, gate(), **NAMED) == named  # B makes it again
    assert changes(monkeypatch, gate("qkv"), **NAMED) == gathered
    assert changes(monkeypatch, gate(read=False), **NAMED) == gathered


def test_a_product_that_each_device_makes_of_its_tokens(monkeypatch):
    """Nothing is gathered for it; its matrix's gradient is summed."""
    names = ("attention.gate.weight",)
    part = with_part((array(*names, WIDTH, 8),), (Product(names, WIDTH, 8, ""),))
    assert changes(monkeypatch, part) == {("W", SUM): ITEM * WIDTH * 8}


def test_a_matrix_that_is_used_twice(monkeypatch):
    """Each use has a sum of its gradient."""
    uses = [Product(("mixing.weight",), WIDTH, 8, "", n, n) for n in (90, 91)]
    part = with_part((array("mixing.weight", WIDTH, 8),), tuple(uses))
    assert changes(monkeypatch, part) == {("W", SUM): 2 * ITEM * WIDTH * 8}


@pytest.mark.parametrize("shared", [True, False])
def test_results_of_one_sum_share_the_gather_of_its_gradient(monkeypatch, shared):
    last = LAYER.products[-1]
    more = last._replace(names=("more.down",), call=90, gradient=last.gradient if shared else 90)
    sums = {("F", SCATTER): ROW, ("R", SCATTER): ROW}
    gathers = {} if shared else {("B", GATHER): ROW}
    assert changes(monkeypatch, with_part((), (more,))) == sums | gathers


def test_a_norm_behind_the_last_product_reads_it(monkeypatch):
    """R skips the sum of the last product's results where nothing reads them."""
    *others, last = LAYER.products
    assert last.split == INPUTS and not last.read
    normed = dataclasses.replace(LAYER, products=(*others, last._replace(read=True)))
    skipped = [sent(monkeypatch, of, "R", unread=True)[SCATTER] for of in (LAYER, normed)]
    assert skipped == [ROW, 2 * ROW]


def test_a_norm_behind_experts_reads_what_they_send_back(monkeypatch):
    """R, whose output nothing reads, brings the results back nevertheless."""
    model = dataclasses.replace(MODEL, experts=4, experts_per_token=2, expert_width=32)
    plain = model.layer()
    normed = [product._replace(read=True) for product in plain.products]
    exchanges, counts = [], []
    for layer in (plain, dataclasses.replace(plain, products=tuple(normed))):
        monkeypatch.setattr(Model, "layer", lambda model, dense, of=layer: of)
        step = StepCollectives(model, Layout(expert=2, stage=2), StepSettings(imbalance=1.0))
        exchanges.append(sum(c.size == 2 * ROW for c in step.layer("R", unread=True)))
        for remat in ("none", "selective"):  # B has them sent back once more
            layout = Layout(expert=2, stage=2, model=2, remat=remat)
            step = StepCollectives(model, layout, StepSettings(imbalance=1.0))
            back = [c.size == 2 * ROW for c in step.layer("B") if c.axes == ("expert",)]
            scattered = [c.kind == SCATTER for c in step.layer("B")]
            counts.append((sum(back), sum(scattered)))
    assert exchanges == [1, 2]
    plain, normed = counts[:2], counts[2:]
    assert normed[0] == plain[0] and normed[1] == (plain[1][0] + 1, plain[1][1] + 1)


def test_an_mlp_beside_experts_shares_what_they_gather(monkeypatch):
    layer = dataclasses.replace(MODEL, experts=4, experts_per_token=2, expert_width=32).layer()
    router = next(product for product in layer.products if product.makes == "router")
    beside = Product(("beside.up",), WIDTH, 8, OUTPUTS, router.value, 90)
    more = dataclasses.replace(layer, products=(*layer.products, beside))
    for op, summed in (("F", 0.0), ("B", ROW), ("W", 0.0)):
        before, after = sent(monkeypatch, layer, op, stage=2), sent(monkeypatch, more, op, stage=2)
        assert after == before | {SCATTER: before[SCATTER] + summed}


def test_a_module_with_experts_gathers_once(monkeypatch):
    """For router, routed and shared experts together, and none of its parameters is summed."""
    model = dataclasses.replace(MODEL, experts=4, experts_per_token=2, shared_experts=1)
    layer = dataclasses.replace(model, expert_width=32).layer()
    assert [product.split for product in layer.products[2:]].count(OUTPUTS) == 2
    for op in "FBW":
        assert sent(monkeypatch, layer, op) == sent(monkeypatch, LAYER, op)


def test_what_w_gathers_again_keeps_its_type():
    """Where B has gathered the experts' input once more, W in its op gathers attention's alone, in
    FP8."""
    model = dataclasses.replace(MODEL, experts=4, experts_per_token=2, expert_width=32)
    layout = Layout(model=4, remat="selective")
    step = StepCollectives(model, layout, FP8)
    sizes = [c.size for c in step.layer("W") if c.kind == GATHER and c.axes == ("model",)]
    assert sizes == [TOKENS * WIDTH]


@pytest.mark.parametrize("op", ["F", "B"])
def test_a_window_has_its_own_way_over_context(op):
    """A ring's messages are neighbours' tokens in layers with a window, or all tokens where these
    are no more."""

    def over_context(way: str, window: int) -> list:
        settings = StepSettings(parallel=ParallelConfig(context=way))
        model = dataclasses.replace(MODEL, window=window)
        return StepCollectives(model, Layout(context=2), settings).layer(op)

    assert over_context("ring", 8) == over_context("all_gather", 8)
    assert over_context("ring", 12) == over_context("all_gather", 12)
    assert over_context("ring", 12) == over_context("all_gather", 0) != over_context("ring", 0)
    bytes_of = lambda window: sum(c.size * c.times for c in over_context("ring", window))
    assert bytes_of(8) < bytes_of(12)
