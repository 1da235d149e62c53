"""One layer cut into the ops of a schedule by partitioning the trace of its vjp.

    forward(params, x, extra)                        → y, residuals
    input_gradient(params, extra, residuals, g)      → gradient of x, stash          B
    weight_gradient(params, extra, residuals, stash) → gradients of params           W
    backward(params, extra, residuals, g)            → gradients of params, of x     both at once, where nothing comes between

Residuals cross from the forward to the backward: no weights, nor anything made from weights, positions and constants alone, no masks,
reshapes, broadcasts or transposes, no sums and products of other residuals; `keep` decides about the rest, and what it does not let
cross is computed again. The stash crosses from B to W: the gradients that W multiplies with, and what B had to compute again for itself.

Calls are inlined and inner scans unrolled; an inner `while` is one equation and stays whole (parallel/blockwise.py). What `jax.checkpoint`
inside the layer computes again stays in the backward.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

# Values that cost no arithmetic: a stash keeps what they were made from.
VIEWS = frozenset(
    "broadcast_in_dim reshape transpose neg squeeze copy pvary pcast iota slice split concatenate sharding_constraint layout_constraint "
    "all_gather "  # costs no arithmetic either: a device keeps its own part
    "eq ne ge gt le lt and or not optimization_barrier".split()
)
# Values that cost one pass over their operands, which fuses with what reads them: not kept beside all of those.
CHEAP = VIEWS | frozenset("add sub mul div max min select_n integer_pow square one_minus_square convert_element_type add_any".split())
PRODUCTS = frozenset("dot_general ragged_dot_general".split())
SUMS = frozenset("reduce_scatter add convert_element_type".split())
CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat2 checkpoint".split())
AGAIN = "computed_again"  # the name scope of what jax.checkpoint computes again in the backward

Keep = Callable[..., bool]


def keep_all(equation) -> bool:
    """`remat` none: whatever the backward reads crosses."""
    return True


def keep_matmuls(equation) -> bool:
    """`remat` selective: results of products with weights cross, and those of a loop, which is attention block by block: its output and
    log-sum-exp. Attention's inside and elementwise work are computed again (Korthikanti et al. 2022, section 5). A router's choices cross,
    too: rows that cross lie in their order, and choices made again could differ by a rounding."""
    name = equation.primitive.name
    if any(e.primitive.name == "while" for e in (equation.params["jaxpr"].eqns if name == "shard_map" else [equation])):
        return True
    if name == "shard_map":  # a product on each device's part, perhaps with its sum over devices
        return _is(equation, VIEWS | PRODUCTS | SUMS) and not _is(equation, VIEWS | SUMS)
    return name == "top_k" or name in PRODUCTS and not (name == "dot_general" and equation.params["dimension_numbers"][1][0])


# --- flattening ------------------------------------------------------------------------------------------------------------------


def _bind(equation, values):
    """Evaluates one equation."""
    out = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
    return out if equation.primitive.multiple_results else [out]


def _inline(jaxpr, consts, args):
    """Evaluates a jaxpr, going into calls and scans: traced again, it is flat."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    read = lambda a: a.val if isinstance(a, Literal) else env[a]
    for equation in jaxpr.eqns:
        values, params, name = [read(a) for a in equation.invars], equation.params, equation.primitive.name
        inner = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
        if name == "scan":
            out = _unrolled(params, values)
        elif name in CALLS and inner is not None:
            body, inner_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            if params.get("differentiated"):
                with jax.named_scope(AGAIN):
                    out = _inline(body, inner_consts, values)
            else:
                out = _inline(body, inner_consts, values)
        else:
            out = _bind(equation, values)
        env.update(zip(equation.outvars, out, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _unrolled(params, values) -> list:
    """The results of a scan, its iterations one after the other."""
    if "ft_in" in params:  # jax 0.12
        fixed, carried, _ = map(len, params["ft_in"].unpack())
    else:
        fixed, carried = params["num_consts"], params["num_carry"]
    consts, carry, xs = values[:fixed], list(values[fixed : fixed + carried]), values[fixed + carried :]
    body, rows = params["jaxpr"], []
    order = range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        out = _inline(body.jaxpr, body.consts, [*consts, *carry, *(jax.lax.index_in_dim(x, i, keepdims=False) for x in xs)])
        carry = out[:carried]
        rows.append(out[carried:])
    if params["reverse"]:
        rows.reverse()
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _is(equation, names: frozenset) -> bool:
    """Whether it is one of these, or is nothing but these on each device (a layout in memory, for one)."""
    name = equation.primitive.name
    return name in names or (name == "shard_map" and all(_is(e, names) for e in equation.params["jaxpr"].eqns))


def _gathers(equation) -> bool:
    name = equation.primitive.name
    return name == "all_gather" or (name == "shard_map" and any(_gathers(e) for e in equation.params["jaxpr"].eqns))


def _variables(atoms: Iterable) -> list:
    return [a for a in atoms if not isinstance(a, Literal)]


def _bytes(atoms: Iterable) -> int:
    return sum(int(np.prod(a.aval.shape)) * a.aval.dtype.itemsize for a in atoms)


# --- the partition ---------------------------------------------------------------------------------------------------------------


class Split:
    """A layer `fn(params, x, extra) → y`, cut.

    x and y have the same shape and dtype; `params` and `extra` are pytrees of arrays. Only shapes and dtypes of the example
    arguments matter. `residuals` and `stash` list the shapes and dtypes that cross, `for_weights` says of each residual whether W
    reads it: the others end with B. `gathered` says of each of the stash whether B has gathered it, so that devices hold the same.
    """

    def __init__(self, fn: Callable, params, x, extra, keep: Keep = keep_all):
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
        self._free = {*self._params, *self._extras, *jaxpr.constvars}  # what every op can make by itself
        self._late = {self._g}  # what depends on the incoming gradient, or is computed again
        for eq in jaxpr.eqns:
            inputs = _variables(eq.invars)
            if AGAIN in str(eq.source_info.name_stack) or any(a in self._late for a in inputs):
                self._late.update(eq.outvars)
            elif all(a in self._free for a in inputs):
                self._free.update(eq.outvars)
        self._kept = self._without_cheap(self._kept_values(keep))
        self._stashed, for_weights = self._crossing_to_weights()
        shapes = lambda values: [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in values]
        self.residuals, self.stash = shapes(self._kept), shapes(self._stashed)
        self.for_weights = [a in for_weights for a in self._kept]
        self.gathered = [a in self._maker and _gathers(self._maker[a]) for a in self._stashed]
        self._equations = {
            "forward": self._needed([self._y, *self._kept], ()),
            "input": self._needed([self._dx, *self._stashed], self._kept),
            "weight": self._needed(self._dp, {*for_weights, *self._stashed}),
            "both": self._needed([self._dx, *self._dp], self._kept),
        }

    # ------------------------------------------------------------------ what crosses

    def _position(self, value) -> int:
        return self._order[id(self._maker[value])] if value in self._maker else -1

    def _back(self, values: Iterable, on: Callable) -> None:
        """Goes back from values to what they are made from, past each that `on(value)` is true of; never to what every op can make."""
        todo, seen = list(values), set()
        while todo:
            value = todo.pop()
            if value not in seen and value not in self._free:
                seen.add(value)
                todo += _variables(self._maker[value].invars) if on(value) else ()

    def _kept_values(self, keep: Keep) -> set:
        """What the forward leaves, so that the backward can make all that it reads."""
        backward = [eq for eq in self._needed([self._dx, *self._dp], ()) if any(o in self._late for o in eq.outvars)]
        kept = set()

        def on(value) -> bool:
            crosses = value is self._x or (keep(self._maker[value]) and not self._is_view(self._maker[value]))
            if crosses:
                kept.add(value)
            return not crosses

        read = [a for eq in backward for a in _variables(eq.invars)]
        self._back([a for a in (*read, *_variables(self._dp)) if a not in self._late], on)
        return kept

    def _without_cheap(self, kept: set) -> list:
        """`kept` without what a pass over other values of it makes, in the order of their making."""
        left = set(kept)
        for value in sorted(kept, key=self._position, reverse=True):
            if value is not self._x and self._derived(value, left - {value}) is not None:
                left.remove(value)
        return sorted(left, key=self._position)

    def _derived(self, value, given: set) -> set | None:
        """Those of `given` from which cheap equations alone make the value; None if they do not."""
        found, other = set(), set()

        def on(v) -> bool:
            cheap = not (v in self._late or v is self._x) and _is(self._maker[v], CHEAP)
            if v in given:
                found.add(v)
            elif not cheap:
                other.add(v)
            return cheap and v not in given

        self._back([value], on)
        return None if other else found

    def _crossing_to_weights(self) -> tuple[list, set]:
        """(what B leaves for W, the residuals that W reads).

        Where a residual or a few make a value that W reads, the fewer bytes are held on from B to W: the value, or they. A tenth more
        is given for not stashing: B need not make the value then.
        """
        kept, in_b = set(self._kept), {o for eq in self._needed([self._dx], self._kept) for o in eq.outvars}
        stash, residuals, made = set(), set(), {}

        def on(value) -> bool:
            if value in kept:
                residuals.add(value)
            elif value is self._g or (value in in_b and value in self._late and _gathers(self._maker[value])):
                stash.add(value)  # a gradient that B gathers is not gathered twice, as it is made late and ends soon
            elif self._is_view(self._maker[value]):
                return True
            elif (sources := self._derived(value, kept)) is not None:
                made[value] = sources
            elif value in in_b:
                stash.add(value)
            else:
                return True
            return False

        self._back(_variables(self._dp), on)
        for value in sorted(made, key=lambda v: (-_bytes([v]), self._position(v))):
            if _bytes(made[value] - residuals) > 1.1 * _bytes([value]):
                stash.add(value)
            else:
                residuals |= made[value]
        return sorted(stash, key=self._position), residuals

    @staticmethod
    def _is_view(equation) -> bool:
        if equation.primitive.name == "convert_element_type":  # keep the narrower of the two
            return equation.invars[0].aval.dtype.itemsize <= equation.outvars[0].aval.dtype.itemsize
        return _is(equation, VIEWS)

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

    # ------------------------------------------------------------------ the ops

    def _run(self, op: str, params, extra, more: dict, outputs) -> list:
        env = self._consts | dict(zip(self._params, jax.tree.leaves(params), strict=True))
        env |= dict(zip(self._extras, jax.tree.leaves(extra), strict=True)) | more
        read = lambda a: a.val if isinstance(a, Literal) else env[a]
        for eq in self._equations[op]:
            env.update(zip(eq.outvars, _bind(eq, [read(a) for a in eq.invars]), strict=True))
        return [read(a) for a in outputs]

    def reads(self, op: str) -> list[bool]:
        """Which of the parameters' leaves an op reads: "forward", "input", "weight", "both"; the "whole" layer reads all."""
        used = {a for eq in self._equations.get(op, ()) for a in _variables(eq.invars)}
        return [op == "whole" or p in used for p in self._params]

    def _with_residuals(self, residuals: Sequence) -> dict:
        return dict(zip(self._kept, residuals, strict=True))

    def forward(self, params, x, extra):
        """→ y, list of residuals."""
        y, *residuals = self._run("forward", params, extra, {self._x: x}, [self._y, *self._kept])
        return y, residuals

    def input_gradient(self, params, extra, residuals, g):
        """→ gradient of x, list of what W needs beside the residuals."""
        dx, *stash = self._run("input", params, extra, {self._g: g, **self._with_residuals(residuals)}, [self._dx, *self._stashed])
        return dx, stash

    def weight_gradient(self, params, extra, residuals, stash):
        """→ gradients of params. residuals: those that are `for_weights`."""
        kept = [a for a, wanted in zip(self._kept, self.for_weights, strict=True) if wanted]
        more = dict(zip(kept, residuals, strict=True)) | dict(zip(self._stashed, stash, strict=True))
        return jax.tree.unflatten(self._tree, self._run("weight", params, extra, more, self._dp))

    def backward(self, params, extra, residuals, g):
        """→ gradients of params, gradient of x."""
        dx, *gradients = self._run("both", params, extra, {self._g: g, **self._with_residuals(residuals)}, [self._dx, *self._dp])
        return jax.tree.unflatten(self._tree, gradients), dx

    # ------------------------------------------------------------------ residuals by their last reader

    def sort(self, residuals: Sequence) -> tuple[list, list]:
        """(those that end with B, those that W reads)."""
        pairs = list(zip(residuals, self.for_weights, strict=True))
        return [r for r, wanted in pairs if not wanted], [r for r, wanted in pairs if wanted]

    def merge(self, for_b: Sequence, for_w: Sequence) -> list:
        """The opposite of `sort`."""
        b, w = iter(for_b), iter(for_w)
        return [next(w) if wanted else next(b) for wanted in self.for_weights]

    def residual_bytes(self) -> int:
        """Bytes that one layer keeps for one microbatch."""
        return _bytes(self._kept)
