"""DiLoCo against synchronous replicas: the validation loss of the tiny recipe, and the bytes that
cross between replicas, counted.

    python benchmarks/diloco.py [--steps=200] [--inner_steps=20] [--cases="synchronous;apart, int8"]
                                [-- --config.… …]

Two replicas of data 2 · stage 2 on 8 simulated devices, with the same batches for all cases:
synchronous with configs/tiny.py; synchronous with configs/tiny_diloco.py, whose optimizer is set
for half the batch; and independent with that recipe, exchanging float32 or int8. Each is a run of
the training command. Bytes are those that a device sends to other replicas, read from the compiled
programs with ring algorithms: those of a step, and of an exchange over the steps between two.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import arguments

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
MESH = ["--config.mesh.replica=2", "--config.mesh.data=2", "--config.mesh.model=1"]
TINY, DILOCO = (
    [f"--config={REPOSITORY}/configs/{name}.py", *MESH] for name in ("tiny", "tiny_diloco")
)
NO_EXCHANGE = {
    "train.diloco_inner_steps": 0,
    "optimizer.outer_learning_rate": 0.7,
    "optimizer.outer_momentum": 0.9,
}
# The outer settings at their defaults.
SYNCHRONOUS = [f"--config.{path}={value}" for path, value in NO_EXCHANGE.items()]


def validation_loss(flags: list[str]) -> float:
    """The last validation loss of a run in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "jaxtrain.train",
            *flags,
            "--config.train.sample_tokens=0",
            f"--workdir={folder}/run",
        ]
        subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = [
            json.loads(line)
            for line in pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    return [record["validation_loss"] for record in records if "validation_loss" in record][-1]


def bytes_a_step(flags: list[str]) -> float:
    """Bytes that a device sends to other replicas in a step."""
    import jax
    from support.crossing import bytes_sent

    from jaxtrain import cli
    from jaxtrain.config.rules import checks
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.planner.programs.program import Program
    from jaxtrain.training.step import make_step

    config = checks.check_devices(cli.parse(flags, "")[0], 8).resolve()
    step = make_step(config, make_mesh(sizes_of(config.mesh)))
    with jax.set_mesh(step.mesh):
        state = step.abstract_state()
        sent = bytes_sent(
            Program(step.train.lower(state, step.abstract_batch).compile().as_text()),
            step.mesh,
        )
        if step.exchange:
            exchanged = bytes_sent(
                Program(step.exchange.lower(state).compile().as_text()), step.mesh
            )
            sent += exchanged / config.train.diloco_inner_steps
    return sent


def main() -> None:
    """Prints loss and bytes of each case."""
    parser = arguments.parser(
        __doc__, "more flags of jaxtrain.train for all but the first, after --"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inner_steps", type=int, default=20)
    parser.add_argument(
        "--cases",
        default="",
        help="replicas, with semicolons between them; the first is what others are held against",
    )
    options = parser.parse_args()
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    shared = [f"--config.train.steps={options.steps}", *options.changes]
    independent = [*DILOCO, *shared, f"--config.train.diloco_inner_steps={options.inner_steps}"]
    runs = {
        "synchronous": [*TINY, *shared[:1]],
        "synchronous, as apart": [*DILOCO, *shared, *SYNCHRONOUS],
        "apart, float32": independent,
        "apart, int8": [*independent, "--config.precision.outer=int8"],
    }
    cases = options.cases.split(";") if options.cases else list(runs)
    if unknown := [case for case in cases if case not in runs]:
        parser.error(
            f"--cases={unknown[0]!r} is none of {'; '.join(runs)}: use --cases={next(iter(runs))}"
        )
    print(
        f"{'replicas':22} {'validation loss':>16} {'over synchronous':>17} "
        f"{'bytes a step':>13} {'fewer':>7}",
        flush=True,
    )
    reference: tuple[float, float] | None = None  # loss and bytes of the first case
    for name in cases:
        sent, loss = bytes_a_step(runs[name]), validation_loss(runs[name])
        reference = reference or (loss, sent)
        print(
            f"{name:22} {loss:16.4f} {loss / reference[0] - 1:17.2%} {sent:13,.0f} "
            f"{reference[1] / sent:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
