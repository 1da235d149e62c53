"""Mixture of experts: a router that chooses some of many MLPs for each token, and the losses and
counts that balance their load.

`MoE.__call__` is the way of a token. `spread` gathers tokens over `model`, and the router chooses
experts. `to_experts` sends a row for each choice to the device of its expert (in two steps by way
of a gateway), where the expert's MLP is applied to it. `product_combined` sends the results back
and adds them up, and `collect` splits them along the sequence. parallel/experts/__init__.py says
which file has what.

Shape suffixes: B batch, T tokens, K choices of a token, D width, E experts, F columns of an expert.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ResolvedModel
from jaxtrain.config.saved_values import MLP_HIDDEN, MLP_IN, ROUTED, ROUTER
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.layers import GATHERED, activation_of, matmul, matrix, named
from jaxtrain.models.spec import Parameter, Spec, parameter
from jaxtrain.parallel import fp8
from jaxtrain.parallel.attention import context
from jaxtrain.parallel.experts import dispatch, exchange_group, products
from jaxtrain.parallel.experts.activation import Bias, activated, biased, weigh
from jaxtrain.parallel.experts.routing import Routing, TwoSteps, choice_counts
from jaxtrain.parallel.experts.routing_collectives import by_capacity, dropless
from jaxtrain.parallel.tensor import flat

# Added to a sum of scores, all of which may be next to 0, before it divides them (DeepSeek-V3's
# code).
TINY = 1e-20
# A power of two by which both sides of that division are multiplied: the gradient divides by the
# square of the sum, which would be 0 in float32.
SCALE = 2.0**40


@jax.custom_vjp
def with_loss(y: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns y, and adds `loss` (a scalar) to the step's loss: only its gradient is used."""
    return y


with_loss.defvjp(lambda y, loss: (y, None), lambda _, g: (g, jnp.ones((), jnp.float32)))


@jax.custom_vjp
def with_counts(y: jax.Array, parameters: list, counts: list) -> jax.Array:
    """Returns y, and makes `counts` the gradients of `parameters`, which y does not depend on."""
    return y


with_counts.defvjp(lambda y, parameters, counts: (y, counts), lambda counts, g: (g, counts, None))


def _normalized(scores: jax.Array) -> jax.Array:
    """Scores [..., n] divided by their sum over the last dimension."""
    scaled = scores * SCALE
    return scaled / (scaled.sum(-1, keepdims=True) + SCALE * TINY)


def _counter(experts: int) -> Parameter:
    """A parameter [E] whose gradient is a count."""
    return parameter(Spec((experts,), ("expert",), counts=True))


