"""A pipelined step predicted and measured: each op is timed separately, the schedule's simulator
predicts the step, and the step is timed.

    python benchmarks/pipeline.py [--cpu_devices=N] [--config=configs/tiny.py]
                                  [--config.GROUP.FIELD=VALUE …]

It compiles the step's gradients once with the ticks of the table as an argument. Ticks in which all
stages run one op and nothing else time that op, inside the very program that is measured; empty
ticks time what every tick costs and what comes before and after. The prediction is the coupled
clock's (`jaxtrain.schedule.clocks.simulate`). On simulated devices, which share this machine's
cores, op times are CPU-seconds a device, and the step takes the longer of the coupled clock's time
and of all the work over the cores; so CPU-seconds are compared too.

Without flags: 2 stages of one CPU device each. The last line has the times as
`--config.pipeline.times` takes them.
"""

import dataclasses
import os
import sys

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEFAULTS = (
    "model.layers=8",
    "model.width=256",
    "model.heads=8",
    "model.mlp_width=1024",
    "model.vocab_size=2048",
    "data.sequence_length=256",
    "data.batch_size=16",
    "precision.compute=float32",
    "mesh.data=1",
    "mesh.stage=2",
    "mesh.model=1",
    "pipeline.schedule=1f1b",
    "pipeline.repeats=1",
    "pipeline.microbatches=8",
)


def main(argv: list[str]) -> None:
    """Times ops and step, and prints both with the prediction."""
    sys.path.insert(0, REPOSITORY)
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax

    if not [a for a in argv if a.startswith("--config")]:
        argv = [
            "--cpu_devices=2",
            f"--config={REPOSITORY}/configs/tiny.py",
            *(f"--config.{d}" for d in DEFAULTS),
            *argv,
        ]
    if any(a.startswith("--cpu_devices") for a in argv):
        # a device is a core
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        )
    config, namespace = cli.parse(argv, __doc__)
    start_jax(namespace)
    import jax

    from jaxtrain.config.rules.checks import check_devices
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.schedule.columns import columns
    from jaxtrain.training.measured_op_times import (
        TICKS,
        in_order,
        measure,
        op_seconds,
        random_batch,
        times_of,
    )
    from jaxtrain.training.state import initial_state
    from jaxtrain.training.step import make_step

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
        batch = random_batch(step, config.model.vocab_size)
        compiled = lambda columns: step.gradients.lower(params, batch, columns).compile()
        short = compiled(jax.tree.map(lambda column: column[:1].repeat(TICKS, 0), table_columns))
        per_device = lambda took: took.cpu / mesh.size if simulated else took.wall
        ops = op_seconds(
            table_columns, lambda ticks: per_device(measure(lambda: short(params, batch, ticks)))
        )
        by_op, base = ops.seconds, ops.outside
        step_program = compiled(table_columns)
        took = measure(lambda: step_program(params, batch, table_columns))
        wall, cpu = took.wall, took.cpu

    times = times_of(by_op, setup.table, setup.shares)
    result = dataclasses.replace(setup, times=times).simulation()
    work = sum(e.end - e.start for e in result.timeline)
    print(f"\n{'op':16} ms on a device")
    for name, seconds in by_op.items():
        print(f"{name:16} {1e3 * seconds:8.3f}")
    print(f"{'around the ticks':16} {1e3 * base:8.3f}\n")
    alone = result.step_time_coupled + base
    print(
        f"predicted step, a device each   {1e3 * alone:9.1f} ms, bubble "
        f"{result.bubble_fraction_coupled:.1%} by the coupled clock, "
    )
    print(
        f"                                {'':9}     {result.bubble_fraction:.1%} if stages "
        "ran on their own"
    )
    if simulated:
        copies = mesh.size // setup.table.stages
        seconds = (work + base * setup.table.stages) * copies
        shared = max(alone, seconds / cores)
        print(f"predicted step, {mesh.size} on {cores} cores     {1e3 * shared:9.1f} ms")
        print(
            f"measured step                   {1e3 * wall:9.1f} ms, predicted / measured "
            f"{shared / wall:.2f}"
        )
        print(f"predicted CPU-seconds           {seconds:9.3f}")
        print(
            f"measured CPU-seconds            {cpu:9.3f}, predicted / measured {seconds / cpu:.2f}"
        )
    else:
        print(
            f"measured step                   {1e3 * wall:9.1f} ms, predicted / measured "
            f"{alone / wall:.2f}"
        )
    print(f"jax {jax.__version__}, {mesh.size} × {jax.devices()[0].device_kind}")
    print(
        "--config.pipeline.times="
        + ",".join(f"{1e3 * t:.3f}" for t in in_order(times, setup.table))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
