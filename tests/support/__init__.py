"""What tests share: small configs, plain references, readers of compiled programs, runs of the
command."""

import importlib.metadata
import pathlib

ROOT = pathlib.Path(__file__).parents[2]  # of the repository

# XLA's flags, for compilation is what the suite costs: LLVM's level, and its code in one piece, for
# each worker has one core. XLA's passes, and so the programs that tests read, stay as they are.
COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 12):
    # The fusions of later versions: the same fused operations, a third longer to compile. jax 0.12
    # has no others.
    COMPILE_QUICKLY += " --xla_cpu_use_fusion_emitters=false"

# The package's rooms from the lowest up; a room imports from those before it alone
# (test_imports.py).
ROOMS = (
    "schedule config run devices data parallel models runtime planner/layer planner/step "
    "pipeline training generation checkpoint hf planner/search planner/programs planner/command "
    "phases experiments"
).split()