class Router(nnx.Module):
    """Chooses `choices` of the experts for each token.

    A choice's weight is its score, from a softmax over all experts or a sigmoid; `normalized`
    weights are divided by their sum over the token's choices. `bias` is added to the scores only
    for the choice; the experts' load moves it, not a gradient (Wang et al. 2024). Without a bias,
    `load` is the parameter whose "gradient" is the load. With `groups`, a token's experts come from
    `group_limit` of them: the groups with the highest sum of their `group_best` best scores, bias
    included (DeepSeek-V3, section 2.1.2, as in its released code). `logit_bias` is trained: it is
    added to the logits, and so a part of the scores and of the weights (GPT-OSS).
    """

    def __init__(self, cfg: ResolvedModel, batch_size: int, nodes: int = 1):
        self.kind, self.experts, self.choices = cfg.router, cfg.experts, cfg.experts_per_token
        self.nodes = nodes
        self.scale, self.normalized = cfg.router_scale, cfg.router_normalize == "always"
        self.groups, self.group_limit = cfg.router_groups, cfg.router_group_limit
        self.group_best = min(cfg.router_group_best, cfg.experts // cfg.router_groups)
        self.balance_loss, self.z_loss, self.batch_size = cfg.balance_loss, cfg.z_loss, batch_size
        self.capacity, self.device_capacity = cfg.capacity_factor, cfg.expert_room
        shape, axes = (cfg.width, cfg.experts), ("width", "expert")
        self.weight = parameter(Spec(shape, axes, std=cfg.init_std, exact=True))
        biased = "router" in cfg.biases
        self.logit_bias = parameter(Spec((cfg.experts,), ("expert",))) if biased else None
        self.bias = _counter(cfg.experts) if cfg.router_bias else None
        self.load = None if cfg.router_bias else _counter(cfg.experts)
        bounded = self.capacity or self.device_capacity
        self.dropped = _counter(cfg.experts) if bounded else None

    def __call__(self, x_BTD, drops: bool):
        """Returns (the choices' weights, float32 [B, T, K]; the routing of tokens to experts), for
        the full sequence x.

        The router's losses and counts are attached to the weights. Without `drops` no capacity
        applies.
        """
        x = x_BTD.astype(jnp.float32)
        # TPUs and GPUs multiply float32 in fewer bits unless asked: choices would depend on the
        # rounding.
        logits = named(ROUTER, matmul(flat(x), self.weight[...], jax.lax.Precision.HIGHEST))
        if self.logit_bias is not None:
            logits += self.logit_bias[...]
        logits_BTE = constrain(logits.reshape(*x.shape[:-1], -1), GATHERED)
        scores_BTE = (
            jax.nn.softmax(logits_BTE) if self.kind == "softmax" else jax.nn.sigmoid(logits_BTE)
        )
        load = self.load if self.bias is None else self.bias
        assert load is not None  # one of the two is there
        chosen_BTK = self._choose(
            jax.lax.stop_gradient(scores_BTE if self.bias is None else scores_BTE + self.bias[...])
        )
        gates_BTK = jnp.take_along_axis(scores_BTE, chosen_BTK, -1)
        if self.normalized:
            gates_BTK = _normalized(gates_BTK)
        counts, counters = [choice_counts(chosen_BTK, self.experts).sum(0)], [load[...]]
        routing: Routing | TwoSteps
        if self.capacity and drops:
            routing, dropped = by_capacity(chosen_BTK, self.experts, self.capacity)
        else:
            routing, dropped = dropless(
                chosen_BTK, self.experts, self.device_capacity if drops else 0.0, self.nodes
            )
        if self.dropped is not None:
            counts, counters = [*counts, dropped], [*counters, self.dropped[...]]
        gates_BTK = with_counts(gates_BTK * self.scale, counters, counts)
        return with_loss(gates_BTK, self._losses(logits_BTE, scores_BTE)), routing

    def _choose(self, scores_BTE) -> jax.Array:
        """Each token's experts by their scores, int32 [B, T, K]."""
        if self.groups > 1:
            by_group = scores_BTE.reshape(*scores_BTE.shape[:-1], self.groups, -1)
            best = jax.lax.top_k(by_group, self.group_best)[0].sum(-1)
            groups = jax.lax.top_k(best, self.group_limit)[1]
            allowed = (groups[..., None] == jnp.arange(self.groups)).any(-2)
            scores_BTE = jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(scores_BTE.shape)
        return jax.lax.top_k(scores_BTE, self.choices)[1].astype(jnp.int32)

    def _losses(self, logits_BTE, scores_BTE) -> jax.Array:
        """This device's term of the router's two losses with their weights, float32 scalar. Each is
        a mean over the step's sequences: the imbalance of a sequence's load (DeepSeek-V3, eq.
        17–20), and the mean square of its tokens' log-sum-exp of logits (Zoph et al. 2022, eq. 5).
        """
        tokens = scores_BTE.shape[1] * context.size()
        loss = jnp.zeros(())
        if self.balance_loss:
            best = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE), self.choices)[1]
            load_BE = context.sum_over(choice_counts(best, self.experts)) * (
                self.experts / self.choices / tokens
            )
            shares_BE = _normalized(scores_BTE).sum(1) / tokens
            loss += self.balance_loss * (load_BE * shares_BE).sum()
        if self.z_loss:
            loss += self.z_loss * (jax.nn.logsumexp(logits_BTE, -1) ** 2).sum() / tokens
        return loss / self.batch_size


class ExpertBiases(nnx.Module):
    """The biases of an MLP of so many columns, or with `experts` of one for each expert."""

    def __init__(self, cfg: ResolvedModel, columns: int, experts: int = 0):
        lead, axes = ((experts,), ("experts",)) if experts else ((), ())
        vectors = lambda n, axis: parameter(Spec((*lead, n), (*axes, axis), vectors=True))
        self.up, self.down = vectors(columns, "mlp"), vectors(cfg.width, "width")
        self.gate = vectors(columns, "mlp") if cfg.is_gated else None


def _bias(vectors: Parameter, gates: jax.Array | None = None, sizes=None) -> Bias:
    """The biases [E, F], or [F] of all shared experts as of one, of rows with these weights."""
    return Bias(vectors[...].reshape(-1, vectors.shape[-1]), gates, sizes)


