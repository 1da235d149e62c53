"""One training step on 8 simulated CPU devices, layout by layout: seconds, CPU-seconds, compile
time, memory, time to the first step.

    python benchmarks/cpu_step.py [--layouts=data2.stage4.x2,…] [--steps=5] [--json=FILE]
                                  [-- --config.pipeline.remat=none …]

The configuration is the one at which MaxText (e591f30, 2026-08) was measured on a machine of two
cores: 8 layers, width 256, 8 heads of 32, gated MLP of 1024, vocabulary 2048, sequence 256, batch
32, 8 microbatches in a pipeline, float32, AdamW. Its figures are printed too. CPU-seconds differ
between machines, so every layout's process also times plain matmuls and gives the step as a
multiple of the time that they need for the step's 0.49 TFLOP (forward and backward, without
recomputation): MaxText's 15.53 CPU-seconds for data 2 · stage 4 with 2 repeats are 3.3 of that.
Each layout runs in a process of its own, with an empty compilation cache.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time

import arguments
from worker import report_result, run_worker

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STEP_TFLOP = 0.49
LIMIT = 3600.0  # seconds that a layout may take
# layout: (schedule, MaxText's CPU-seconds, temporary MB, seconds from start to first step)
LAYOUTS = {
    "data8": ("1f1b", 12.15, 153.7, 32.6),
    "data8.zero1": ("1f1b", 11.59, 93.2, 31.2),  # MaxText: fsdp 8
    "model8": ("1f1b", 14.13, 118.7, 31.6),
    "data2.model2.stage2.x2": ("interleaved", 13.81, 61.0, 38.6),
    "data4.stage2.x2": ("interleaved", 13.93, 69.3, 40.1),
    "data2.stage4.x2": ("interleaved", 15.53, 67.9, 37.2),
    "data2.stage4.gpipe": ("gpipe", 17.04, 89.5, 42.4),
    "stage8.gpipe": ("gpipe", 23.98, 99.1, 38.4),
    "stage8": ("1f1b", 23.98, 99.1, 38.4),  # MaxText has no 1F1B: its GPipe
}


def flags(layout: str, changes: list[str]) -> list[str]:
    """The flags of jaxtrain.train for a layout, followed by `changes`."""
    size = {name: int(n) for name, n in re.findall(r"(data|stage|model)(\d+)", layout)}
    repeats = int((re.findall(r"\.x(\d+)", layout) or [1])[0])
    zero = 0 if layout == "data8" else 1
    values = {
        "model.layers": 8,
        "model.width": 256,
        "model.heads": 8,
        "model.mlp_width": 1024,
        "model.vocab_size": 2048,
        "data.sequence_length": 256,
        "data.batch_size": 32,
        "precision.compute": "float32",
        "train.steps": 100,
        "pipeline.schedule": LAYOUTS[layout][0],
        "pipeline.repeats": repeats,
        "pipeline.microbatches": 8 if size.get("stage", 1) > 1 else 1,
        "mesh.data": size.get("data", 1),
        "mesh.stage": size.get("stage", 1),
        "mesh.model": size.get("model", 1),
        "parallel.zero": zero,
    }
    return [
        "--cpu_devices=8",
        f"--config={REPOSITORY}/configs/tiny.py",
        *(f"--config.{k}={v}" for k, v in values.items()),
        *changes,
    ]


def matmul_cpu_seconds() -> float:
    """CPU-seconds that plain float32 matmuls need for a step's operations."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.devices.mesh import make_mesh

    n, repeats = 1024, 8
    with jax.set_mesh(make_mesh((1,) * 6, jax.devices()[:1])):
        a = jnp.ones((n, n))
        product = jax.jit(lambda a: a @ a)
        product(a).block_until_ready()
        times = []
        for _ in range(3):
            began = time.process_time()
            for _ in range(repeats):
                product(a).block_until_ready()
            times.append(time.process_time() - began)
    return STEP_TFLOP * 1e12 * statistics.median(times) / (2 * n**3 * repeats)


