"""The cost of a save every 20 steps for the loop, against never saving: wall time, time that a save
blocks, CPU time.

    python benchmarks/checkpoint.py [--every=20] [--saves=2] [--pairs=5] [--folder=DIR]
                                    [-- --config.mesh.stage=1 …]
    python benchmarks/checkpoint.py --local --every=5 --saves=8     the same for checkpoint.local

The recipe is configs/tiny.py on 8 simulated devices. Windows of `every` × `saves` steps with and
without saves take turns in one process, since machines are noisy. A window's end waits for the
steps, and not for the save under way, whose CPU time counts all the same. The table has medians
over the pairs: of windows, and of each pair's ratio.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main() -> None:
    """Reads the flags and measures in a folder that is deleted."""
    parser = arguments.parser(__doc__, "flags of jaxtrain.train, after --")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--local",
        action="store_true",
        help="save as checkpoint.local does, in a RAM disk where there is one",
    )
    parser.add_argument(
        "--folder", default="", help="where checkpoints go; a temporary folder if not given"
    )
    options = parser.parse_args()
    sys.path.insert(0, REPOSITORY)
    ram = "/dev/shm" if options.local and os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=options.folder or ram) as folder:
        measure(options, pathlib.Path(folder))


def measure(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Prints the table."""
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax

    config, namespace = cli.parse(
        ["--cpu_devices=8", f"--config={REPOSITORY}/configs/tiny.py", *options.changes], "benchmark"
    )
    start_jax(namespace)
    import jax

    from jaxtrain.checkpoint.local import LocalCheckpointer
    from jaxtrain.checkpoint.manager import Checkpointer
    from jaxtrain.checkpoint.regions import Shards, stored_arrays
    from jaxtrain.checkpoint.retention import Retention
    from jaxtrain.config.phases import spans
    from jaxtrain.config.rules.checks import check_devices
    from jaxtrain.data.batches import TrainingBatches
    from jaxtrain.data.corpora import prepare_all
    from jaxtrain.data.loader import Loader
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.training.state import initial_state, stored_shapes
    from jaxtrain.training.step import make_step

    config = check_devices(config, jax.device_count(), jax.default_backend()).resolve()
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh)
        corpora = prepare_all(config.data, config.model.vocab_size)
        loader = Loader(
            TrainingBatches(corpora, spans(config)),
            step.batch_sharding,
            config.pipeline.microbatches,
        )
        state, batch = initial_state(step.layout, step.optimizer, 0), loader.batch(0)
        compiled = step.train.lower(step.abstract_state(), step.abstract_batch).compile()
        stored = stored_shapes(step.layout, step.optimizer)
        saves: Checkpointer | LocalCheckpointer = Checkpointer(folder, stored, Retention(2))
        if options.local:
            saves = LocalCheckpointer(
                folder,
                Shards(stored_arrays(step.abstract_state(), stored)),
                "benchmark",
                0,
                print,
            )
        at = 0

        def window(saving: bool) -> dict[str, float]:
            """Seconds of a window's steps: wall, CPU, and those that saves blocked."""
            nonlocal state, at
            saves.wait()
            jax.block_until_ready(state)
            cpu, began, blocked, blocked_cpu = time.process_time(), time.perf_counter(), 0.0, 0.0
            for _ in range(options.every * options.saves):
                state, metrics = compiled(state, batch)
                at += 1
                jax.block_until_ready(metrics)  # as the loop does, one step behind
                if saving and at % options.every == 0:
                    jax.block_until_ready(state)
                    save_began, save_cpu = time.perf_counter(), time.thread_time()
                    saves.save(at, state, {"step": at})
                    blocked += time.perf_counter() - save_began
                    blocked_cpu += time.thread_time() - save_cpu
            jax.block_until_ready(state)
            wall = time.perf_counter() - began
            saves.wait()
            return {
                "wall": wall,
                "blocked": blocked,
                "blocked_cpu": blocked_cpu,
                "cpu": time.process_time() - cpu,
            }

        window(True)  # what comes once: folders, imports
        pairs = [(window(False), window(True)) for _ in range(options.pairs)]
        loader.close()
        saves.close()
        size = sum(
            file.stat().st_size
            for path in folder.rglob(str(at))
            for file in (path, *path.rglob("*"))
            if file.is_file()
        )
    print(
        f"jax {jax.__version__}, {jax.device_count()} × {jax.devices()[0].device_kind}, "
        f"{size / 2**20:.1f} MiB a checkpoint,",
        end=" ",
    )
    print(
        f"a save every {options.every} steps, {options.pairs} pairs of windows of "
        f"{options.every * options.saves} steps"
    )
    median = lambda values: statistics.median(list(values))
    never, saving = ([pair[i] for pair in pairs] for i in (0, 1))
    for name in ("wall", "cpu"):
        ratio = median(b[name] / a[name] for a, b in pairs)
        print(
            f"{name:8} {median(w[name] for w in never):8.3f} s never  "
            f"{median(w[name] for w in saving):8.3f} s saving  ratio {ratio:.3f}"
        )
    share = median(w["blocked"] / w["wall"] for w in saving)
    busy = median(w["blocked_cpu"] for w in saving) / options.saves
    print(
        f"blocked  {median(w['blocked'] for w in saving) / options.saves:8.4f} s a save "
        f"({busy:.4f} s of CPU), {share:.2%} of the loop"
    )


if __name__ == "__main__":
    main()
