"""Mixture of experts: a router that chooses some of many MLPs for each token, and what keeps their
load even.

Shape suffixes: B batch, T tokens, K choices of a token, D width, E experts, F columns of an expert.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.devices.sharding import constrain
from jaxtrain.models.layers import WHOLE, matmul
from jaxtrain.models.spec import Parameter, parameter
from jaxtrain.parallel import context, experts

TINY = 1e-18  # beside a sum of scores, all of which may underflow; its square is a number, too


@jax.custom_vjp
def with_loss(y: jax.Array, loss: jax.Array) -> jax.Array:
    """y; in the backward `loss` (a scalar) counts as a part of the loss."""
    return y


with_loss.defvjp(lambda y, loss: (y, None), lambda _, g: (g, jnp.ones((), jnp.float32)))


@jax.custom_vjp
def with_counts(y: jax.Array, parameters: list, counts: list) -> jax.Array:
    """y; in the backward the gradients of `parameters`, on which nothing depends, are `counts`."""
    return y


with_counts.defvjp(lambda y, parameters, counts: (y, counts), lambda counts, g: (g, counts, None))


def _counter(experts: int) -> Parameter:
    """A parameter [E] whose gradient is a count."""
    return parameter((experts,), ("expert",), counts=True)


class Router(nnx.Module):
    """Chooses `choices` of the experts for a token.

    Weights are a softmax over all experts or sigmoids; `normalized`, divided by the sum of those
    chosen. `bias` is added to the scores for the choice alone; it is moved by the load of the
    experts (Wang et al. 2024), not by a gradient. With `groups`, a token's experts are in
    `group_limit` of them: those whose `group_best` best experts have the highest sum of such scores
    (DeepSeek-V3, section 2.1.2, as in its released code; a bias counts there, too). Where there is
    no bias, `load` has its place as the parameter on which the load is hung.
    """

    def __init__(self, cfg, batch_size: int):
        self.kind, self.experts, self.choices, self.scale = (
            cfg.router,
            cfg.experts,
            cfg.experts_per_token,
            cfg.router_scale,
        )
        self.groups, self.group_limit, self.normalized = (
            cfg.router_groups,
            cfg.router_group_limit,
            cfg.router_normalize == "always",
        )
        self.group_best = min(cfg.router_group_best, cfg.experts // cfg.router_groups)
        self.balance_loss, self.z_loss, self.batch_size = cfg.balance_loss, cfg.z_loss, batch_size
        self.capacity, self.room = cfg.capacity_factor, cfg.expert_room
        self.weight = parameter(
            (cfg.width, cfg.experts), ("width", "expert"), std=cfg.init_std, exact=True
        )
        self.bias = _counter(cfg.experts) if cfg.router_bias else None
        self.load = None if cfg.router_bias else _counter(cfg.experts)
        self.dropped = _counter(cfg.experts) if self.capacity or self.room else None

    def __call__(self, x_BTD, drops: bool):
        """x, whole along the sequence → (weights of the choices float32 [B, T, K], where their rows
        go).

        The losses and counts of the router hang on the weights. Without `drops` there are no
        bounds.
        """
        x = x_BTD.astype(jnp.float32)
        # On TPUs and GPUs float32 products have fewer bits unless asked: a choice would hang on the
        # rounding.
        logits = matmul(x.reshape(-1, x.shape[-1]), self.weight[...], jax.lax.Precision.HIGHEST)
        logits_BTE = constrain(logits.reshape(*x.shape[:-1], -1), WHOLE)
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
            gates_BTK = gates_BTK / (gates_BTK.sum(-1, keepdims=True) + TINY)
        counted, parameters = [experts.counts(chosen_BTK, self.experts).sum(0)], [load[...]]
        if self.capacity and drops:
            routing, dropped = experts.by_capacity(chosen_BTK, self.experts, self.capacity)
        else:
            routing, dropped = experts.dropless(
                chosen_BTK, self.experts, self.room if drops else 0.0
            )
        if self.dropped is not None:
            counted, parameters = [*counted, dropped], [*parameters, self.dropped[...]]
        gates_BTK = with_counts(gates_BTK * self.scale, parameters, counted)
        return with_loss(gates_BTK, self._losses(logits_BTE, scores_BTE)), routing

    def _choose(self, scores_BTE) -> jax.Array:
        """int32 [B, T, K]."""
        if self.groups > 1:
            by_group = scores_BTE.reshape(*scores_BTE.shape[:-1], self.groups, -1)
            best = jax.lax.top_k(by_group, self.group_best)[0].sum(-1)
            taken = jax.lax.top_k(best, self.group_limit)[1]
            inside = (taken[..., None] == jnp.arange(self.groups)).any(-2)
            scores_BTE = jnp.where(inside[..., None], by_group, -jnp.inf).reshape(scores_BTE.shape)
        return jax.lax.top_k(scores_BTE, self.choices)[1].astype(jnp.int32)

    def _losses(self, logits_BTE, scores_BTE) -> jax.Array:
        """This device's part of the losses' mean over the step's sequences: of how uneven each
        one's load is (DeepSeek-V3, eq. 17–20), and of the logits' size (Zoph et al. 2022, eq.
        5)."""
        tokens = scores_BTE.shape[1] * context.size()
        loss = jnp.zeros(())
        if self.balance_loss:
            best = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE), self.choices)[1]
            load_BE = context.sum_over(experts.counts(best, self.experts)) * (
                self.experts / self.choices / tokens
            )
            shares_BE = (scores_BTE / (scores_BTE.sum(-1, keepdims=True) + TINY)).sum(1) / tokens
            loss += self.balance_loss * (load_BE * shares_BE).sum()
        if self.z_loss:
            loss += self.z_loss * (jax.nn.logsumexp(logits_BTE, -1) ** 2).sum() / tokens
        return loss / self.batch_size


class MoE(nnx.Module):
    """Experts, each an MLP of `expert_width` columns, of which a token takes some; and
    `shared_experts` that all tokens take.

    batch_size: sequences in a step, over which the router's losses are a mean.
    """

    def __init__(self, cfg, residual_std, batch_size: int):
        d, f, shared = cfg.width, cfg.expert_width, cfg.shared_experts * cfg.expert_width
        self.experts = cfg.experts
        self.router = Router(cfg, batch_size)
        gated = cfg.activation == "swiglu"
        up_EDF, down_EFD = ("experts", "width", "mlp"), ("experts", "mlp", "width")
        self.up = parameter((cfg.experts, d, f), up_EDF, std=cfg.init_std)
        self.gate = parameter((cfg.experts, d, f), up_EDF, std=cfg.init_std) if gated else None
        self.down = parameter((cfg.experts, f, d), down_EFD, std=residual_std)
        self.shared_up = parameter((d, shared), up_EDF[1:], std=cfg.init_std) if shared else None
        self.shared_gate = (
            parameter((d, shared), up_EDF[1:], std=cfg.init_std) if shared and gated else None
        )
        self.shared_down = (
            parameter((shared, d), down_EFD[1:], std=residual_std) if shared else None
        )

    def __call__(self, x_BTD, drops: bool = True) -> jax.Array:
        """[B, T, D] → [B, T, D], both split along the sequence. Without `drops` every token is
        served."""
        b, t, d = x_BTD.shape
        whole_BTD, x_MBTD = experts.spread(x_BTD)
        gates_BTK, routing = self.router(whole_BTD, drops)
        size = experts.Size(self.experts, b, t)
        rows, gates = experts.send(x_MBTD, gates_BTK, routing, size)
        hidden = None
        if self.shared_up is not None:
            # What all tokens take is split in two: the first products stand beside the rows' way to
            # their experts, the last beside the way back; the gradients', too. Left to itself XLA
            # puts all of them beside one, or beside the few numbers that routing exchanges.
            one_MERD = experts.after(routing, x_MBTD).reshape(x_MBTD.shape[0], 1, b * t, d)
            rows, hidden = jax.lax.optimization_barrier(
                (rows, _hidden(one_MERD, self.shared_up, self.shared_gate))
            )
        h = experts.weigh(_hidden(rows, self.up, self.gate, routing.sizes), gates)
        y_MBTD = experts.receive(
            experts.product(h, _matrix(self.down, h), routing.sizes, experts.ROWS), routing, size
        )
        if hidden is not None:
            y_MBTD += experts.product(
                hidden, _matrix(self.shared_down, hidden), None, experts.ROWS
            ).reshape(y_MBTD.shape)
        return experts.collect(y_MBTD)


def _matrix(parameter, rows):
    """The experts' matrices [E, …], or one expert's, of the rows' type."""
    matrix = parameter[...]
    return (matrix if matrix.ndim == 3 else matrix[None]).astype(rows.dtype)


def _hidden(rows, up, gate, sizes=None):
    """The hidden layer of the experts' MLPs on their rows."""
    h = experts.product(rows, _matrix(up, rows), sizes, experts.COLUMNS)
    if gate is None:
        return jax.nn.gelu(h, approximate=True)
    return jax.nn.silu(experts.product(rows, _matrix(gate, rows), sizes, experts.COLUMNS)) * h
