"""The memory that a published model takes on its way in and out: peak of each process against what
it held before.

    python benchmarks/import_memory.py [--gigabytes=2] [--folder=DIR]

Writes a random Llama in bfloat16, with an output matrix of its own, and imports it in 8 processes
with one CPU device each, on several meshes (train.init_from); then by `convert from_hf` and out
again by `convert to_hf`, each in one process. The bound of an import is 1.3 times the process's
parameters in their type, the largest tensor of the files and 256 MB; the optimizer's state comes on
top. Takes 10 GB of memory and, for a model of 2 GB, 12 GB of disk, which are given back at the end.
"""

import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROCESSES = 8
FACTOR, ADDEND = 1.3, 256 * 10**6  # of the bound
MESHES = {
    "model 8": {"mesh.model": 8},
    "data 2 · stage 2 · model 2": {"mesh.stage": 2, "mesh.model": 2},
    "data 2 · stage 2 · model 2, ZeRO-3": {"mesh.stage": 2, "mesh.model": 2, "parallel.zero": 3},
    "data 8, ZeRO-3": {"parallel.zero": 3},
}
WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 8, 32000


def main() -> None:
    """Reads the flags and prints the tables."""
    parser = arguments.parser(__doc__, "flags of jaxtrain.train, after --")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", default="", help="where the model goes for a while")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        model = pathlib.Path(folder) / "model"
        size, largest = write_model(model, options.gigabytes * 1e9)
        sizes = f"{size / 1e9:.2f} GB, its largest tensor of {largest / 1e6:.0f} MB"
        print(f"a Llama of {sizes}; figures in MB")
        print(f"{'':38} parameters  optimizer  before  peak over it  bound")
        for name, changes in MESHES.items():
            flags = [f"--config.{path}={value}" for path, value in changes.items()]
            show(name, launched(model, [*flags, *options.changes]), largest)
        run = pathlib.Path(folder) / "run"
        for words in (
            ["from_hf", f"{model}", f"--workdir={run}", "--config.optimizer.name=adafactor"],
            ["to_hf", f"--workdir={run}", f"{pathlib.Path(folder) / 'out'}"],
        ):
            figures = in_process("converted", words)
            before, peak = figures["before"] / 1e6, figures["peak"] / 1e6
            print(f"{f'convert {words[0]}':61} {before:6.0f}  {peak:13.0f}", flush=True)


def show(name: str, figures: list[dict[str, int]], largest: int) -> None:
    """Prints the process that is nearest to its bound."""
    bounds = [bound_of(one, largest) for one in figures]
    worst = max(range(len(figures)), key=lambda n: figures[n]["peak"] / bounds[n])
    one = figures[worst]
    columns = [one["parameters"], one["optimizer"], one["before"], one["peak"], bounds[worst]]
    widths = (10, 9, 6, 13, 5)
    texts = (f"{value / 1e6:{width}.0f}" for value, width in zip(columns, widths, strict=True))
    print(f"{name:38} {'  '.join(texts)}", flush=True)


def bound_of(figures: dict[str, int], largest: int) -> int:
    """The most bytes that an import may take at its peak."""
    return round(FACTOR * figures["parameters"] + largest + ADDEND + figures["optimizer"])


# --- the model ------------------------------------------------------------------------------------


