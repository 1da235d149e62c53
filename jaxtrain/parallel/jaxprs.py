"""What an evaluation of a jaxpr, equation by equation, needs to know of jax."""

from typing import Any

from jax.extend.core import Literal

# Equations with a jaxpr that is evaluated once.
CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "remat2 checkpoint".split()
)


def value_of(atom, env: dict) -> Any:
    """A jaxpr's literal, or the value of its variable."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bound(equation, values) -> list:
    """The results of one equation."""
    # Turns jaxprs among the stored parameters into what the primitive is bound with.
    params = equation.primitive.get_bind_params(equation.params)
    out = equation.primitive.bind(*values, **params)
    return out if equation.primitive.multiple_results else [out]


def inner_jaxpr(equation) -> Any:
    """(jaxpr, constants) of an equation of CALLS; None if it has no jaxpr."""
    params = equation.params
    inner = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
    return None if inner is None else (getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()))


def scan_sizes(params: dict) -> tuple[int, int]:
    """The numbers of a scan's first operands that are the same in all iterations, and of those
    after them that it carries."""
    if "ft_in" in params:  # jax 0.12
        fixed, carried, _ = map(len, params["ft_in"].unpack())
        return fixed, carried
    return params["num_consts"], params["num_carry"]
