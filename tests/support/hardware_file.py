"""A hardware file for simulated devices, such as `plan --calibrate` writes, with figures that
nobody measured."""

import json
import pathlib

VALUES = {
    "name": "simulated",
    "peak_tflops": {"bfloat16": 0.02, "float32": 0.02},
    "memory_gib": 4,
    "memory_usable": 1.0,
    "memory_gb_per_s": 8,
    "memory_reached": 1.0,
    "matmul": {"peak": 0.8, "half": [16, 16, 16]},
    "attention": [0.2, 0.2],
    "launch_us": 5,
    "alone": 2.0,
    "tiers": [
        {"name": "shared memory", "devices": 0, "gb_per_s": 2, "reached": 1.0, "latency_us": 20}
    ],
    "watts": 0,
    "sources": ["nobody"],
}


def write(folder: pathlib.Path) -> pathlib.Path:
    """The file, in a folder that is there."""
    file = folder / "hardware.json"
    file.write_text(json.dumps(VALUES))
    return file