def worker(layout: str, steps: int, changes: list[str]) -> dict:
    """Measures a layout in this process; $STARTED is when it was started."""
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax
    from jaxtrain.run.wall_clock import Phase, WallClock, imports_without_collection, start_record

    clock = WallClock(float(os.environ["STARTED"]), time.time)
    config, namespace = cli.parse(flags(layout, changes), "benchmark")
    with imports_without_collection():
        start_jax(namespace)
        import jax

        from jaxtrain import loop  # noqa: F401  what the command imports, so that the time to the first step is the command's
        from jaxtrain.config.phases import spans
        from jaxtrain.data.batches import TrainingBatches
        from jaxtrain.data.corpora import prepare_all
        from jaxtrain.data.loader import Loader
        from jaxtrain.devices.mesh import make_mesh, sizes_of
        from jaxtrain.pipeline.setup import make_setup
        from jaxtrain.training.state import initial_state
        from jaxtrain.training.step import make_step

    clock.enter(Phase.TABLE)
    config = config.resolve()
    setup = make_setup(config)
    clock.enter(Phase.DATA)
    corpora = prepare_all(config.data, config.model.vocab_size)
    clock.enter(Phase.TRACING)
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh, setup)
        loader = Loader(
            TrainingBatches(corpora, spans(config)),
            step.batch_sharding,
            config.pipeline.microbatches,
        )
        # as the command does
        initial = concurrent.futures.ThreadPoolExecutor(1).submit(
            initial_state, step.layout, step.optimizer, 0
        )
        lowered = step.train.lower(step.abstract_state(), step.abstract_batch)
        clock.enter(Phase.COMPILING)
        compiled = lowered.compile()
        clock.enter(Phase.STATE)
        state = initial.result()
        clock.enter(Phase.WAITING)
        batch = loader.batch(0)
        clock.enter(Phase.STEPPING)
        state, out = compiled(state, batch)
        jax.block_until_ready(out)
        start_up = start_record(clock)
        start_cpu_seconds = time.process_time()
        cpu, wall, matmul = [], [], [matmul_cpu_seconds()]
        # matmuls before and after each step, for the machine's speed changes within a run
        for _ in range(steps):
            a, b = time.process_time(), time.perf_counter()
            state, out = compiled(state, batch)
            jax.block_until_ready((state, out))
            cpu.append(time.process_time() - a)
            wall.append(time.perf_counter() - b)
            matmul.append(matmul_cpu_seconds())
        loader.close()
    memory = compiled.memory_analysis()
    multiples = [
        2 * c / (before + after)
        for c, before, after in zip(cpu, matmul[:-1], matmul[1:], strict=True)
    ]
    return {
        "layout": layout,
        "seconds": statistics.median(wall),
        "cpu_seconds": statistics.median(cpu),
        "matmul_multiple": statistics.median(multiples),
        "matmul_cpu_seconds": statistics.median(matmul),
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "arguments_mb": memory.argument_size_in_bytes / 1e6,
        **start_up,
        "start_cpu_seconds": start_cpu_seconds,
        "jax": jax.__version__,
    }


def main() -> None:
    """Runs each layout in a process and prints its figures; with --worker, measures one."""
    parser = arguments.parser(
        __doc__, "more flags of jaxtrain.train, after --: -- --config.pipeline.remat=none"
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", default="")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, REPOSITORY)
    if options.worker:
        return report_result(lambda: worker(options.worker, options.steps, options.changes))
    heads = {
        "layout": 24,
        "s/step": 8,
        "CPU-s": 8,
        "×matmul": 9,
        "×MaxText": 10,
        "trace s": 9,
        "compile s": 10,
        "temp MB": 9,
        "(MaxText)": 10,
        "1st step s": 11,
        "in CPU-s": 9,
    }
    print(
        "".join(
            f"{name:<{n}}" if name == "layout" else f"{name:>{n}}" for name, n in heads.items()
        ),
        flush=True,
    )
    results = []
    for layout in options.layouts.split(","):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {
                "STARTED": str(time.time()),
                "JAX_COMPILATION_CACHE_DIR": cache,
                "PYTHONPATH": REPOSITORY,
            }
            # as scripts/train.sh does
            environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
            command = [
                sys.executable,
                __file__,
                f"--worker={layout}",
                f"--steps={options.steps}",
                "--",
                *options.changes,
            ]
            log = pathlib.Path(cache, "log")
            outcome = run_worker(command, environment, log, LIMIT)
            if outcome.result is None:
                sys.exit(f"{layout} failed: {outcome.failure}\n{log.read_text()}")
        results.append(r := outcome.result)
        _, cpu, temp, _ = LAYOUTS[layout]
        # On the machine where MaxText took `cpu` CPU-seconds, matmuls took 4.7 for the same
        # operations.
        ratio = r["matmul_multiple"] / (cpu / 4.7)
        print(
            f"{layout:24} {r['seconds']:7.2f} {r['cpu_seconds']:7.2f} "
            f"{r['matmul_multiple']:8.2f} {ratio:9.2f} "
            f"{r['tracing_s']:8.1f} {r['compiling_s']:9.1f} {r['temporary_mb']:8.1f} "
            f"{temp:9.1f} {r['start_up_s']:10.1f} "
            f"{r['start_cpu_seconds']:8.1f}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
