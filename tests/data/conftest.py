"""What the tests of data share: a `data` config whose cache is the test's own, and a small
tokenizers file."""

import pathlib
import subprocess
import sys
import types

import hypothesis
import pytest
from support import ROOT

# The same examples every time, and no folder of them left behind.
hypothesis.settings.register_profile("fixed", database=None, deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def config(tmp_path):
    """config(source=…, …) → an object with the fields of the config's `data` group."""

    def make(**fields):
        defaults = {
            "source": "stdlib",
            "tokenizer": "bytes",
            "sequence_length": 8,
            "batch_size": 8,
            "seed": 0,
            "attend_across_documents": True,
            "packing": "stream",
            "loss_mask": (),
            "text_fields": ("text",),
            "validation_fraction": 0.1,
            "bad_records": "stop",
            "filter": "",
            "duplicates": "keep",
            "token_dtype": "uint16",
            "store_cache_gb": 1.0,
            "cache": str(tmp_path / "cache"),
            "prefetch": 2,
        }
        unknown = fields.keys() - defaults.keys()
        assert not unknown, unknown
        return types.SimpleNamespace(
            **{
                k: str(v) if isinstance(v, pathlib.Path) else v
                for k, v in (defaults | fields).items()
            }
        )

    return make


@pytest.fixture
def write(tmp_path):
    """write("name", text or bytes) → the path of a new file."""

    def make(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


@pytest.fixture
def start_python():
    """start_python(code, argument, …) → a process of this Python that finds the package; killed at
    the end if it still runs."""
    processes = []

    def make(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        processes.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
            )
        )
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def tokenizer_file(tmp_path):
    """tokenizer_file(special tokens) → the path of a byte-level BPE file of a few hundred ids, made
    with truncation and padding on."""
    import tokenizers

    def make(special=("<pad>", "<|endoftext|>"), name="bpe.json"):
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=list(special),
            initial_alphabet=alphabet,
            show_progress=False,
        )
        bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
        bpe.enable_truncation(4)
        bpe.enable_padding(length=4)
        path = tmp_path / name
        bpe.save(str(path))
        return path

    return make
