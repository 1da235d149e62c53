"""Embedding and head shared by all stages against head on the last stage: predicted step time and
memory, for a large vocabulary.

    python benchmarks/vocabulary.py [--vocabulary=128256] [--stages=4,8,16]
                                    [-- --config.model.width=512 …]

First the shapes of configs/llama3_8b.py on 4, 8 and 16 stages: step times by the coupled clock,
with op times by the model's sizes, and the bytes of tables, of their gradients and of Adam's
moments on the fullest device. Then what XLA makes of it: the memory per device of compiled steps of
a narrow model on 8 simulated devices, 4 stages × 2, with the changes after "--".
"""

import os
import sys

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def predicted(vocabulary: int, stages_of: list[int]) -> None:
    """Prints step times and bytes of Llama 3 8B's shapes, from closed forms and the table."""
    from jaxtrain import config as configs
    from jaxtrain.config.recipes import find_recipe, load_recipe
    from jaxtrain.pipeline.setup import make_setup

    recipe = load_recipe(find_recipe("llama3_8b"))
    print(
        f"Llama 3 8B's shapes, vocabulary {vocabulary:,}, 4 microbatches a stage; time in F "
        "of a stage\n"
    )
    print(
        f"{'stages':>6} {'schedule':12} {'vocabulary':11} {'step':>8} {'bubble':>8} "
        f"{'tables, gradients, moments: GB a device':>40}"
    )
    for stages in stages_of:
        for schedule in ("1f1b", "interleaved", "zb_h1", "zb_v"):
            for where in ("end_stages", "parallel"):
                changes = {
                    "model.vocab_size": vocabulary,
                    "mesh.data": 1,
                    "mesh.stage": stages,
                    "mesh.model": 1,
                    "pipeline.schedule": schedule,
                    "pipeline.repeats": 0,
                    "pipeline.microbatches": 4 * stages,
                    "data.batch_size": 4 * stages,
                    "pipeline.vocabulary": where,
                }
                config = configs.replace(recipe, changes).resolve()
                simulation = make_setup(config).simulation()
                numbers = (
                    vocabulary * config.model.width * (1 if config.model.tied_embeddings else 2)
                )
                # at the ends every stage holds both: one program for all
                held = numbers / (stages if where == "parallel" else 1)
                moments = 2 * numbers / stages  # shared out over the stages either way
                print(
                    f"{stages:6} {schedule:12} {where:11} {simulation.step_time_coupled:8.1f} "
                    f"{simulation.bubble_fraction_coupled:8.1%} "
                    f"{4 * (2 * held + moments) / 1e9:40.2f}"
                )


def compiled(vocabulary: int, flags: list[str]) -> None:
    """Prints the memory of compiled steps of a narrow model."""
    import jax

    from jaxtrain import cli, config as configs
    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.training.step import make_step

    changed = f", {' '.join(flags)}" if flags else ""
    print(
        "\ncompiled: 8 layers of width 256, sequence 256, 4 stages × 2 data shards, 1f1b, 8 "
        "microbatches, with AdamW",
        end="",
    )
    print(f"{changed}; MB per device\n")
    print(f"{'vocabulary':11} {'state':>9} {'temporary':>10}")
    for where in ("end_stages", "parallel"):
        changes = {
            "model.layers": 8,
            "model.width": 256,
            "model.vocab_size": vocabulary,
            "data.sequence_length": 256,
            "data.batch_size": 16,
            "mesh.data": 2,
            "mesh.stage": 4,
            "pipeline.microbatches": 8,
            "pipeline.vocabulary": where,
            "precision.compute": "float32",
        }
        config = cli.parse(
            ["--cpu_devices=8", *flags],
            "benchmark",
            recipe=configs.replace(configs.Config(), changes),
        )[0].resolve()
        mesh = make_mesh(sizes_of(config.mesh))
        step = make_step(config, mesh)
        with jax.set_mesh(mesh):
            memory = (
                step.train.lower(step.abstract_state(), step.abstract_batch)
                .compile()
                .memory_analysis()
            )
        print(
            f"{where:11} {memory.argument_size_in_bytes / 1e6:9.1f} "
            f"{memory.temp_size_in_bytes / 1e6:10.1f}",
            flush=True,
        )


def main() -> None:
    """Prints both tables."""
    parser = arguments.parser(
        __doc__, "more flags of jaxtrain.train for what is compiled, after --"
    )
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--stages", default="4,8,16", help="of which times are predicted")
    options = parser.parse_args()
    sys.path.insert(0, REPOSITORY)

    predicted(options.vocabulary, [int(stages) for stages in options.stages.split(",")])
    from jaxtrain.devices.startup import set_xla_flags

    set_xla_flags(os.environ)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    compiled(options.vocabulary, options.changes)


if __name__ == "__main__":
    main()
