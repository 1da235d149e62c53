"""Run with the packages of requirements/formats.txt and torch: Megatron's and datasets' own writers
make files, and their own readers say what is in them (expected.json).

    owners_formats.py FOLDER
"""

import json
import pathlib
import sys
import warnings

warnings.simplefilter("ignore")  # of packages that Megatron misses

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core.datasets.indexed_dataset import (  # noqa: E402
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
)

TEXTS = [f"document {i}: {'naïve 漢字 ' * (i % 7)}{'x' * (i % 13)}" for i in range(1, 2500)]


def megatron(folder: pathlib.Path) -> dict[str, list[list[int]]]:
    """Writes a dataset of each integer type, one of documents of several sequences, and one that is
    merged from two. Returns the documents of each that have tokens, as its reader gives them."""
    rng, made = np.random.default_rng(0), {}
    for dtype in (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16):
        prefix = str(folder / dtype.__name__)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for _ in range(300):
            lengths = rng.integers(1, 40, rng.integers(1, 4)).tolist()
            ids = torch.from_numpy(rng.integers(0, 128, sum(lengths)))
            if rng.random() < 0.5:
                builder.add_document(ids, lengths)
            else:
                for part in ids.split(lengths):
                    builder.add_item(part)
                builder.end_document()
            if rng.random() < 0.1:
                builder.end_document()  # a document without tokens
        builder.finalize(f"{prefix}.idx")
        made[prefix] = dtype
    merged = IndexedDatasetBuilder(str(folder / "merged.bin"), dtype=np.uint16)
    for _ in range(2):
        merged.add_index(str(folder / "uint16"))
    merged.finalize(str(folder / "merged.idx"))
    optimal = DType.optimal_dtype(50_257)
    wide = IndexedDatasetBuilder(str(folder / "optimal.bin"), dtype=optimal)
    wide.add_document(np.array([1, 50_256]), [2])
    wide.finalize(str(folder / "optimal.idx"))
    expected = {}
    for name in (*made, str(folder / "merged"), str(folder / "optimal")):
        read = IndexedDataset(name)
        bounds = read.document_indices.tolist()
        expected[pathlib.Path(name).name] = [
            np.concatenate([read[i] for i in range(first, last)]).tolist()
            for first, last in zip(bounds, bounds[1:])
            if last > first
        ]
    return expected


def saved_datasets(folder: pathlib.Path) -> dict[str, list[str]]:
    """Writes folders of save_to_disk, files of datasets' cache and Parquet. Returns the texts of
    each, as datasets reads them."""
    texts = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    large = texts.cast_column("text", datasets.Value("large_string"))
    nested = datasets.Dataset.from_dict({"doc": [{"text": t, "n": [1, 2]} for t in TEXTS]})
    made = {
        "plain": texts,
        "large": large,
        "shuffled": texts.shuffle(seed=0).filter(lambda row: row["id"] % 3),
        "columns": texts.with_format("numpy", columns=["text"]),
        "one": texts.select([5]),
    }
    for name, dataset in made.items():
        dataset.save_to_disk(folder / name, num_shards=min(3, len(dataset)))
    nested.save_to_disk(folder / "nested")
    splits = datasets.DatasetDict({"train": texts.select(range(9)), "test": texts.select([0])})
    splits.save_to_disk(folder / "splits")
    texts.save_to_disk(folder / "again", num_shards=5)
    texts.select(range(7)).save_to_disk(folder / "again", num_shards=2)
    texts.to_parquet(folder / "texts.parquet")
    mapped = texts.map(
        lambda row: {"text": row["text"].upper()}, cache_file_name=str(folder / "cache.arrow")
    )
    expected = {
        name: list(datasets.load_from_disk(folder / name)["text"])
        for name in (*made, "splits/train", "again")
    }
    expected["nested"] = [doc["text"] for doc in datasets.load_from_disk(folder / "nested")["doc"]]
    expected["texts.parquet"] = list(
        datasets.Dataset.from_parquet(str(folder / "texts.parquet"), cache_dir=folder / "hf")[
            "text"
        ]
    )
    expected["cache.arrow"] = list(datasets.Dataset.from_file(str(folder / "cache.arrow"))["text"])
    assert expected["cache.arrow"] == list(mapped["text"])
    return expected


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for name in ("megatron", "datasets"):
        (folder / name).mkdir()
    expected = {
        "megatron": megatron(folder / "megatron"),
        "datasets": saved_datasets(folder / "datasets"),
    }
    (folder / "expected.json").write_text(json.dumps(expected))
