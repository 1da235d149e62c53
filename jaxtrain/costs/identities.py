"""Published formulas, as published: parameters, operations, training time, memory. The planner is held against them.

Sizes are those of the papers: h width, l layers, a heads, s sequence, V vocabulary, b microbatch, B batch, t tensor, p pipeline, d data
parallel, m chunks of layers on a stage.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), Korthikanti et al. 2022 (arXiv 2205.05198), Rajbhandari et al. 2020 (arXiv 1910.02054).
"""


def megatron_parameters(h: int, layers: int, s: int, vocabulary: int) -> float:
    """P = 12 l h² (1 + 13/12h + (V + s)/12lh), of a GPT with tied tables (Narayanan 2021, equation 2)."""
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))


def megatron_flops(batch: int, s: int, layers: int, h: int, vocabulary: int, recompute: bool = True) -> float:
    """F = 96 B s l h² (1 + s/6h + V/16lh) of a step with full recomputation (Narayanan 2021, equation 3); without it the layers' part is
    72/96 of that, and the head's the same."""
    factor = 96 if recompute else 72
    head = vocabulary / (16 * layers * h) * 96 / factor
    return factor * batch * s * layers * h**2 * (1 + s / (6 * h) + head)


def training_seconds(tokens: float, parameters: float, devices: int, flops_per_device: float) -> float:
    """8 T P / (n X): of a run over T tokens with full recomputation (Narayanan 2021, equation 4)."""
    return 8 * tokens * parameters / (devices * flops_per_device)


ACTIVATIONS = ("none", "tensor", "sequence", "selective", "selective_sequence", "full")


def activation_bytes(kind: str, s: int, b: int, h: int, a: int, t: int = 1) -> float:
    """Bytes that one layer keeps of a microbatch for its backward, in 16 bits (Korthikanti 2022, table 2).

    kind: none, no parallelism; tensor; sequence, tensor and sequence parallelism; selective and selective_sequence, with attention's core
    computed again; full, the layer's input alone.
    """
    scores = 5 * a * s / h
    factor = {
        "none": 34 + scores,
        "tensor": 10 + 24 / t + scores / t,
        "sequence": 34 / t + scores / t,
        "selective": 10 + 24 / t,
        "selective_sequence": 34 / t,
        "full": 2.0,
    }[kind]
    return s * b * h * factor


def layers_in_flight(layers: int, p: int, m: int = 1) -> float:
    """Layers whose activations the first stage of 1F1B holds at once, as if for one microbatch (Korthikanti 2022, section 4.2.3)."""
    return layers * (1 + (p - 1) / (p * m) if m > 1 else 1.0)


def zero_bytes(parameters: float, stage: int, d: int, optimizer: float = 12.0) -> float:
    """Bytes of a device's parameters and gradients in 16 bits, and of the optimizer's state, by the stage of ZeRO (Rajbhandari 2020,
    section 5): 2 Ψ, 2 Ψ and K Ψ, shared out over d devices from the back."""
    shared = {0: (1, 1, 1), 1: (1, 1, d), 2: (1, d, d), 3: (d, d, d)}[stage]
    return parameters * (2 / shared[0] + 2 / shared[1] + optimizer / shared[2])
