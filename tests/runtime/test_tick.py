"""The ops of a tick name what they read and write; what they compute is tested with whole steps."""

import jax
import numpy as np
import pytest
from support import small

from jaxtrain.runtime import tick
from jaxtrain.runtime.tick import TickOp
from jaxtrain.runtime.tick_state import TickState
from jaxtrain.schedule.columns import TickColumns
from jaxtrain.training.step import make_step


def run(state, constants, columns):
    return state


def test_the_fields_of_an_op():
    op = TickOp(
        "W0",
        (("params", "layers", "0"), "batch", "residual_w"),
        (("gradients", "layers", "0"),),
        run,
    )
    assert op.carried == ("residual_w", ("gradients", "layers", "0"))
    assert op.fixed == (("params", "layers", "0"), "batch")


@pytest.mark.parametrize(
    "reads, writes, said",
    [
        (
            ("stash",),
            (),
            "op B0 reads 'stash', which is no field of TickState or Constants: use one of "
            "activation, batch, ",
        ),
        (
            (("grad", "0"),),
            (),
            "op B0 reads ('grad', '0'), which is no field of TickState or Constants: ",
        ),
        (
            ("batch",),
            ("batch",),
            "op B0 writes 'batch', which is no field of TickState: use one of activation, down, ",
        ),
        (
            (),
            (("params", "embed"),),
            "op B0 writes ('params', 'embed'), which is no field of TickState: ",
        ),
    ],
)
def test_a_field_that_is_not_there(reads, writes, said):
    with pytest.raises(ValueError) as raised:
        TickOp("B0", reads, writes, run)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("schedule, remat", [("interleaved", "full"), ("zb_v", "none")])
def test_every_op_writes_what_it_names_and_nothing_else(schedule, remat, monkeypatch):
    """Each is given the state without what it does not name, and returns all of that."""
    seen, once = {}, tick.Tick._once

    def checked(self, op, state, columns):
        def run(given, constants, columns):
            after = op.run(given, constants, columns)
            changed = [
                name for name in vars(given) if getattr(after, name) is not getattr(given, name)
            ]
            seen[op.name] = set(changed) <= {
                name if isinstance(name, str) else name[0] for name in op.writes
            }
            assert jax.tree.structure(after) == jax.tree.structure(given)
            return after

        return once(self, TickOp(op.name, op.reads, op.writes, run), state, columns)

    monkeypatch.setattr(tick.Tick, "_once", checked)
    cfg = small.config((1, 2, 1), schedule, 2, 4, {"pipeline.remat": remat, "model.mtp_depth": 1})
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    assert {"embed", "B0", "W1", "K1", "head", "embed_gradient"} <= set(seen) and all(
        seen.values()
    ), seen


def test_columns_cross_a_scan():
    columns = TickColumns(np.arange(3), runs={"F0": np.ones(3, np.int32)})
    total, _ = jax.lax.scan(
        lambda total, c: (total + c.microbatch * c.runs["F0"], None), 0, columns
    )
    assert total == 3 and len(jax.tree.leaves(columns)) == 2 and jax.tree.leaves(TickState()) == []
