"""Multiplications of the products in a trace, counted equation by equation."""

import math

from jaxtrain.runtime.layers.equations import inside


def multiplications(equation) -> int:
    """Those of one dot_general."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    sizes = [equation.invars[0].aval.shape[i] for i in contracted]
    return math.prod(sizes) * math.prod(equation.outvars[0].aval.shape)


def in_trace(jaxpr) -> int:
    """Those of all products of a jaxpr; those in a scan in each of its trips."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += multiplications(equation)
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += trips * sum(map(in_trace, inside(equation)))
    return total