def write_model(folder: pathlib.Path, size: float) -> tuple[int, int]:
    """Writes a random model of about `size` bytes. (its bytes, those of its largest tensor)"""
    sys.path.insert(0, REPOSITORY)
    import ml_dtypes
    import numpy as np

    from jaxtrain.hf.safetensors_writer import TensorEntry, write_tensors

    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KV_HEADS * WIDTH // HEADS, WIDTH),
        "self_attn.v_proj": (KV_HEADS * WIDTH // HEADS, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    ends = {
        "model.embed_tokens": (VOCABULARY, WIDTH),
        "model.norm": (WIDTH,),
        "lm_head": (VOCABULARY, WIDTH),
    }
    entry = lambda name, shape: TensorEntry(f"{name}.weight", "BF16", shape)
    of_ends = [entry(name, shape) for name, shape in ends.items()]
    of_layer = [entry(name, shape) for name, shape in shapes.items()]
    used = sum(e.nbytes for e in of_ends)
    layers = max(round((size - used) / sum(e.nbytes for e in of_layer)), 1)
    entries = of_ends + [
        entry(f"model.layers.{layer}.{name}", shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    ]
    random = np.random.default_rng(0)

    def rows(entry: TensorEntry):
        for _ in range(entry.shape[0]):
            numbers = random.standard_normal(entry.shape[1:], np.float32) * 0.02
            yield np.asarray(numbers, ml_dtypes.bfloat16)[None]

    folder.mkdir()
    write_tensors(folder, entries, rows, largest=500 * 10**6)
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(e.nbytes for e in entries), max(e.nbytes for e in entries)


# --- workers --------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Of workers, which find this script as a module."""
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/benchmarks"}


def launched(model: pathlib.Path, flags: list[str]) -> list[dict[str, int]]:
    """The figures of each process of an import."""
    command = [sys.executable, "-m", "jaxtrain.launch", f"--processes={PROCESSES}"]
    command += ["--devices_per_process=1", "--module=import_memory", "--", "--config=from_hf"]
    command += [f"--config.train.init_from={model}", "--config.optimizer.name=adafactor", *flags]
    return result_of(command)


def in_process(work: str, words: list[str]) -> dict[str, int]:
    """The figures of a work of this module, in a process of its own."""
    code = f"import sys, import_memory; import_memory.{work}(sys.argv[1:])"
    return result_of([sys.executable, "-c", code, *words])[0]


def result_of(command: list[str]) -> list[dict[str, int]]:
    """The figures that a worker prints. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    for line in done.stdout.splitlines():
        _, mark, text = line.partition("FIGURES ")
        if mark:
            return json.loads(text)
    raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} here")


def measured(work: Callable[[], object]) -> tuple[int, int, object]:
    """(bytes in memory before `work`, the most during it over those, its result)."""
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = status("VmRSS")
    result = work()
    return before, status("VmHWM") - before, result


def imported(argv: list[str]) -> None:
    """An import in one of several processes, with the flags of a training command."""
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax

    config, namespace = cli.parse(argv, "benchmark")
    start_jax(namespace)
    import jax

    from jaxtrain.config.rules.checks import check_devices
    from jaxtrain.devices import cluster
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.hf import importing
    from jaxtrain.pipeline.setup import make_setup
    from jaxtrain.training.step import make_step

    config = check_devices(config, jax.device_count(), "cpu").resolve()
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh, make_setup(config))
        cluster.gather("the collectives of a gathering are compiled")
        before, peak, state = measured(
            lambda: importing.read_together(importing.open_together(config), step)
        )
    shards = lambda tree: sum(
        shard.data.nbytes for array in jax.tree.leaves(tree) for shard in array.addressable_shards
    )
    parameters = shards(state.params)
    figures = {"parameters": parameters, "optimizer": shards(state) - parameters}
    answers = cluster.gather(figures | {"before": before, "peak": peak})
    cluster.log(f"FIGURES {json.dumps(answers)}")


def converted(words: list[str]) -> None:
    """A conversion. It holds no parameters, but what is being written to a checkpoint."""
    from jaxtrain import convert

    convert._start_on_host()
    import jax

    from jaxtrain.checkpoint import checkpoints, manager  # noqa: F401
    from jaxtrain.hf import exporting, importing  # noqa: F401

    jax.devices()
    before, peak, exit_status = measured(lambda: convert.main(words))
    assert exit_status == 0
    print(f"FIGURES {json.dumps([{'before': before, 'peak': peak}])}")


if __name__ == "__main__":
    sys.path.insert(0, REPOSITORY)
    if any(word.startswith("--coordinator") for word in sys.argv):
        imported(sys.argv[1:])
    else:
        main()
