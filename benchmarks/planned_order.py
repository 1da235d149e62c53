"""The order of cpu_step.py's layouts as planned and as measured, on 8 simulated CPU devices that
`--calibrate` measures first.

    python benchmarks/planned_order.py [--layouts=data8,model8,…] [--rounds=3] [--hardware=FILE]
                                       [-- --config.model.width=512 …]

One process calibrates, then compiles all layouts and steps them in turn, so that a change of the
machine's speed affects all alike. Seconds are CPU-seconds over the cores, as on an idle machine.
The status is 1 if a pair whose measured times differ by more than a tenth is planned in reverse.
"""

import itertools
import os
import statistics
import sys
import time
from typing import Any

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MATTERS = 1.1  # measured times that differ by less may be planned in any order


class Stepped:
    """A layout's compiled step, its state and its batch."""

    def __init__(self, config: Any):
        import jax

        from jaxtrain.config.phases import spans
        from jaxtrain.data.batches import TrainingBatches
        from jaxtrain.data.corpora import prepare_all
        from jaxtrain.data.loader import Loader
        from jaxtrain.devices.mesh import make_mesh, sizes_of
        from jaxtrain.training.state import initial_state
        from jaxtrain.training.step import make_step

        self.mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(self.mesh):
            step = make_step(config, self.mesh)
            corpora = prepare_all(config.data, config.model.vocab_size)
            loader = Loader(
                TrainingBatches(corpora, spans(config)),
                step.batch_sharding,
                config.pipeline.microbatches,
            )
            self.compiled = step.train.lower(step.abstract_state(), step.abstract_batch).compile()
            self.state, self.batch = initial_state(step.layout, step.optimizer, 0), loader.batch(0)
            loader.close()

    def cpu_seconds(self) -> float:
        """CPU-seconds of one step."""
        import jax

        with jax.set_mesh(self.mesh):
            began = time.process_time()
            self.state, metrics = self.compiled(self.state, self.batch)
            jax.block_until_ready((self.state, metrics))
            return time.process_time() - began


def wrong_pairs(measured: dict[str, float], plan: dict[str, float]) -> list[tuple[str, str]]:
    """Pairs (faster, slower) of layouts, as measured, that the plan has in reverse."""
    return [
        (fast, slow)
        for fast, slow in itertools.permutations(measured, 2)
        if measured[slow] > MATTERS * measured[fast] and plan[slow] <= plan[fast]
    ]


def main() -> int:
    """Prints planned and measured times. Returns 1 if a pair is in the wrong order, else 0."""
    sys.path.insert(0, REPOSITORY)
    import cpu_step

    parser = arguments.parser(__doc__, "more flags of jaxtrain.train, after --")
    parser.add_argument("--layouts", default=",".join(cpu_step.LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--hardware", default="", help="a file that --calibrate has written, and not a new one"
    )
    options = parser.parse_args()
    from jaxtrain import cli
    from jaxtrain.devices.startup import start_jax
    from jaxtrain.planner.layer import hardware as kinds
    from jaxtrain.planner.search.predict import exactly, predict

    configs = {}
    for layout in options.layouts.split(","):
        config, namespace = cli.parse(cpu_step.flags(layout, options.changes), "benchmark")
        configs[layout] = config.resolve()
    start_jax(namespace)
    import jax

    from jaxtrain.planner.command import calibrate

    began = time.process_time()
    hardware = kinds.load(options.hardware) if options.hardware else calibrate.calibrate()
    print("\n".join(calibrate.summary(hardware)))
    print(f"calibrated in {time.process_time() - began:.0f} CPU-seconds, jax {jax.__version__}")
    steps = {layout: Stepped(config) for layout, config in configs.items()}
    times: dict[str, list[float]] = {layout: [] for layout in steps}
    cores = min(len(os.sched_getaffinity(0)), jax.device_count())
    for turn in range(options.rounds + 1):
        for layout, step in steps.items():
            seconds = step.cpu_seconds() / cores
            if turn:  # the first step is slower
                times[layout].append(seconds)
    measured = {layout: statistics.median(values) for layout, values in times.items()}
    plan = {
        layout: exactly(predict(config, hardware)).seconds for layout, config in configs.items()
    }
    print(f"{'layout':24} {'planned s':>10} {'measured s':>11}  ratio")
    for layout, seconds in sorted(measured.items(), key=lambda item: item[1]):
        print(f"{layout:24} {plan[layout]:10.2f} {seconds:11.2f} {plan[layout] / seconds:6.2f}")
    wrong = wrong_pairs(measured, plan)
    for fast, slow in wrong:
        ratio, as_planned = measured[slow] / measured[fast], plan[slow] / plan[fast]
        print(
            f"wrong: {slow} takes {ratio:.2f} times as long as {fast}, and is planned at "
            f"{as_planned:.2f}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
