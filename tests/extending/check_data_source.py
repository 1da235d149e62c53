"""Documents of TSV files: compressed ones, by a pattern, a bad record; and what help says."""

import gzip
import pathlib
import tempfile

from jaxtrain.config.groups.formats import HELP
from jaxtrain.config.sources import find
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.reading.documents import pieces

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a.tsv").write_text("id\ttext\n1\tone\n2\n")
(folder / "b.tsv.gz").write_bytes(gzip.compress(b"text\ttwo\nthree\t3\n"))
for name in (folder, folder / "*.tsv*"):
    source = find(str(name))
    assert source.has_fields and "read 1 .tsv, 1 .tsv.gz" in source.lines()[0]
    skipped = Skipped()
    documents = [piece.text for piece in pieces(source, ("text",), (), folder, skipped)]
    assert documents == ["one", "three"] and skipped.count == 1
assert "JSONL, TSV, Parquet" in HELP
