"""The timed training step of a case of benchmarks/gpu.py, as make_step gives it to the trainer:
`python benchmarks/gpu_step.py FOLDER`.

If torch's side is to start from the same weights, they and the batches are written into the folder
first:

    weights/NAME.npy   a parameter, float32 as in memory; layers in one array [1, layers, …]
    batches.npz        tokens, targets, weights and what else a batch has, [steps, microbatches,
                       sequences, tokens]
    case.json          gets the learning rate of each step and the vocabulary's rows in memory
"""

import importlib.metadata
import json
import pathlib
import sys
import time

import numpy as np
from gpu_cases import BATCHES, WEIGHTS, read_case
from worker import report_result

from jaxtrain.config import Config

DISTINCT = 4  # batches that the steps go round in
DOCUMENT = 1000  # tokens of a document, on average


def batches(config: Config, count: int) -> dict[str, np.ndarray]:
    """`count` batches of a made-up corpus, packed as the trainer packs: token frequencies by Zipf's
    law, documents of random lengths."""
    from jaxtrain.data.corpus import Corpus
    from jaxtrain.data.document_packing import Sequences
    from jaxtrain.data.reading.bad_records import Skipped
    from jaxtrain.data.tokenizer import NoTokenizer

    d, vocabulary = config.data, config.model.vocab_size
    random = np.random.default_rng(d.seed)
    shares = 1 / (np.arange(vocabulary) + 2.7)
    size = count * d.batch_size * d.sequence_length + 1
    tokens = (
        np.searchsorted(np.cumsum(shares / shares.sum()), random.random(size))
        .clip(max=vocabulary - 1)
        .astype(np.uint32)
    )
    ends = np.cumsum(1 + random.geometric(1 / DOCUMENT, 1 + 3 * size // DOCUMENT))
    documents = np.concatenate([[0], ends[ends < size], [size]]).astype(np.int64)
    corpus = Corpus(
        tokens,
        documents,
        None,
        "",
        NoTokenizer(vocabulary),
        pathlib.Path(),
        "made up",
        0.0,
        Skipped(),
        prepared=0.0,
    )
    packed = Sequences(corpus, corpus.train, d.sequence_length, d.attend_across_documents)
    sequences = [packed[i] for i in range(count * d.batch_size)]
    shape = (count, config.pipeline.microbatches, -1, d.sequence_length)
    return {
        name: np.stack([sequence[name] for sequence in sequences]).reshape(shape)
        for name in sequences[0]
    }


def write_for_torch(
    folder: pathlib.Path, params: dict, arrays: dict[str, np.ndarray], **fields
) -> None:
    """Weights and batches as torch_step.py reads them, and further fields of case.json."""
    import jax

    if list(params["layers"]) != ["0"]:
        raise ValueError(
            f"the layers lie in {len(params['layers'])} stacks, and torch_step.py reads one"
        )
    (folder / WEIGHTS).mkdir()
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        np.save(folder / WEIGHTS / f"{'.'.join(key.key for key in path)}.npy", np.asarray(value))
    np.savez(folder / BATCHES, **arrays)
    case = folder / "case.json"
    case.write_text(json.dumps(json.loads(case.read_text()) | fields))


def versions() -> dict:
    """Versions of jax and of what it runs on."""
    import jax

    described = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].client.platform_version,
    }
    for package in (
        "jaxlib",
        "jax-cuda13-pjrt",
        "jax-cuda12-pjrt",
        "nvidia-cudnn-cu13",
        "nvidia-cudnn-cu12",
    ):
        try:
            described[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return described


def run(folder: pathlib.Path) -> dict:
    """Times the steps of the case in a folder. Returns the worker's result."""
    config, case = read_case(folder)
    import jax

    from jaxtrain.config.kernels import attention_case, describe
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.parallel.target_device import target_device_of
    from jaxtrain.planner.layer.model import model_of
    from jaxtrain.training.state import initial_state
    from jaxtrain.training.step import make_step
    from jaxtrain.training.update.optimizer import learning_rate

    mesh = make_mesh(sizes_of(config.mesh), jax.devices()[:1])
    with jax.set_mesh(mesh):
        step = make_step(config, mesh)
        state = initial_state(step.layout, step.optimizer, config.train.seed)
        steps = case["steps"] + 1
        arrays = batches(config, min(steps, DISTINCT))
        if case["torch"]:
            rate = learning_rate(config.optimizer, config.train.steps)
            vocabulary_rows = state.params["embed"]["table"].shape[0]
            write_for_torch(
                folder,
                state.params,
                arrays,
                rates=[float(rate(i)) for i in range(steps)],
                vocabulary_rows=vocabulary_rows,
            )
        began = time.perf_counter()
        lowered = step.train.lower(step.abstract_state(), step.abstract_batch)
        traced = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - traced
        on_device = [
            jax.device_put({k: v[i] for k, v in arrays.items()}, step.batch_sharding)
            for i in range(len(arrays["tokens"]))
        ]
        jax.block_until_ready((state, on_device))
        seconds, results = [], []
        for number in range(steps):
            began_step = time.perf_counter()
            state, metrics = compiled(state, on_device[number % len(on_device)])
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - began_step)
            results.append(jax.device_get(metrics))
    model = model_of(config.model, config.data.sequence_length)
    case_of_step = attention_case(
        target_device_of(jax.devices()[0]),
        config.model,
        config.data,
        config.mesh,
        config.parallel,
        config.precision,
    )
    account, allocator = compiled.memory_analysis(), jax.devices()[0].memory_stats() or {}
    memory = (
        account.argument_size_in_bytes
        + account.temp_size_in_bytes
        + account.output_size_in_bytes
        - account.alias_size_in_bytes
    )
    return {
        "seconds": seconds[1:],
        "first_s": seconds[0],
        "trace_s": traced - began,
        "compile_s": compile_s,
        "losses": [float(r["loss"]) for r in results],
        "norms": [float(r["grad_norm"]) for r in results],
        "memory": memory,
        "allocator_peak": allocator.get("peak_bytes_in_use"),
        "parameters": step.layout.parts.parameter_count,
        "flops_per_token": model.training_flops_per_token(),
        "kernels": list(describe(config.model, case_of_step)),
        "versions": versions(),
    }


if __name__ == "__main__":
    report_result(lambda: run(pathlib.Path(sys.argv[1])))