class MoE(nnx.Module):
    """Experts, each an MLP of `expert_width` columns, of which a token uses some; and
    `shared_experts` that all tokens use, with one weight a token where they have `shared_weight`
    (Qwen2-MoE).

    batch_size: sequences in a step, over which the router's losses are a mean.
    nodes: the number that the experts' devices span; with several, rows go in two steps
    """

    def __init__(self, cfg: ResolvedModel, residual_std: float, batch_size: int, nodes: int = 1):
        d, f, shared = cfg.width, cfg.expert_width, cfg.shared_experts * cfg.expert_width
        self.experts, self.nodes = cfg.experts, nodes
        self.router = Router(cfg, batch_size, nodes)
        up_EDF, down_EFD = ("experts", "width", "mlp"), ("experts", "mlp", "width")
        weight = lambda shape, axes, std: parameter(Spec(shape, axes, std=std, product=True))
        up = lambda: weight((cfg.experts, d, f), up_EDF, cfg.init_std)
        shared_up = lambda: weight((d, shared), up_EDF[1:], cfg.init_std)
        self.up, self.gate = up(), up() if cfg.is_gated else None
        self.down = weight((cfg.experts, f, d), down_EFD, residual_std)
        self.shared_up = shared_up() if shared else None
        self.shared_gate = shared_up() if shared and cfg.is_gated else None
        self.shared_down = weight((shared, d), down_EFD[1:], residual_std) if shared else None
        by_token = Spec((d, 1), ("width", "expert"), std=cfg.init_std)
        self.shared_weight = parameter(by_token) if shared and cfg.shared_gate else None
        self.activation = activation_of(cfg)
        self.biases = ExpertBiases(cfg, f, cfg.experts) if "experts" in cfg.biases else None
        self.shared_biases = ExpertBiases(cfg, shared) if shared and "mlp" in cfg.biases else None

    def __call__(self, x_BTD, drops: bool = True) -> jax.Array:
        """[B, T, D] → [B, T, D], both split along the sequence. Without `drops` no choice of an
        expert is dropped."""
        b, t, d = x_BTD.shape
        # The router and the experts read all tokens: one gather, and one sum of both gradients.
        gathered_BTD, x_MBTD = exchange_group.spread(x_BTD)
        gates_BTK, routing = self.router(gathered_BTD, drops)
        x_MBTD = fp8.differentiable(x_MBTD, self.up.get_value())
        is_fp8 = isinstance(x_MBTD, fp8.Quantized)
        # A scale of FP8 is the largest of all numbers: empty rows are zeros then.
        mean_rows = 0 if is_fp8 else gates_BTK.size
        spec = exchange_group.DispatchSpec(
            self.experts, b, t, fills_empty=is_fp8, nodes=self.nodes, mean_rows=mean_rows
        )
        shared_hidden = shared_gates = None
        if self.shared_up is not None:
            # The shared experts' first products overlap with the all-to-all to the experts, in two
            # steps with the one across nodes, their last product with the one back; so do the
            # gradients'. Left to itself XLA overlaps all of them with one of the two, or with the
            # few numbers that routing exchanges.
            x_MERD = dispatch.after_routing(routing, x_MBTD).reshape(x_MBTD.shape[0], 1, b * t, d)
            inner = _inner(x_MERD, self.shared_up, self.shared_gate, self.shared_biases)
            shared_hidden = self.activation(*inner)
            if self.shared_weight is not None:
                logits_T1 = matmul(flat(gathered_BTD), matrix(self.shared_weight, gathered_BTD))
                # in float32, as the weights of choices are
                shared_gates = jax.nn.sigmoid(logits_T1.astype(jnp.float32)).reshape(1, b * t)
                shared_hidden = weigh(shared_hidden, shared_gates)
        at_gateways = dispatch.to_gateways(x_MBTD, routing, spec)
        in_steps = isinstance(routing, TwoSteps)
        if shared_hidden is not None and in_steps:
            at_gateways, shared_hidden = dispatch.behind_one_barrier(at_gateways, shared_hidden)
        received, gates = dispatch.to_experts(at_gateways, gates_BTK, routing, spec)
        received = named(ROUTED, received)
        if shared_hidden is not None and not in_steps:
            received, shared_hidden = dispatch.behind_one_barrier(received, shared_hidden)
        if shared_hidden is not None:
            shared_hidden = named(MLP_HIDDEN, shared_hidden)
        inner = _inner(received, self.up, self.gate, self.biases, routing.sizes, mean_rows)
        hidden = activated(self.activation, inner, gates, routing.sizes, mean_rows)
        hidden = named(MLP_HIDDEN, hidden)
        bias = None if self.biases is None else _bias(self.biases.down, gates, routing.sizes)
        down = _matrices(self.down, hidden)
        y_MBTD = products.product_combined(hidden, down, bias, routing, spec)
        if shared_hidden is not None and self.shared_down is not None:
            down = _matrices(self.shared_down, shared_hidden)
            shared = products.product(shared_hidden, down, None, products.ROWS)
            if self.shared_biases is not None:
                shared = biased(shared, _bias(self.shared_biases.down, shared_gates), 0, False)
            y_MBTD += shared.reshape(y_MBTD.shape)
        return exchange_group.collect(y_MBTD)


def _matrices(weight: Parameter, x):
    """The experts' matrices [E, …], or the shared experts' as one, in the dtype of x or
    quantized."""
    matrices = matrix(weight, x)
    return matrices if len(matrices.shape) == 3 else fp8.mapped(lambda a: a[None], matrices)


def _inner(
    x,
    up: Parameter,
    gate: Parameter | None,
    biases: ExpertBiases | None,
    sizes=None,
    mean_rows: int = 0,
) -> list[jax.Array]:
    """The products of the experts' MLPs before the activation, with biases if there are any.

    sizes: tokens of each expert, in the order of x; None where all tokens are one expert's
    mean_rows: the mean number of x's rows
    """
    if gate is None:
        results = [products.product(x, _matrices(up, x), sizes, products.COLUMNS)]
    else:
        weights = _matrices(up, x), _matrices(gate, x)
        results = [*products.two_products(x, *weights, sizes, mean_rows)]
    if biases is not None:
        add = lambda y, vectors: biased(y, _bias(vectors, sizes=sizes), mean_rows, True)
        results = [*map(add, results, (biases.up, biases.gate))]
    return [named(MLP_IN, y) for y in results]
