"""The start of jax in a command: simulated devices, XLA's flags, the compilation cache, other
processes."""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from jaxtrain.config import Config, UsageError, has_experts
from jaxtrain.config.sizes import GPU_MEMORY, MEMORY_FRACTION
from jaxtrain.devices.cluster_environment import (
    SIMULATED_DEVICES,
    alike,
    read_environment,
    several_processes,
)
from jaxtrain.run import files, streams

XLA_FLAGS = {
    # seconds after which a collective of CPU devices is given up
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 3000,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 3000,
    "--xla_cpu_collective_timeout_seconds": 3000,
    # per cent of what a GPU's allocator has left beside a program's arguments, beyond which XLA
    # repeats products and does not send beside others
    "--xla_gpu_memory_limit_slop_factor": 100,
    # A kernel of cuDNN that is loaded while a CUDA graph is captured ends the run, as the first
    # evaluation of gpt2_124m did on an H200 (jax 0.11.2): its kernels are in no graph.
    "--xla_gpu_enable_command_buffer": "-CUDNN",
}


def start_jax(namespace: types.SimpleNamespace, config: Config | None = None) -> None:
    """Sets up jax's devices, compilation cache and, in a run of several processes, jax.distributed.
    Call it before jax is used.

    `--cpu_devices=N` simulates N CPU devices. A single process without an accelerator and without a
    requested number of devices simulates 8, and a line on stdout says so.

    config: of a run, which several processes have to agree on

    Raises ClusterError or DevicesError where the processes of a run cannot work together, and
    UsageError as `simulate_devices`.
    """
    # the ops of experts and of multi-token prediction have such collectives
    model = config and config.model
    set_xla_flags(os.environ, bool(model and (has_experts(model) or model.mtp_depth)))
    # Not before the config is known to be right: the import takes a second, and a mistake in flags
    # should be told at once.
    with read_environment():
        import jax

    from jaxtrain.devices import cluster

    settings: Any = jax.config  # its attributes have no declared types
    several = several_processes(namespace, os.environ) or jax.distributed.is_initialized()
    chosen = simulate_devices(namespace.cpu_devices, 0 if several else SIMULATED_DEVICES)
    cluster.initialize(namespace)
    if config and jax.distributed.is_initialized():
        cluster.agree(alike(namespace, config, os.environ, settings.values))
    with read_environment():
        cluster.check_devices()
    use_compilation_cache()
    if chosen and jax.process_count() == 1 and jax.default_backend() == "cpu":
        streams.log(
            f"no accelerator found: simulating {jax.device_count()} CPU devices "
            "(--cpu_devices=N for another number)"
        )


