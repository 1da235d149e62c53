"""Predicted against measured: times each op of a pipelined step alone, predicts the step by the schedule's simulator, and measures it.

    python benchmarks/pipeline.py [--cpu_devices=N] [--config=configs/tiny.py] [--config.GROUP.FIELD=VALUE …]

It compiles the step's gradients once with the ticks of the table as an argument. Ticks in which all stages run one op and nothing else time
that op, inside the very program that is measured; empty ticks time what every tick costs and what comes before and after. The prediction
is the coupled clock's (`jaxtrain.schedule.simulate`). On simulated devices, which share this machine's cores, op times are CPU-seconds a
device, and the step takes the longer of the coupled clock's time and of all the work over the cores; so CPU-seconds are compared too.
Without flags: 2 stages of one CPU device each. The last line has the times as `--config.pipeline.times` takes them.
"""

import dataclasses
import os
import statistics
import sys
import time

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TICKS = 12  # of an op, in a timing
DEFAULTS = (
    "model.layers=8", "model.width=256", "model.heads=8", "model.mlp_width=1024", "model.vocab_size=2048", "data.sequence_length=256",
    "data.batch_size=16", "precision.compute=float32", "mesh.data=1", "mesh.stage=2", "mesh.model=1", "pipeline.schedule=1f1b",
    "pipeline.repeats=1", "pipeline.microbatches=8",
)  # fmt: skip


def measure(run, repeats: int = 5) -> tuple[float, float]:
    """(wall seconds, CPU-seconds) of a call, medians."""
    import jax

    jax.block_until_ready(run())
    wall, cpu = [], []
    for _ in range(repeats):
        a, b = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        wall.append(time.perf_counter() - a)
        cpu.append(time.process_time() - b)
    return statistics.median(wall), statistics.median(cpu)


def op_seconds(columns, run_ticks) -> tuple[dict[str, float], float]:
    """(op → seconds on a device, seconds of everything but ticks). columns: the table's; run_ticks: columns → seconds on a device."""
    import jax
    import numpy as np

    empty = jax.tree.map(lambda column: np.zeros((TICKS, column.shape[1]), np.int32), columns)
    base = run_ticks(empty)
    found = {}
    for op, column in columns.runs.items():
        if column.all():  # has no loop: every tick has it, the empty ones too
            found[op] = 0.0
        elif column.any():
            # With early permutes all ops are in a loop of busy ticks.
            one = dataclasses.replace(empty, runs={**empty.runs, op: empty.runs[op] + 1}, busy=empty.busy + 1)
            found[op] = max(0.0, run_ticks(one) - base) / TICKS
    return found, base


def times_of(found: dict[str, float], table, shares):
    """The simulator's Times: of a microbatch on a whole stage."""
    from jaxtrain.schedule.clock import Times
    from jaxtrain.schedule.columns import EMBED, EMBED_GRADIENT, HEAD, cell_op, permute_op
    from jaxtrain.schedule.table import Permute, local_unit_of

    per_stage = {}
    for op, kinds in {"F": "FK", "B": "B", "W": "W", "R": "R"}.items():
        seconds, part = 0.0, 0.0
        for g, u in enumerate(local_unit_of(table.stage_of)):
            measured = [found[cell_op(kind, u)] for kind in kinds if cell_op(kind, u) in found]
            if measured:
                seconds, part = seconds + statistics.mean(measured), part + shares[g]
        per_stage[op] = seconds / part if part else 0.0
    together = table.stages if table.vocabulary == "parallel" else 1
    message = max(found.get(permute_op(when), 0.0) for when in (Permute.LATE, Permute.EARLY))
    embed = (found[EMBED] + found[EMBED_GRADIENT]) / 2
    return Times(**per_stage, message=message, head=found[HEAD] * together, embed=embed * together)


def main(argv: list[str]) -> None:
    sys.path.insert(0, REPOSITORY)
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax

    if not [a for a in argv if a.startswith("--config")]:
        argv = ["--cpu_devices=2", f"--config={REPOSITORY}/configs/tiny.py", *(f"--config.{d}" for d in DEFAULTS), *argv]
    if any(a.startswith("--cpu_devices") for a in argv):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"  # a device is a core
    config, namespace = cli.parse(argv, __doc__)
    start_jax(namespace)
    import jax
    import numpy as np

    from jaxtrain.config.checks import check_devices
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.schedule.columns import columns
    from jaxtrain.training.state import initial_state
    from jaxtrain.training.step import abstract_batch, make_step

    config = check_devices(config, jax.device_count()).resolve()
    m = config.mesh
    if m.stage == 1:
        sys.exit("error: mesh.stage=1 has no pipeline: use 2 or more")
    mesh = make_mesh(sizes_of(m))
    simulated, cores = jax.default_backend() == "cpu", len(os.sched_getaffinity(0))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh)
        setup, table_columns = step.setup, columns(step.setup.train)
        print(f"table: {setup.describe()}", flush=True)
        params = initial_state(step.layout, step.optimizer, 0).params
        random = np.random.default_rng(0)
        fill = lambda name, a: (
            random.integers(0, config.model.vocab_size, a.shape, np.int32) if name in ("tokens", "targets") else np.ones(a.shape, a.dtype)
        )
        batch = {name: jax.device_put(fill(name, a), a.sharding) for name, a in abstract_batch(config, step).items()}
        compiled = lambda columns: step.gradients.lower(params, batch, columns).compile()
        short = compiled(jax.tree.map(lambda column: column[:1].repeat(TICKS, 0), table_columns))
        per_device = lambda seconds: seconds[1] / mesh.size if simulated else seconds[0]
        found, base = op_seconds(table_columns, lambda ticks: per_device(measure(lambda: short(params, batch, ticks))))
        whole = compiled(table_columns)
        wall, cpu = measure(lambda: whole(params, batch, table_columns))

    times = times_of(found, setup.table, setup.shares)
    result = dataclasses.replace(setup, times=times).simulation()
    work = sum(e.end - e.start for e in result.timeline)
    print(f"\n{'op':16} ms on a device")
    for name, seconds in found.items():
        print(f"{name:16} {1e3 * seconds:8.3f}")
    print(f"{'around the ticks':16} {1e3 * base:8.3f}\n")
    alone = result.step_time_coupled + base
    print(f"predicted step, a device each   {1e3 * alone:9.1f} ms, bubble {result.bubble_fraction_coupled:.1%} by the coupled clock, ")
    print(f"                                {'':9}     {result.bubble_fraction:.1%} if stages ran on their own")
    if simulated:
        copies = mesh.size // setup.table.stages
        seconds = (work + base * setup.table.stages) * copies
        shared = max(alone, seconds / cores)
        print(f"predicted step, {mesh.size} on {cores} cores     {1e3 * shared:9.1f} ms")
        print(f"measured step                   {1e3 * wall:9.1f} ms, predicted / measured {shared / wall:.2f}")
        print(f"predicted CPU-seconds           {seconds:9.3f}")
        print(f"measured CPU-seconds            {cpu:9.3f}, predicted / measured {seconds / cpu:.2f}")
    else:
        print(f"measured step                   {1e3 * wall:9.1f} ms, predicted / measured {alone / wall:.2f}")
    print(f"jax {jax.__version__}, {mesh.size} × {jax.devices()[0].device_kind}")
    print("--config.pipeline.times=" + ",".join(f"{1e3 * t:.3f}" for t in (times.F, times.B, times.W, times.message, times.R, times.head)))


if __name__ == "__main__":
    main(sys.argv[1:])
