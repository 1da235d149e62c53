"""Token files: several as one corpus, Megatron's pairs, and what is said of damaged ones."""

import itertools
import os
import resource
import struct

import numpy as np
import pytest
from support.token_files import write_pair

from jaxtrain.data.corpus import bigram_entropy
from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.preparing import index_tokens
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.reading import megatron_index
from jaxtrain.data.reading.joined import Joined, parts_of
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run.exit_status import ExitStatus

END = 256


def documents_of(corpus):
    return [
        corpus.tokens[first:last].tolist()
        for first, last in itertools.pairwise(corpus.documents.tolist())
    ]


def failure(config, status=ExitStatus.BAD_CONFIG):
    with pytest.raises(DataError) as caught:
        prepare(config, 257, progress=False)
    assert "\n" not in str(caught.value) and caught.value.status == status
    return str(caught.value)


# ---- several files


@pytest.mark.parametrize("ending", ["bin", "npy", "bin.gz", "idx"])
def test_several_files_are_one_corpus(config, tmp_path, monkeypatch, ending):
    """The corpus, its splits, its sequences and its checksum are those of one file with all the
    ids; a document ends with each file."""
    import gzip

    monkeypatch.setattr(index_tokens, "CHUNK", 100)
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 257, n).astype("<u2") for n in (1, 250, 1000, 33)]
    for part in parts:
        part[-1] = END
    folder = tmp_path / "several"
    folder.mkdir()
    np.concatenate(parts).tofile(tmp_path / "one.bin")
    for i, part in enumerate(parts):
        if ending == "npy":
            np.save(folder / f"{i}.npy", part)
        elif ending == "idx":
            write_pair(folder / f"{i}", np.split(part, np.flatnonzero(part == END)[:-1] + 1))
        else:
            content = part.tobytes()
            (folder / f"{i}.{ending}").write_bytes(
                gzip.compress(content, mtime=0) if ending == "bin.gz" else content
            )
    options = {"validation_fraction": 0.2, "attend_across_documents": False}
    one = prepare(config(source=tmp_path / "one.bin", **options), 257, progress=False)
    joined = prepare(config(source=folder, **options), 257, progress=False)
    assert isinstance(joined.tokens, Joined) and len(parts_of(joined.tokens)) == 4
    assert not (joined.folder / "tokens.bin").exists()
    assert joined.checksum == one.checksum and documents_of(joined) == documents_of(one)
    assert bigram_entropy(joined) == bigram_entropy(one)
    for split in ("train", "validation"):
        ours, same = (Sequences(c, getattr(c, split), 50, False) for c in (joined, one))
        assert len(ours) == len(same)
        for s in range(len(same)):
            for name, array in same[s].items():
                assert np.array_equal(ours[s][name], array)
    again = prepare(config(source=folder, **options), 257, progress=False)
    assert again.folder == joined.folder
    joined.check_whole()
    path = parts_of(joined.tokens)[2].filename
    os.truncate(path, 500)
    with pytest.raises(DataError, match=f"^{path}: the file was cut short while it was in use"):
        joined.check_whole()