def has_devices() -> bool:
    """True if this process has used jax: its devices are settled then, and jax refuses settings for
    them. It does not import jax; no public module of jax tells this."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge and bridge.backends_are_initialized())


def simulate_devices(asked: int, by_default: int) -> bool:
    """Tells jax how many CPU devices to simulate, and returns True if that is `by_default`, which
    it is where nobody has asked for a number. Beside an accelerator the default changes nothing.

    asked: as of --cpu_devices, 0 for none; by_default: 0 leaves the number to jax

    Raises UsageError if this process has used jax, and has other devices than those asked for.
    """
    import jax

    settings: Any = jax.config  # its attributes have no declared types
    if has_devices():
        count, platform = jax.local_device_count(), jax.default_backend()
        if asked and (platform, count) != ("cpu", asked):
            raise UsageError(
                f"--cpu_devices={asked}: this process has used jax already, and has {count} "
                f"{platform} device{'s'[: count > 1]}",
                {"cpu_devices": count if platform == "cpu" else 0},
                advice="here, or a new process (of a notebook, a new kernel)",
            )
        return False
    if asked:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", asked)
        return False
    in_environment = "xla_force_host_platform_device_count" in os.environ["XLA_FLAGS"]
    if in_environment or settings.jax_num_cpu_devices >= 0 or not by_default:
        return False
    jax.config.update("jax_num_cpu_devices", by_default)
    return True


# Files of a machine with an accelerator → its name, and the extra of jax's package for it.
ACCELERATORS = {
    "/dev/nvidia0": ("an NVIDIA GPU", "cuda13"),
    "/dev/accel0": ("a TPU", "tpu"),
    "/dev/vfio/0": ("a TPU", "tpu"),
}


def unused_accelerator(
    namespace: types.SimpleNamespace, files: Callable[[str], bool] = os.path.exists
) -> str:
    """A line for a machine that has an accelerator for which jax has no package: CPU devices would
    be simulated, and a run would take days. "" for other machines, and if CPU devices are
    requested. Call it when jax has its devices."""
    import jax

    if jax.default_backend() != "cpu" or namespace.cpu_devices or os.environ.get("JAX_PLATFORMS"):
        return ""
    for file, (name, extra) in ACCELERATORS.items():
        if files(file):
            return (
                f"{name} is here, and jax has no working package for it: JAXTRAIN_EXTRAS={extra} "
                f"scripts/train.sh, or python -m pip install 'jaxtrain[{extra}]'; "
                f"--cpu_devices={SIMULATED_DEVICES} runs without it"
            )
    return ""


def set_xla_flags(environment: Any, side_by_side: bool = False) -> None:
    """Sets long timeouts of XLA's CPU collectives, and more threads, unless the user has set them:
    simulated devices share a few cores, and XLA ends the process when a collective waits too long
    (40 s) for its slowest device. Of a GPU's memory jax's allocator takes as much as plans count
    with, unless the user has set that or chosen the one that takes none: jax's default is 75 %. XLA
    compiles for what the allocator takes; its default is 5 % less, behind the arguments.

    side_by_side: an op may have several collectives that do not depend on each other. A waiting
        collective holds a thread, and XLA makes one thread a device: if all wait, none remains for
        the collective that they wait for. More threads cost a tenth of a step's CPU time.
    """
    words = environment.get("XLA_FLAGS", "").split()
    names = {word.partition("=")[0] for word in words}
    words += [f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in names]
    environment["XLA_FLAGS"] = " ".join(words)
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "")
    if not any(map(environment.get, MEMORY_FRACTION)) and allocator.lower() != "platform":
        environment[MEMORY_FRACTION[0]] = str(GPU_MEMORY)
    if side_by_side:
        environment.setdefault("NPROC", "32")  # what XLA takes for the number of cores


def use_compilation_cache() -> None:
    """Caches compiled programs for the next start, but not those of several CPU devices. Call it
    when jax has its devices. jax's key of a program has the features of the CPU.

    XLA's CPU backend runs independent thunks side by side, and keeps collectives in one order by a
    resource that all of them share. In a program that is read from the cache those inside a loop
    have another one: two devices may then enter a loop's collective and an outer one in opposite
    order, and wait for ever (docs/log.md, 2026-11-21 and 2026-11-26).
    """
    import jax

    settings: Any = jax.config  # its attributes have no declared types
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif settings.jax_compilation_cache_dir is None:
        folder = compilation_cache(os.environ)
        if folder.startswith("~"):
            streams.log(
                "warning: compiled programs are not kept: there is no home folder (set HOME)"
            )
        elif refusal := files.try_folder(folder):
            streams.log(f"warning: compiled programs are not kept: {folder} {refusal.why}")
        else:
            jax.config.update("jax_compilation_cache_dir", folder)


def compilation_cache(environment: Any) -> str:
    """The folder of compiled programs: $JAXTRAIN_CACHE/xla or ~/.cache/jaxtrain/xla
    ($JAX_COMPILATION_CACHE_DIR wins, in jax itself)."""
    base = environment.get("JAXTRAIN_CACHE") or os.path.join(
        os.path.expanduser("~"), ".cache", "jaxtrain"
    )
    return os.path.join(base, "xla")
