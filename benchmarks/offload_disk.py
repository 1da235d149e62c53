"""The rate at which an update streams the optimizer's state from a local disk and back, against the
disk's own rate; and the memory that this takes.

    python benchmarks/offload_disk.py --folder=/mnt/nvme [--layers=8,16] [--width=1024] [--pairs=5]

disk      the bytes of the state are read and written, as many of each at the same time, in the
          stream's requests (O_DIRECT, REQUEST_BYTES, as many threads), without devices
update    the update of a run, with gradients that are there already
memory    the most memory of a process (ru_maxrss) with so many layers, each above that of an
          update of the same parameters without state

Both rates count bytes that are read and written. They take turns, since machines are noisy; medians
over the pairs, with the last number of layers: the first group's read and the last group's write,
beside which nothing else goes, count as part of the update, and are a tenth of it and more with a
state of 1 GB. In a run they go beside gradients. One CPU device.
"""

import concurrent.futures
import dataclasses
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import time

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main() -> None:
    """Reads the flags, and measures in processes of their own."""
    parser = arguments.parser(__doc__, "nothing")
    parser.add_argument("--folder", required=True, help="on the disk that is measured")
    parser.add_argument(
        "--layers", type=numbers, default=[8, 16], help="one number or several, with commas"
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="", help="of this process: disk or none")
    options = parser.parse_args()
    sys.path.insert(0, REPOSITORY)
    if options.only:
        print(json.dumps(measure(options)))
        return
    rates = _process(options, "disk", options.layers[-1])
    print(f"state {rates['bytes'] / 1e6:,.0f} MB, {rates['layer'] / 1e6:,.0f} MB a layer")
    for name in ("disk_rate", "update_rate"):
        each = ", ".join(f"{rate / 1e9:.2f}" for rate in rates[name])
        print(f"{name:12} {statistics.median(rates[name]) / 1e9:.2f} GB/s ({each})")
    pairs = zip(rates["update_rate"], rates["disk_rate"], strict=True)
    print(f"update over disk: {statistics.median(u / d for u, d in pairs):.0%}")
    for layers in options.layers:
        on_disk = _process(options, "disk", layers, pairs=1)
        without = _process(options, "none", layers, pairs=1)
        above = on_disk["peak"] - without["peak"]
        bound = 2 * on_disk["layer"] + 2**30
        print(
            f"{layers} layers: peak memory {above / 1e6:,.0f} MB above that without state; two "
            f"layers' state and 1 GiB are {bound / 1e6:,.0f} MB"
        )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _process(options, only: str, layers: int, pairs: int | None = None) -> dict:
    """The result of `measure` in a new process."""
    words = [f"--folder={options.folder}", f"--layers={layers}", f"--width={options.width}"]
    words += [f"--pairs={pairs or options.pairs}", f"--only={only}"]
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), *words], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(options) -> dict:
    """Rates in bytes a second, and the peak of this process's memory in bytes.

    options.only: "disk", or "none" for an update without the optimizer's state
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain import config as cfg
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.training.state import initial_state
    from jaxtrain.training.step import make_step
    from jaxtrain.training.update.optimizer import Guard
    from jaxtrain.training.update.streamed_update import CompiledUpdate

    changes = {
        "model.layers": options.layers[0],
        "model.width": options.width,
        "model.heads": 8,
        "model.mlp_width": 4 * options.width,
        "model.vocab_size": 512,
        "precision.compute": "float32",
        "parallel.offload": "optimizer",
        "parallel.offload_directory": options.folder,
        "mesh.data": 1,
    }
    config = cfg.replace(cfg.Config(), changes).resolve()
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh)
        assert step.streamed and step.layout.disk
        file, update = step.layout.disk, step.streamed.update
        state = initial_state(step.layout, step.optimizer, 0)
        new = lambda: [jnp.full(a.shape, 1e-3, jnp.float32) for a in jax.tree.leaves(state.params)]
        guard = Guard(jnp.float32(1), None)
        layers = {blocks.layer for group, blocks in update.passes if group.stack}
        layer = sum(b.size for group, b in update.passes if group.stack) // len(layers)
        rates: dict[str, list[float]] = {"disk_rate": [], "update_rate": []}
        if options.only == "none":
            plain = jax.jit(
                lambda values, gradients: [v - 1e-3 * g for v, g in zip(values, gradients)],
                donate_argnums=0,
            )
            for _ in range(3):
                values = plain(jax.tree.leaves(state.params), new())
                params = jax.tree.unflatten(jax.tree.structure(state.params), values)
                state = jax.block_until_ready(dataclasses.replace(state, params=params))
            return {"peak": peak(), "layer": layer}
        file.open()
        programs = {program: lowered.compile() for program, lowered in update.lower().items()}
        compiled = CompiledUpdate(update, programs)
        for number in range(options.pairs + 1):
            file.interrupt()
            file.settle()
            seconds = disk_seconds(file) if options.pairs > 1 else 1.0
            gradients = jax.block_until_ready(new())
            began = time.monotonic()
            state, _ = compiled(state, gradients, guard)
            file.settle()
            if number:  # the first writes bytes that were only reserved
                rates["update_rate"].append(2 * file.size / (time.monotonic() - began))
                rates["disk_rate"].append(2 * file.size / seconds)
        assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(state.params))
        result = {"peak": peak(), "layer": layer, "bytes": file.size, **rates}
        file.close()
        return result


def disk_seconds(file) -> float:
    """Seconds for all bytes of a state's file, read by some threads while others write what was
    read."""
    from jaxtrain.devices.state_file import REQUEST_BYTES, REQUESTS, empty_buffer

    offsets = range(0, file.size, REQUEST_BYTES)
    readers, writers = (concurrent.futures.ThreadPoolExecutor(REQUESTS) for _ in range(2))
    # used again and again, as the stream's are: new memory costs as much as the disk
    buffers: queue.SimpleQueue = queue.SimpleQueue()
    for _ in range(3 * REQUESTS):
        buffers.put(empty_buffer(REQUEST_BYTES))

    def read(offset: int):
        buffer = buffers.get()
        size = min(REQUEST_BYTES, file.size - offset)
        file.read_into(buffer[:size], offset)
        return writers.submit(write, offset, buffer, size)

    def write(offset: int, buffer, size: int) -> None:
        file.write(offset, buffer[:size])
        buffers.put(buffer)

    began = time.monotonic()
    with readers, writers:
        for writing in list(readers.map(read, offsets)):
            writing.result()
    return time.monotonic() - began


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