def test_more_files_than_may_be_open(config, tmp_path):
    (folder := tmp_path / "many").mkdir()
    for number in range(60):
        np.full(7, number, "<u2").tofile(folder / f"{number:02}.bin")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, limits[1]))
    try:
        corpus = prepare(config(source=folder), 257, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert corpus.tokens[410:].tolist() == [58] * 3 + [59] * 7 and len(corpus.documents) == 61


def test_slices_of_joined_arrays(tmp_path):
    parts, arrays = [np.arange(n, dtype="<u2") for n in (3, 1, 4)], []
    for i, part in enumerate(parts):
        part.tofile(tmp_path / f"{i}")
        arrays.append(np.memmap(tmp_path / f"{i}", "<u2", "r"))
    joined, whole = Joined(arrays), np.concatenate(parts)
    assert (len(joined), joined.nbytes, joined.dtype) == (8, 16, whole.dtype)
    for first, last in itertools.product((None, *range(-9, 10)), repeat=2):
        assert np.array_equal(joined[first:last], whole[first:last])
        assert joined[first:last].dtype == whole.dtype


def test_files_that_do_not_fit_together(config, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(9, dtype="<u2"))
    np.save(folder / "b.npy", np.arange(9, dtype="<u4"))
    assert failure(config(source=folder)).startswith(
        f"{folder}/b.npy: holds uint32 ids, and {folder}/a.npy uint16: the files of data.source="
    )
    np.save(folder / "b.npy", np.array([3, 999], "<u2"))
    assert failure(config(source=folder)).startswith(
        f"{folder}/b.npy: token 999 at position 1 is beyond the 257 ids"
    )


# ---- Megatron


@pytest.mark.parametrize("block", [2, 1 << 20])
def test_megatron_documents_are_those_of_the_index(config, tmp_path, monkeypatch, block):
    """No id ends them, they may have several sequences, and segments follow them. A document
    without tokens is left out, as a record without text is."""
    monkeypatch.setattr(megatron_index, "BLOCK", block)
    sequences = [[1, 2, 3], [END, 4], [], [5], [6, 7, 8, 9, END, END], [10]]
    for dtype, code in ((1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")):
        small = [[i % 128 for i in ids] for ids in sequences]
        path = write_pair(tmp_path / code, small, [0, 2, 2, 4, 5, 6], f"<{code}", dtype)
        options = {"attend_across_documents": False, "validation_fraction": 0.0}
        corpus = prepare(config(source=path, **options), 257, progress=False)
        assert corpus.tokens.dtype == f"<{code}" and corpus.tokens.filename == path
        assert documents_of(corpus) == [small[0] + small[1], [5], small[4], [10]]
    sequence = Sequences(corpus, corpus.train, 12, False)[0]
    assert sequence["segments"].tolist() == [1] * 5 + [2] + [3] * 6
    assert sequence["positions"].tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]
    assert sequence["weights"].tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0]


def damage_index(change):
    """A test's damage: change(bytes of the index) → its new bytes."""
    return lambda path: path.with_suffix(".idx").write_bytes(
        change(bytearray(path.with_suffix(".idx").read_bytes()))
    )


def patched(place, format, *values):
    def change(content):
        struct.pack_into(format, content, place, *values)
        return content

    return change


N = 34  # the place of the lengths; 5 sequences: pointers at 54, documents at 94
DAMAGE = {
    "empty": (damage_index(lambda b: b""), "a.idx:1: the file is empty"),
    "text": (damage_index(lambda b: b"hello, world\n" * 20), "begins with b'hello, wo'"),
    "cut": (damage_index(lambda b: b[:-1]), "141 bytes for 5 sequences and 6 bounds"),
    "cut in the header": (damage_index(lambda b: b[:20]), "not the index of a Megatron"),
    "longer": (damage_index(lambda b: b + b"x"), "cut short, damaged, or"),
    "modes": (damage_index(lambda b: b + b"\0" * 5), "cut short, damaged, or has images"),
    "version": (damage_index(patched(9, "<Q", 2)), "an index of version 2"),
    "floats": (damage_index(patched(17, "<B", 7)), "for ids of type 7"),
    "no type": (damage_index(patched(17, "<B", 99)), "for ids of type 99"),
    "wider": (damage_index(patched(17, "<B", 4)), "sequence 1 has 1 tokens from byte 6 on"),
    "2^63 sequences": (damage_index(patched(18, "<Q", 2**63)), "9,223,372,036,854,775,808 seq"),
    "2^63 bounds": (damage_index(patched(26, "<Q", 2**63)), "it is cut short, damaged, or"),
    "no sequences": (damage_index(patched(18, "<Q", 0)), "it is cut short, damaged, or"),
    "a negative length": (damage_index(patched(N, "<i", -1)), "sequence 0 has -1 tokens"),
    "a long length": (damage_index(patched(N + 8, "<i", 2**31 - 1)), "sequence 2 has 2,147,483,"),
    "a pointer outside": (damage_index(patched(62, "<q", 10**6)), "sequence 1 has 1 tokens from b"),
    "a negative pointer": (damage_index(patched(54, "<q", -2)), "sequence 0 has 3 tokens from"),
    "documents that go back": (damage_index(patched(102, "<q", 4)), "document 2 begins with seq"),
    "documents outside": (damage_index(patched(118, "<q", 2**62)), "document 3 begins with seq"),
    "a document at -2^63": (damage_index(patched(110, "<q", -(2**63))), "document 2 begins wit"),
    "a first document": (damage_index(patched(94, "<q", 1)), "document 0 begins with sequence 1"),
    "a last document": (damage_index(patched(134, "<q", 4)), "document 5 begins with sequence 4"),
    "a shorter .bin": (lambda path: os.truncate(path, 10), "sequence 3 has 1 tokens from byte 10"),
    "a longer .bin": (
        lambda path: path.write_bytes(path.read_bytes() + b"ab"),
        "sequence 4 has 2 tokens from byte 12 on, and the one before ends at byte 12 of the 18",
    ),
    "half an id": (lambda path: os.truncate(path, 11), "11 bytes are no whole number of tokens of"),
    "an empty .bin": (lambda path: os.truncate(path, 0), "the file is empty"),
    "an id too large": (lambda path: path.write_bytes(b"\xff" * 16), "token 65535 at position 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_pairs(config, tmp_path, name):
    """One line, which names the file and the sequence or the document."""
    path = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5], [6], [7, 8]])
    damage, says = DAMAGE[name]
    damage(path)
    message = failure(config(source=path))
    assert says in message and message.startswith(f"{tmp_path}/a.")
    assert not os.path.exists(config().cache)


def test_the_index_of_another_file(config, tmp_path):
    path = write_pair(tmp_path / "a", [[1, 2, 3], [4]])
    other = write_pair(tmp_path / "b", [[1, 2], [3, 4], [5]])
    os.rename(other.with_suffix(".idx"), path.with_suffix(".idx"))
    assert failure(config(source=path)).startswith(f"{tmp_path}/a.idx: sequence 2 has 1 tokens")


@pytest.mark.parametrize("size", [60, 64, 110])
def test_an_index_that_is_cut_short_while_it_is_read(config, tmp_path, monkeypatch, size):
    path = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5], [6], [7, 8]])
    read_header = megatron_index.read_header

    def read_and_cut(stream, index):
        header = read_header(stream, index)
        os.truncate(index, size)
        return header

    monkeypatch.setattr(megatron_index, "read_header", read_and_cut)
    assert "changed while it was read" in failure(config(source=path), ExitStatus.BAD_DATA)
