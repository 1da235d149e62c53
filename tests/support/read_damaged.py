"""Prepares corpora of damaged files, in a process whose memory is bounded: a line of JSON for each
(format, damage, bad_records, what came of it).

    read_damaged.py FOLDER SEED COUNT

The files of all formats are made here; COUNT damages are drawn by SEED. A line is written before
each file, too, so a crash or a hang says where it was.
"""

import gzip
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import sys

import numpy as np

GIGABYTE, SECONDS = 1 << 30, 20


def write_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Writes a corpus in each format. Returns name → what data.source is."""
    import pyarrow
    import pyarrow.parquet
    from array_record.python.array_record_module import ArrayRecordWriter

    from jaxtrain.data.reading.array_records import _example

    texts = [f"document {i} " + "naïve 漢字 " * (i % 50) for i in range(500)]
    table = pyarrow.table({"id": list(range(500)), "text": texts, "doc": [{"text": "a"}] * 500})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=100)
    for name, open_writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with open_writer(folder / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    compression = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(folder / "zstd.arrow", table.schema, options=compression) as writer:
        writer.write_table(table, max_chunksize=100)
    saved = folder / "saved"
    saved.mkdir()
    for i in range(2):
        shutil.copy(folder / "stream.arrow", saved / f"data-0000{i}-of-00002.arrow")
    names = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": names}))
    (saved / "dataset_info.json").write_text("{}")
    message = _example()()
    message.features.feature.add(key="text").value.bytes_list.value.append(b"a text")
    for name, record in (
        ("json", b'{"text": "a text"}'),
        ("example", message.SerializeToString()),
        ("plain", b"a text"),
    ):
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:10")
        for _ in range(500):
            writer.write(record)
        writer.close()
    ids = np.arange(5000, dtype="<u2") % 257
    ids.tofile(folder / "raw.bin")
    np.save(folder / "ids.npy", ids)
    ids.tofile(folder / "pair.bin")
    with open(folder / "pair.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 500, 501))
        index.write(np.full(500, 10, "<i4").tobytes())
        index.write((np.arange(500, dtype="<i8") * 20).tobytes())
        index.write(np.arange(501, dtype="<i8").tobytes())
    many = folder / "many"
    many.mkdir()
    for i in range(3):
        ids.tofile(many / f"{i}.bin")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.parquet.gz").write_bytes(gzip.compress((folder / "a.parquet").read_bytes()))
    (folder / "a.json").write_bytes(b"[" + lines.replace(b"\n", b",\n")[:-2] + b"]")
    return {path.name: path for path in folder.iterdir()}


def damaged(content: bytes, draw: random.Random, others: list[bytes]) -> tuple[str, bytes]:
    """A damage that is drawn, in words, and the content with it."""
    size = len(content)
    edge = draw.choice((min(size, 200), size))  # headers and footers are hit more often
    at = draw.randrange(edge) if draw.random() < 0.7 else size - 1 - draw.randrange(edge)
    kind = draw.choice("cut flip large large zeros text other empty gone twice magic".split())
    changed = bytearray(content)
    if kind == "cut":
        changed = changed[:at]
    elif kind == "flip":
        for _ in range(draw.choice((1, 1, 5))):
            changed[min(size - 1, at + draw.randrange(8))] ^= 1 << draw.randrange(8)
    elif kind == "large":
        number = draw.choice((2**63 - 1, 2**63, 2**62, 2**40, 2**31 - 1, 2**64 - 1, 2**32, 10**9))
        width = draw.choice((4, 8))
        changed[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    elif kind == "zeros":
        changed[at : at + draw.choice((1, 16, size))] = bytes(16)
    elif kind == "text":
        changed = bytearray(b"This is a text in place of what is expected.\n" * 50)
    elif kind == "other":
        changed = bytearray(draw.choice(others))
    elif kind == "empty":
        changed = bytearray()
    elif kind == "gone":
        del changed[at : at + draw.choice((1, 8, 100))]
    elif kind == "twice":
        changed *= 2
    else:
        changed[:8] = draw.randbytes(8)
    return f"{kind} at {at} of {size}", bytes(changed)


def outcome(source: pathlib.Path, bad_records: str, cache: pathlib.Path) -> str:
    """The error's status and line, or the number of tokens; the class of an error that is none of
    the project's."""
    from jaxtrain.config import ConfigError, DataConfig
    from jaxtrain.data.preparing.prepare import prepare
    from jaxtrain.run.exit_status import RunError

    data = DataConfig(source=str(source), cache=str(cache), bad_records=bad_records)
    signal.alarm(SECONDS)  # ends the process: what hangs is the last line
    try:
        corpus = prepare(data, 257, progress=False)
        corpus.train.read(corpus.tokens, 0, len(corpus.train))
        return f"{len(corpus.tokens)} tokens"
    except RunError as error:
        return f"{int(error.status)} {error}"
    except ConfigError as error:
        return f"2 {error}"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        shutil.rmtree(cache, ignore_errors=True)


def main(folder: pathlib.Path, seed: int, count: int) -> None:
    os.fsync = lambda file: None  # what is prepared here is thrown away
    whole, cache = folder / "whole", folder / "cache"
    whole.mkdir()
    sources = write_files(whole)
    for name in sources:  # libraries are loaded, and what is not damaged is read
        if not name.endswith(".idx"):
            print(json.dumps([name, "none", "stop", outcome(whole / name, "stop", cache)]))
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + GIGABYTE, resource.RLIM_INFINITY))
    draw = random.Random(seed)
    contents = [path.read_bytes() for path in sources.values() if path.is_file()]
    names = itertools.islice(itertools.cycle(sorted(sources)), count)
    for i, name in enumerate(names):
        place = folder / str(i)
        place.mkdir()
        for path in sources[name].parent.glob("pair.*") if "pair" in name else [sources[name]]:
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, place / path.name)
        inside = sorted(path for path in place.rglob("*") if path.is_file())
        target = place / name if "." in name else draw.choice(inside)
        what, content = damaged(target.read_bytes(), draw, contents)
        target.write_bytes(content)
        for bad_records in ("stop", "skip"):
            said = [f"{i} {target.relative_to(place)}", what, bad_records]
            print(json.dumps(said), flush=True)
            print(json.dumps([*said, outcome(place / name, bad_records, cache)]), flush=True)
        shutil.rmtree(place)
    # getrusage's would be that of the process which has started this one, if it was larger
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    print(json.dumps(["peak", "", "", f"{peak} bytes"]))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
