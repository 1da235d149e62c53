"""Documents of a TSV file, also of a compressed one, and a bad record."""

import gzip
import pathlib
import tempfile

from jaxtrain.data.sources import find, pieces

from jaxtrain.data.bad_records import Skipped

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a.tsv").write_text("id\ttext\n1\tone\n2\n")
(folder / "b.tsv.gz").write_bytes(gzip.compress(b"text\ttwo\nthree\t3\n"))
skipped = Skipped()
documents = [piece.text for piece in pieces(find(str(folder)), ("text",), (), folder, skipped)]
assert documents == ["one", "three"] and skipped.count == 1
