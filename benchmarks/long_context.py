"""Memory of a device for long sequences: the training step of llama3_8b on 64 H100s, compiled ahead
of time, by context mode.

    python benchmarks/long_context.py [--lengths=131072,524288] [--modes=all_gather,ulysses,ring]
                                      [--json=FILE] [-- --config.mesh.model=8 …]

Needs jax's compilers for GPUs (requirements/compilers.txt), and neither a GPU nor a driver. A data
shard has one sequence and a step one microbatch, with full recomputation and ZeRO-3, documents kept
apart, and attention in plain XLA (cuDNN is not there to compile for). XLA's GPU compiler refuses no
program for its memory: what counts is its account of arguments and temporary memory. What it
refuses is said, and the status is then 1.
"""

import json
import pathlib
import sys

import arguments

REPOSITORY = pathlib.Path(__file__).parents[1]
DEVICES = 64
H100 = 80e9  # bytes
SETTINGS = {
    "mesh.data": "-1",
    "mesh.context": "8",
    "mesh.model": "1",
    "parallel.zero": "3",
    "pipeline.microbatches": "1",
    "model.attention_kernel": "xla",
}


def compiled(recipe, settings: dict[str, str], length: int, mode: str) -> dict:
    """Seconds to compile and bytes on a device for one length and mode."""
    from jaxtrain import config as configs
    from jaxtrain.config.flags import apply
    from jaxtrain.config.rules import checks
    from jaxtrain.planner.programs.topology import compile_config, fitting

    settings = settings | {"data.sequence_length": str(length), "parallel.context": mode}
    config = checks.check_devices(apply(recipe, list(settings.items())), DEVICES).resolve()
    config = configs.replace(config, {"data.batch_size": config.mesh.data * config.mesh.replica})
    program = compile_config(fitting("h100", DEVICES), config)
    return {
        "length": length,
        "mode": mode,
        "seconds": round(program.tracing + program.compiling),
        "arguments": program.memory["argument"],
        "temporary": program.memory["temp"],
        "total": program.total,
    }


def main() -> None:
    """Compiles each length with each mode and prints its memory."""
    parser = arguments.parser(__doc__, "settings, as --config.PATH=VALUE")
    parser.add_argument("--lengths", default="131072,262144,524288")
    parser.add_argument("--modes", default="all_gather,ulysses,ring")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    from jaxtrain.config.recipes import find_recipe, load_recipe
    from jaxtrain.planner.programs.topology import INSTALL_COMMAND, PLATFORMS, Refused

    if PLATFORMS["h100"].missing:
        arguments.fail(f"no compiler for H100s here: {INSTALL_COMMAND}")
    recipe = load_recipe(find_recipe("llama3_8b"))
    settings = SETTINGS | dict(
        change.removeprefix("--config.").split("=", 1) for change in args.changes
    )
    print(
        f"{'tokens':>9}  {'context':10} {'arguments GB':>12} {'temporary GB':>12} "
        f"{'total GB':>8} {'compiled s':>10}"
    )
    records, refused = [], False
    for length in map(int, args.lengths.split(",")):
        for mode in args.modes.split(","):
            try:
                record = compiled(recipe, settings, length, mode)
            except Refused as error:
                refused = True
                print(f"{length:9}  {mode:10} refused: {error.line}", flush=True)
                continue
            gigabytes = (record[name] / 1e9 for name in ("arguments", "temporary", "total"))
            print(
                f"{length:9}  {mode:10}",
                *(f"{n:{width}.1f}" for n, width in zip(gigabytes, (12, 12, 8), strict=True)),
                end="",
            )
            print(
                f" {record['seconds']:10}{'' if record['total'] < H100 else '  more than 80 GB'}",
                flush=True,
            )
            records.append(record)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(records, indent=1))
    sys.exit(refused)


if __name__ == "__main__":
    main()
