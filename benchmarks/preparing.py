"""How much of a tokenizer's own speed a preparation reaches: the `tokenizers` library encodes the
texts of a JSONL file, and `prepare` makes a corpus of the file, in turn.

    python benchmarks/preparing.py [--mb=64] [--vocabulary=32000] [--rounds=3]

The texts are Python's installed sources, and the tokenizer is a byte-level BPE that is trained on a
part of them. The library gets lists of 100, 1,000 or all texts from memory, and its fastest way
counts; its ids are not read. `prepare` starts with an empty cache: it reads the file twice, parses
JSON, encodes, writes, and computes checksums. Each is a process of its own. CPU-seconds, which
others on the machine change less than wall time, are beside the speeds.
"""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import arguments

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LISTS = (100, 1000, sys.maxsize)  # texts that the library gets at a time
LIBRARY = """
import json, resource, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2]) as file:
    texts = [json.loads(line)["text"] for line in file]
wall, cpu = time.perf_counter(), time.process_time()
for first in range(0, len(texts), int(sys.argv[3])):
    tokenizer.encode_batch_fast(texts[first : first + int(sys.argv[3])], add_special_tokens=False)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(time.perf_counter() - wall, time.process_time() - cpu, memory)
"""
PREPARE = """
import resource, sys, time
from jaxtrain.config.groups.run_settings import DataConfig
from jaxtrain.data.preparing.prepare import prepare
data = DataConfig(source=sys.argv[2], tokenizer=sys.argv[1], cache=sys.argv[3])
wall, cpu = time.perf_counter(), time.process_time()
prepare(data, int(sys.argv[4]), progress=False)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(time.perf_counter() - wall, time.process_time() - cpu, memory)
"""


class Cost(NamedTuple):
    """Seconds of the wall and of all cores together, and the most memory in MB."""

    wall: float
    cpu: float
    memory: float


def installed_texts(size: float) -> list[str]:
    """Installed Python sources of about so many bytes."""
    folders = [pathlib.Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    texts: list[str] = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        text = path.read_bytes().decode(errors="ignore")
        if text and size > 0:
            texts.append(text)
            size -= len(text)
    return texts


def train_tokenizer(texts: Sequence[str], vocabulary: int, path: str) -> None:
    """Writes the tokenizers file of a byte-level BPE."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.save(path)


def measured(code: str, *values: object) -> Cost:
    """What a process of Python prints as its cost."""
    environment = os.environ | {"PYTHONPATH": REPOSITORY}
    command = [sys.executable, "-c", code, *map(str, values)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        arguments.fail(done.stderr.strip().splitlines()[-1])
    return Cost(*map(float, done.stdout.split()))


def main() -> None:
    parser = arguments.argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=64)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts, bpe = installed_texts(flags.mb * 1e6), f"{folder}/bpe.json"
        train_tokenizer(texts[:: max(1, len(texts) // 1000)], flags.vocabulary, bpe)
        with open(path := f"{folder}/texts.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        size = sum(len(text.encode()) for text in texts) / 1e6
        alone: list[Cost] = []
        prepared: list[Cost] = []
        for number in range(flags.rounds):
            alone += [measured(LIBRARY, bpe, path, count) for count in LISTS]
            prepared.append(measured(PREPARE, bpe, path, f"{folder}/{number}", flags.vocabulary))
        for name, rounds in (("tokenizers alone", alone), ("prepare", prepared)):
            wall, cpu = min(each.wall for each in rounds), min(each.cpu for each in rounds)
            print(f"{name}: {size / wall:.2f} MB/s, {cpu:.2f} CPU-seconds for {size:.1f} MB")
        wall, cpu = (
            min(each[i] for each in alone) / min(each[i] for each in prepared) for i in (0, 1)
        )
        print(f"prepare reaches {wall:.1%} of the library's speed, {cpu:.1%} by CPU-seconds")
        print(f"memory of prepare: {max(each.memory for each in prepared):.0f} MB")


if __name__ == "__main__":
    main()
