"""Compressed files: the same bytes as before they were compressed, by content and not by name, and
an error for what is damaged."""

import bz2
import gc
import gzip
import lzma
import struct
import sys

import pyarrow
import pytest

from jaxtrain.config.groups.formats import COMPRESSIONS
from jaxtrain.data.reading import compressed
from jaxtrain.data.reading.bad_records import BadRecord
from jaxtrain.data.reading.compressed import Reader

TEXT = "".join(f"line {i} of naïve 漢字\r\n" for i in range(3000)).encode()


def zstd(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


COMPRESS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd}
KINDS = pytest.mark.parametrize("kind", COMPRESS)


def content(path, size=-1):
    with Reader(str(path)) as stream:
        return stream.read(size)


def failure(path):
    with pytest.raises(BadRecord) as caught:
        content(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@KINDS
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_what_was_compressed_comes_back(write, monkeypatch, kind, block):
    text = TEXT if block > 1 else TEXT[:200]
    monkeypatch.setattr(compressed, "BLOCK", block)
    for name in ("a.any", "b.txt", "c.gz"):  # the name is no matter
        path = write(name, COMPRESS[kind](text))
        assert content(path) == text and compressed.is_compressed(str(path))
    with Reader(str(path)) as stream:
        assert list(stream) == text.splitlines(keepends=True)
        assert stream.taken() == path.stat().st_size and stream.taken() == 0


@KINDS
def test_several_streams_one_after_the_other(write, monkeypatch, kind):
    parts = [TEXT[i : i + 999] for i in range(0, len(TEXT), 999)] + [b"", b"end"]
    path = write("a", b"".join(map(COMPRESS[kind], parts)))
    assert content(path) == TEXT + b"end"
    monkeypatch.setattr(compressed, "BLOCK", 7)
    assert content(path) == TEXT + b"end"


def test_padding_and_skippable_frames(write):
    assert (
        content(
            write("a.gz", gzip.compress(b"a") + b"\0" * 3_000_000 + gzip.compress(b"b") + b"\0" * 5)
        )
        == b"ab"
    )
    frame = struct.pack("<II", 0x184D2A50, 4) + b"1234"
    assert content(write("a.zst", frame + zstd(b"a") + frame + zstd(b"b"))) == b"ab"


def test_a_file_that_is_gone(tmp_path, monkeypatch):
    """One error, and none behind it from what was half made."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(FileNotFoundError):
        Reader(str(tmp_path / "gone"))
    gc.collect()
    assert not ignored


def test_nothing_compressed(write):
    for kind in COMPRESS:
        assert content(write("a", COMPRESS[kind](b""))) == b""
    assert content(write("b.gz", b"")) == b""


def test_what_is_not_compressed_is_read_as_it_is(write):
    for name in ("a.txt", "a.txt.gz", "a.zst", "a.bz2"):
        path = write(name, b"BZh9 plain text\n")
        assert content(path) == b"BZh9 plain text\n" and not compressed.is_compressed(str(path))
    assert failure(write("b.gz", b"\x1f\0\0\0 no header")).startswith(
        "does not begin as a gzip file does"
    )


@KINDS
@pytest.mark.parametrize("left", [0.02, 0.5, 0.999])
def test_cut_short(write, kind, left):
    whole = COMPRESS[kind](TEXT)
    cut = whole[: int(len(whole) * left)]
    message = failure(write("a", cut))
    assert (
        message.startswith(f"damaged or cut short: its {kind} content ends after ")
        and f" at byte {len(cut):,} of {len(cut):,} (" in message
    )


@KINDS
def test_cut_in_the_first_bytes(write, kind):
    """By its name it is none of another kind: the bytes that are left are no text."""
    whole = COMPRESS[kind](TEXT)
    magic = {"gzip": 2, "zstd": 4, "xz": 6, "bzip2": 10}[kind]
    suffix = next(suffix for suffix, name in COMPRESSIONS.items() if name == kind)
    for cut in range(1, 40):
        assert "cut short" in failure(write(f"a{suffix}", whole[:cut])), cut
        if cut >= magic:
            assert "cut short" in failure(write("a.txt", whole[:cut])), cut
    assert content(write("a.txt", whole[: magic - 1])) == whole[: magic - 1]


def zstd_frame(window=None, checksum=b""):
    """A frame of "abc" and an empty last block, by RFC 8878; with its content's size, or its
    window's descriptor and no size."""
    descriptor = 0x20 * (window is None) | 0x04 * bool(checksum)
    header = struct.pack("<IBB", 0xFD2FB528, descriptor, 3 if window is None else window)
    return header + (3 << 3).to_bytes(3, "little") + b"abc" + b"\x01\0\0" + checksum


def test_zstd_frames_of_all_sorts(write):
    """Without the size of their content, with windows of 1 KiB to 128 MiB, and those that need
    more."""
    whole = zstd_frame()
    assert content(write("a.zst", whole)) == b"abc"
    for window in (0x00, 0x50, 0x88):
        assert content(write("a.zst", zstd_frame(window) + whole)) == b"abcabc"
    for window in (0x90, 0xA8, 0xFF):
        message = failure(write("a.zst", whole + zstd_frame(window)))
        assert (
            "needs more than 128 MiB of memory to be decompressed" in message
            and "--long=27" in message
        )
    assert "checksum" in failure(write("a.zst", zstd_frame(checksum=b"\0\0\0\0")))


@KINDS
def test_damaged(write, kind):
    """In a second stream, so that there is something before it; and where something else stands
    behind."""
    whole = bytearray(COMPRESS[kind](TEXT))
    # pyarrow's zstd has no checksum of the content
    for at in (1, len(whole) // 2) if kind != "zstd" else (1,):
        second = bytearray(whole)
        second[at] ^= 0xFF
        assert "damaged or cut short" in failure(write("a", bytes(whole + second)))
    assert "damaged or cut short" in failure(write("b", bytes(whole) + b"something else"))


def test_what_comes_before_the_damage_is_read(write):
    path = write("a", gzip.compress(TEXT)[:-8])
    lines = []
    with (
        pytest.raises(BadRecord, match=f"ends after {len(TEXT):,} bytes of text"),
        Reader(str(path)) as stream,
    ):
        lines += iter(stream)
    path = write("a", gzip.compress(TEXT) + gzip.compress(TEXT)[:-100])
    with pytest.raises(BadRecord), Reader(str(path)) as stream:
        for line in stream:
            lines.append(line)
    assert len(lines) >= 3000


def test_nothing_is_whole_in_memory(write):
    """A gigabyte of zeros in a megabyte: what is asked for is decompressed, and little more."""
    import tracemalloc

    path = write("a.gz", gzip.compress(b"\0" * (64 << 20), 1) * 16)
    tracemalloc.start()
    with Reader(str(path)) as stream:
        count = sum(len(stream.read(1 << 20)) for _ in range(100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 100 << 20 and peak < 16 << 20


def test_archives(write, tmp_path):
    import tarfile
    import zipfile

    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(write("member.txt", TEXT))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("member.txt", TEXT)
    assert failure(tmp_path / "a.tar.gz").startswith("a tar archive, not a text: unpack it")
    assert failure(tmp_path / "a.zip").startswith("a zip archive, not a text: unpack it")
