"""A step with Muon beside the same step with AdamW.

    python benchmarks/optimizers.py [--layouts=data8.zero1,…] [--rounds=5]
                                    [-- --config.model.width=512 …]

Steps of both are timed in turn in one process, on 8 simulated devices, with the model of
cpu_step.py. Newton-Schulz's products are timed between them, on the same shapes and in the same
type: their operations over this rate are what the iterations must take, and the rest of Muon's step
is compared with AdamW's. Figures are CPU-seconds of all devices, medians over the rounds.
"""

import collections
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import arguments
import cpu_step

REPEATS = 10  # of each product that is timed
LAYOUTS = "data8.zero1,data2.model2.stage2.x2,data2.stage4.x2"


def cpu_seconds(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` returns, and the CPU-seconds until it is computed."""
    import jax

    began = time.process_time()
    result = jax.block_until_ready(run())
    return result, time.process_time() - began


def newton_schulz_seconds(counts: dict[tuple[int, int], int], iterations: int) -> float:
    """CPU-seconds that Newton-Schulz's products of a step need at the rate of plain products.

    counts: (rows, columns), rows first where these are fewer → matrices
    """
    import jax
    import jax.numpy as jnp

    device, total = jax.devices()[0], 0.0
    for (rows, columns), count in counts.items():
        x, a = (jax.device_put(jnp.ones((rows, n)), device) for n in (columns, rows))
        for product, operands in (
            (lambda x: x @ x.T, (x,)),
            (lambda a: a @ a, (a,)),
            (lambda a, x: a @ x, (a, x)),
        ):
            run = jax.jit(product)
            jax.block_until_ready(run(*operands))
            _, took = cpu_seconds(lambda: [run(*operands) for _ in range(REPEATS)])  # noqa: B023
            total += count * iterations * took / REPEATS
    return total


def compare(layout: str, rounds: int, changes: list[str]) -> None:
    """Prints the figures of a layout."""
    import jax
    import numpy as np

    from jaxtrain import cli
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.training.state import initial_state
    from jaxtrain.training.step import make_step

    random, runs = np.random.default_rng(0), {}
    for name in ("adamw", "muon"):
        named = [*cpu_step.flags(layout, changes), f"--config.optimizer.name={name}"]
        config = cli.parse(named, "benchmark")[0].resolve()
        mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(mesh):
            step = make_step(config, mesh)
            batch = {
                k: random.integers(0, config.model.vocab_size, a.shape).astype(a.dtype)
                for k, a in step.abstract_batch.items()
            } | {"weights": np.ones(step.abstract_batch["weights"].shape, np.float32)}
            batch = jax.device_put(batch, step.batch_sharding)
            compiled = step.train.lower(step.abstract_state(), batch).compile()
            runs[name] = [compiled, initial_state(step.layout, step.optimizer, 0), batch]
    counts: collections.Counter = collections.Counter()
    for parameter in step.layout.parameters():
        if parameter.spec.product:
            *lead, rows, columns = parameter.spec.shape
            copies = parameter.size // (rows * columns)
            counts[min(rows, columns), max(rows, columns)] += copies
    products = lambda: newton_schulz_seconds(counts, config.optimizer.muon_iterations)
    seconds: dict[str, list[float]] = {name: [] for name in (*runs, "products")}
    for number in range(rounds + 1):
        for name, run in runs.items():
            compiled, state, batch = run
            (run[1], _), took = cpu_seconds(lambda: compiled(state, batch))  # noqa: B023
            seconds[name] += [took] * (number > 0)
        seconds["products"] += [products()] * (number > 0)
    adamw, muon, newton = (statistics.median(seconds[name]) for name in (*runs, "products"))
    print(f"{layout:24}{adamw:8.2f}{muon:8.2f}{newton:10.2f}{(muon - newton) / adamw:12.3f}")


def main() -> None:
    """Prints a line for each layout."""
    parser = arguments.parser(__doc__, "more flags of jaxtrain.train, after --")
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.path.insert(0, cpu_step.REPOSITORY)
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax

    start_jax(cli.parse(["--cpu_devices=8"], "benchmark")[1])
    print(f"{'layout':24}{'adamw':>8}{'muon':>8}{'products':>10}{'rest/adamw':>12}")
    for layout in options.layouts.split(","):
        compare(layout, options.rounds, options.changes)


if __name__ == "__main__":
    main()
