#!/usr/bin/env python
"""Ray Train: `jaxtrain.train` in a worker a host, by JaxTrainer, which starts jax.distributed
in each.

    python scripts/launch/ray_train.py --workers=4 --gpus_per_worker=8 \\
        -- --config=llama3_8b --workdir=/shared/runs/llama \\
        --config.data.source=/shared/data/text --config.data.tokenizer=/shared/data/tokenizer.json

On TPUs: --topology=4x4x4 --accelerator=TPU-V5P instead of --gpus_per_worker. On CPU devices:
--cpu_devices=N (tests/by_hand/rehearse_ray.py). Run it where `ray.init()` finds the cluster;
jaxtrain is in the workers' environment. Ray retries a failure whatever it is, so only what can go
on is a failure here (https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html); the
rest ends the job with its status.
"""

import argparse
import os
import sys

from jaxtrain import ExitStatus, RunError, train


def work(options: dict) -> int:
    """One worker: trains, and gives the status of a run that is not to be started again. Raises
    RunError for one that is."""
    try:
        status = train(flags=options["flags"]).status
        if status is ExitStatus.STOPPED:
            raise RuntimeError("stopped on request, with the step saved")
        return int(status)
    except RunError as error:
        if error.status.goes_on:
            raise
        print(f"error: {error}", flush=True)
        return int(error.status)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, one a host")
    parser.add_argument("--gpus_per_worker", type=int, default=0)
    parser.add_argument(
        "--cpu_devices", type=int, default=0, help="simulated CPU devices of each worker"
    )
    parser.add_argument("--topology", help="of a TPU slice, such as 4x4x4")
    parser.add_argument("--accelerator", help="of the TPUs, such as TPU-V5P")
    parser.add_argument(
        "--failures", type=int, default=20, help="how often the workers are started again"
    )
    parser.add_argument("flags", nargs="*", help="of jaxtrain.train, after --")
    options = parser.parse_args()

    import ray  # --help needs no Ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    # jax's own preemption service would take SIGTERM; a simulated device needs jax to be told
    # before Ray starts it.
    variables = {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    variables |= (
        {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.cpu_devices)}
        if options.cpu_devices
        else {}
    )
    variables |= {
        name: os.environ[name]
        for name in ("JAXTRAIN_CACHE", "PYTHONPATH", "XLA_FLAGS")
        if name in os.environ
    }
    ray.init(runtime_env={"env_vars": variables})
    trainer = JaxTrainer(
        work,
        train_loop_config={"flags": options.flags},
        # Ray starts jax.distributed for accelerators alone, and takes JAX_PLATFORMS=cpu for one of
        # them.
        jax_config=JaxConfig(use_tpu=bool(options.topology), use_gpu=not options.topology),
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus_per_worker > 0,
            use_tpu=bool(options.topology),
            topology=options.topology,
            accelerator_type=options.accelerator,
            resources_per_worker={"GPU": options.gpus_per_worker}
            if options.gpus_per_worker
            else None,
        ),
        run_config=RunConfig(
            name="jaxtrain", failure_config=FailureConfig(max_failures=options.failures)
        ),
    )
    return trainer.fit().return_value  # of the first worker


if __name__ == "__main__":
    sys.exit(main())
