"""One layer's backward, split from its forward by partitioning the traced vjp.

    forward(params, x, extra)        → y, residuals
    backward(params, extra, residuals, g) → gradients of params, gradient of x

What crosses from one to the other is only what the backward cannot make from weights, constants and cheap views of other
residuals: weights are never kept, nor masks, reshapes, broadcasts or transposes. `jax.vjp` alone would keep them all.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.extend.core import Literal

# Values that cost no arithmetic: a stash keeps what they were made from.
VIEWS = frozenset(
    "broadcast_in_dim reshape transpose neg squeeze copy pvary pcast iota slice concatenate sharding_constraint "
    "eq ne ge gt le lt and or not".split()
)
CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat2 checkpoint".split())


def _bind(equation, values):
    """Evaluates one equation."""
    out = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
    return out if equation.primitive.multiple_results else [out]


def _inline(jaxpr, consts, args):
    """Evaluates a jaxpr, going into calls: traced again, it is flat."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    read = lambda a: a.val if isinstance(a, Literal) else env[a]
    for equation in jaxpr.eqns:
        values = [read(a) for a in equation.invars]
        inner = next((equation.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in equation.params), None)
        if equation.primitive.name in CALLS and inner is not None:
            body, inner_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            out = _inline(body, inner_consts, values)
        else:
            out = _bind(equation, values)
        env.update(zip(equation.outvars, out, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _variables(atoms: Iterable) -> list:
    return [a for a in atoms if not isinstance(a, Literal)]


class Split:
    """A layer `fn(params, x, extra) → y` as a forward that stashes and a backward that reads the stash.

    x and y have the same shape and dtype; `params` and `extra` are pytrees of arrays. Only shapes and dtypes of the
    example arguments matter. `residuals` lists the shapes and dtypes that cross.
    """

    def __init__(self, fn: Callable, params, x, extra):
        leaves, self._tree = jax.tree.flatten(params)
        extras, self._extra_tree = jax.tree.flatten(extra)
        n, e = len(leaves), len(extras)

        def whole(*args):
            given = jax.tree.unflatten(self._extra_tree, args[n : n + e])
            y, vjp = jax.vjp(lambda p, x: fn(jax.tree.unflatten(self._tree, p), x, given), list(args[:n]), args[n + e])
            gradients, dx = vjp(args[-1])
            return [y, dx, *gradients]

        examples = [*leaves, *extras, x, x]
        traced = jax.make_jaxpr(whole)(*examples)
        closed = jax.make_jaxpr(lambda *a: _inline(traced.jaxpr, traced.consts, a))(*examples)
        jaxpr = closed.jaxpr
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params, self._extras = jaxpr.invars[:n], jaxpr.invars[n : n + e]
        self._x, self._g = jaxpr.invars[n + e :]
        self._maker = {out: eq for eq in jaxpr.eqns for out in eq.outvars}
        self._order = {id(eq): i for i, eq in enumerate(jaxpr.eqns)}
        self._y, self._dx, *self._dp = jaxpr.outvars
        self._partition(jaxpr)

    def _partition(self, jaxpr):
        free = {*self._params, *self._extras, *jaxpr.constvars}  # both sides can make these by themselves
        after = {self._g}  # depends on the incoming gradient
        for eq in jaxpr.eqns:
            inputs = _variables(eq.invars)
            if any(a in after for a in inputs):
                after.update(eq.outvars)
            elif all(a in free for a in inputs):
                free.update(eq.outvars)
        backward = [eq for eq in self._needed([self._dx, *self._dp], ()) if any(o in after for o in eq.outvars)]
        wanted = [a for eq in backward for a in _variables(eq.invars) if a not in after and a not in free]
        kept, seen = [], set()
        while wanted:
            value = wanted.pop()
            if value in seen or value in free:
                continue
            seen.add(value)
            if value is self._x or not self._is_view(self._maker[value]):
                kept.append(value)
            else:
                wanted += _variables(self._maker[value].invars)
        self._kept = sorted(kept, key=lambda a: -1 if a is self._x else self._order[id(self._maker[a])])
        self._forward_eqs = self._needed([self._y, *self._kept], ())
        self._backward_eqs = self._needed([self._dx, *self._dp], self._kept)
        self.residuals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in self._kept]

    @staticmethod
    def _is_view(equation) -> bool:
        if equation.primitive.name == "convert_element_type":  # keep the narrower of the two
            return equation.invars[0].aval.dtype.itemsize <= equation.outvars[0].aval.dtype.itemsize
        return equation.primitive.name in VIEWS

    def _needed(self, outputs, given) -> list:
        """The equations that make `outputs` from the inputs and `given`, in order."""
        given, seen, todo = set(given), {}, _variables(outputs)
        while todo:
            value = todo.pop()
            eq = self._maker.get(value)
            if value in given or eq is None or id(eq) in seen:
                continue
            seen[id(eq)] = eq
            todo += _variables(eq.invars)
        return sorted(seen.values(), key=lambda eq: self._order[id(eq)])

    def _run(self, equations, env, outputs):
        read = lambda a: a.val if isinstance(a, Literal) else env[a]
        for eq in equations:
            env.update(zip(eq.outvars, _bind(eq, [read(a) for a in eq.invars]), strict=True))
        return [read(a) for a in outputs]

    def _environment(self, params, extra, more) -> dict:
        env = dict(self._consts) | dict(zip(self._params, jax.tree.leaves(params), strict=True))
        return env | dict(zip(self._extras, jax.tree.leaves(extra), strict=True)) | more

    def forward(self, params, x, extra):
        """→ y, list of residuals."""
        env = self._environment(params, extra, {self._x: x})
        y, *residuals = self._run(self._forward_eqs, env, [self._y, *self._kept])
        return y, residuals

    def backward(self, params, extra, residuals, g):
        """→ gradients of params, gradient of x."""
        env = self._environment(params, extra, {self._g: g, **dict(zip(self._kept, residuals, strict=True))})
        dx, *gradients = self._run(self._backward_eqs, env, [self._dx, *self._dp])
        return jax.tree.unflatten(self._tree, gradients), dx

    def residual_bytes(self) -> int:
        """Bytes that one layer keeps for one microbatch."""
        return sum(int(np.prod(r.shape)) * r.dtype.itemsize for r in self.residuals)
