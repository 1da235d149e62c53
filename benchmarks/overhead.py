"""The cost of the table where there is nothing to schedule: one device and one stage, against a
hand-written loop.

    python benchmarks/overhead.py [--rounds=7] [--microbatches=4] [-- --config.model.width=512 …]

Both take the same step in turn, in one process: same model functions, same parameters, same full
recomputation (each layer keeps its input), same optimizer. The loop is plain JAX:
`jax.value_and_grad` of a scan over checkpointed layers, summed over a scan over microbatches, then
optax. Prints the ratio of CPU-seconds (median over the rounds of the paired ratios), and of
compiled memory.
"""

import os
import statistics
import sys
import time

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = {
    "model.layers": 8,
    "model.width": 256,
    "model.heads": 8,
    "model.mlp_width": 1024,
    "model.vocab_size": 2048,
}
SETTINGS = MODEL | {"data.sequence_length": 256, "mesh.data": 1, "precision.compute": "float32"}


def plain_step(config, parts, optimizer):
    """The hand-written step: (params, optimizer state, batch) → params, optimizer state, loss.

    Layers are stacked as [L, …].
    """
    import jax
    import jax.numpy as jnp

    from jaxtrain.models.transformer import default_positions
    from jaxtrain.runtime.loss import LossInputs, OutputHead, loss_sum

    dtype = jnp.dtype(config.precision.compute)

    def loss(params, tokens, targets, weights):
        positions = default_positions(tokens)
        x = parts.embedder(params["embed"])(tokens, positions, dtype)
        block = jax.checkpoint(lambda x, layer: (parts.blocks[""](layer)(x, positions), None))
        x, _ = jax.lax.scan(block, x, params["layers"]["0"])
        head = OutputHead(lambda head, x: parts.head(head)(x), config.model.loss_chunk)
        return loss_sum(head, params["head"], LossInputs(x, targets, weights))

    def step(params, state, batch):
        count = batch["weights"].sum()

        def microbatch(carry, b):
            total, sums = carry
            value, gradients = jax.value_and_grad(loss)(
                params, b["tokens"], b["targets"], b["weights"] / count
            )
            return (total + value, jax.tree.map(jnp.add, sums, gradients)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        (total, sums), _ = jax.lax.scan(microbatch, (jnp.zeros(()), zeros), batch)
        _, params, state = optimizer.update(sums, state, params)
        return params, state, total

    return jax.jit(step, donate_argnums=(0, 1))


def main() -> None:
    """Times both steps in turn and prints their ratio."""
    parser = arguments.parser(__doc__, "more flags of jaxtrain.train, after --")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    sys.path.insert(0, REPOSITORY)
    from jaxtrain import cli, config as configs
    from jaxtrain.config.rules.mesh_rules import on_mesh
    from jaxtrain.devices.startup import set_xla_flags

    set_xla_flags(os.environ)
    import jax
    import numpy as np

    from jaxtrain.devices.mesh import make_mesh
    from jaxtrain.training.state import initial_state
    from jaxtrain.training.step import make_step

    settings = SETTINGS | {
        "data.batch_size": 4 * options.microbatches,
        "pipeline.microbatches": options.microbatches,
    }
    config, _ = cli.parse(
        ["--cpu_devices=1", *options.changes],
        "benchmark",
        recipe=configs.replace(configs.Config(), settings),
    )
    config = on_mesh(config, 1).resolve()
    mesh = make_mesh((1,) * 6, jax.devices()[:1])
    random = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        step = make_step(config, mesh)
        shapes = step.abstract_batch
        batch = {
            k: random.integers(0, config.model.vocab_size, a.shape).astype(np.int32)
            for k, a in shapes.items()
        } | {"weights": np.ones(shapes["weights"].shape, np.float32)}
        batch = jax.device_put(batch, step.batch_sharding)
        table = step.train.lower(step.abstract_state(), batch).compile()
        state = initial_state(step.layout, step.optimizer, 0)
        plain = plain_step(config, step.layout.parts, step.optimizer)
        unstack = lambda p: {**p, "layers": jax.tree.map(lambda a: a[0].copy(), p["layers"])}
        params = jax.tree.map(lambda a: a.copy(), unstack(state.params))
        moments = step.optimizer.init(params)
        loop = plain.lower(params, moments, batch).compile()

        def timed(run):
            began = time.process_time()
            out = run()
            jax.block_until_ready(out)
            return out, time.process_time() - began

        ratios, losses = [], []
        for round_ in range(options.rounds + 1):
            (state, out), ours = timed(lambda: table(state, batch))  # noqa: B023
            (params, moments, loss), theirs = timed(lambda: loop(params, moments, batch))  # noqa: B023
            losses.append((float(out["loss"]), float(loss)))
            if round_:
                ratios.append(ours / theirs)
                print(
                    f"round {round_}: table {ours:.2f} CPU-s, loop {theirs:.2f} CPU-s, ratio "
                    f"{ours / theirs:.3f}",
                    flush=True,
                )
    temp = [c.memory_analysis().temp_size_in_bytes / 1e6 for c in (table, loop)]
    worst = max(abs(a / b - 1) for a, b in losses)
    memory = f"temporary memory {temp[0]:.1f} against {temp[1]:.1f} MB"
    print(
        f"ratio of CPU-seconds: {statistics.median(ratios):.3f} (median); {memory}; losses "
        f"agree to {worst:.0e}"
    )


if __name__ == "__main__":
    main()
