"""The training step of a case of benchmarks/gpu.py in PyTorch, timed:
`python benchmarks/torch_step.py FOLDER`, after gpu_step.py.

Needs torch and numpy alone, so that it can run in an environment of its own.

The precision is our recipes': float32 parameters, of which the matrices are cast to the compute
type once a step; a microbatch's gradients come in the compute type and are added up in float32;
AdamW (fused) works on the float32 parameters. FSDP2's `param_dtype=bfloat16, reduce_dtype=float32`
does the same; autocast would cast in every product, and keep the residual stream in float32.
"""

import contextlib
import json
import pathlib
import sys
import time
import types

import numpy as np
import torch
from torch_models import GROUPED_MM, Transformer, document_mask
from worker import report_result

# of attention, the first that takes a case
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


class Master:
    """The float32 parameters behind a model's, and their gradients' sums.

    A parameter of another type is a copy, whose gradient is added to the float32 sum and freed as
    soon as it is there.
    """

    def __init__(self, model):
        self.names = [name for name, _ in model.named_parameters()]
        self.working = [p for _, p in model.named_parameters()]
        exact = torch.float32
        self.values = [
            p if p.dtype == exact else torch.empty_like(p, dtype=exact).requires_grad_()
            for p in self.working
        ]
        self.copies = [
            (p, master)
            for p, master in zip(self.working, self.values, strict=True)
            if p is not master
        ]
        for p, master in self.copies:
            p.register_post_accumulate_grad_hook(lambda p, master=master: self._add(p, master))

    @staticmethod
    def _add(p, master) -> None:
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    def load(self, folder: pathlib.Path) -> None:
        """Our weights, by their names."""
        with torch.no_grad():
            for name, value in zip(self.names, self.values, strict=True):
                value.copy_(torch.from_numpy(_weight(folder, name)))

    def cast(self) -> None:
        """The step's copies in the compute type."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(
                    [p for p, _ in self.copies], [master for _, master in self.copies]
                )


def _weight(folder: pathlib.Path, name: str) -> np.ndarray:
    """A parameter of torch's model from our files. Ours have their layers in one array [1, layers,
    …], and matrices as [in, out]."""
    parts = name.split(".")
    if parts[0] != "layers":
        return np.load(folder / f"{name}.npy")
    value = np.load(folder / f"{'.'.join(['layers.0', *parts[2:]])}.npy", mmap_mode="r")[
        0, int(parts[1])
    ]
    return np.array(value.swapaxes(-1, -2) if value.ndim > 1 else value, order="C")


class Training:
    """A model, its optimizer, and batches on the device."""

    def __init__(self, folder: pathlib.Path):
        case = json.loads((folder / "case.json").read_text())
        self.device = torch.device("cuda" if case["device"] == "cuda" else "cpu")
        config = case["config"]
        cfg, self.optimizer_config = (
            types.SimpleNamespace(**config["model"]),
            types.SimpleNamespace(**config["optimizer"]),
        )
        dtype = getattr(torch, config["precision"]["compute"])
        with self.device:
            model = Transformer(
                cfg,
                case["vocabulary_rows"],
                config["data"]["batch_size"],
                dtype,
                config["pipeline"]["remat"],
            )
        self.master, self.rates, self.steps = Master(model), case["rates"], case["steps"]
        self.master.load(folder / "weights")
        self.model = model.compile_by(case["torch_compile"])
        o = self.optimizer_config
        groups = [
            {
                "params": [p for p in self.master.values if p.ndim > 1],
                "weight_decay": o.weight_decay,
            },
            {"params": [p for p in self.master.values if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=o.learning_rate, betas=(o.b1, o.b2), eps=o.epsilon, fused=True
        )
        stored = np.load(folder / "batches.npz")
        self.batches = [
            {name: self._on_device(stored[name][i]) for name in stored}
            for i in range(len(stored["tokens"]))
        ]

    def _on_device(self, array: np.ndarray):
        tensor = torch.from_numpy(array).to(self.device)
        return tensor if tensor.is_floating_point() else tensor.long()

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step → loss and norm of the gradients before clipping, still on the
        device."""
        batch = self.batches[number % len(self.batches)]
        tokens, loss = batch["weights"].sum(), 0.0
        self.master.cast()
        self.optimizer.zero_grad(set_to_none=True)
        for m in range(len(batch["tokens"])):
            part = microbatch(batch, m)
            total, router_loss = self.model(part)
            (total / tokens + router_loss).backward()
            loss = loss + total.detach() / tokens
        norm = torch.nn.utils.clip_grad_norm_(
            self.master.values, self.optimizer_config.clip_norm or float("inf")
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[number]
        self.optimizer.step()
        return loss, norm

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def microbatch(batch: dict, m: int) -> dict:
    """One of a batch's microbatches, with positions and a mask."""
    part = {name: batch[name][m] for name in batch}
    segments = part.pop("segments", None)
    if segments is None:
        part["positions"] = torch.arange(part["tokens"].shape[1], device=part["tokens"].device)[
            None
        ]
    return part | {"mask": None if segments is None else document_mask(segments)}


def fastest_attention(device) -> contextlib.AbstractContextManager:
    """A context in which attention goes to cuDNN where it can, then to flash attention, and so
    on."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(
        [getattr(SDPBackend, name) for name in KERNELS if hasattr(SDPBackend, name)],
        set_priority=True,
    )


def versions() -> dict:
    """Versions of torch and of what it runs on."""
    cuda = torch.cuda.is_available()
    described = {
        "torch": torch.__version__,
        "torch CUDA": torch.version.cuda,
        "torch cuDNN": torch.backends.cudnn.version() if cuda else None,
    }
    described["torch device"] = torch.cuda.get_device_name() if cuda else "cpu"
    described["torch grouped_mm"] = GROUPED_MM is not None
    return described


def run(folder: pathlib.Path) -> dict:
    """Times the steps of the case in a folder. Returns the worker's result."""
    training = Training(folder)
    losses, norms, seconds = [], [], []
    with fastest_attention(training.device):
        for number in range(training.steps + 1):
            training.synchronize()
            began = time.perf_counter()
            loss, norm = training.step(number)
            training.synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
            norms.append(float(norm))
            if number == 0 and training.device.type == "cuda":  # what compiling took does not count
                torch.cuda.reset_peak_memory_stats()
    memory = torch.cuda.max_memory_allocated() if training.device.type == "cuda" else None
    return {
        "seconds": seconds[1:],
        "first_s": seconds[0],
        "losses": losses,
        "norms": norms,
        "memory": memory,
        "versions": versions(),
    }


if __name__ == "__main__":
    report_result(lambda: run(pathlib.Path(sys.argv[1])))
