"""Batches: the same sequences at the same places whatever the mesh, the processes, the microbatches
and the threads."""

import json
import socket
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.groups.mixture_settings import MixtureSource
from jaxtrain.config.phases import Span
from jaxtrain.data import document_packing
from jaxtrain.data.batches import HeldOutBatches, TrainingBatches
from jaxtrain.data.corpora import Corpora, ValidationSet
from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.loader import Feed, Loader
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.row_log import RowLog, check_rows, read_rows
from jaxtrain.data.tokenizer import DataError

BATCH, LENGTH = 8, 8
SPEC = PartitionSpec(None, ("replica", "data"), "context")


@pytest.fixture
def corpus(config, write):
    rng = np.random.default_rng(0)
    lines = [
        {
            "q": "q" * int(rng.integers(0, 5)),
            "text": "".join(rng.choice(list("abcdefgh "), rng.integers(1, 40))),
        }
        for _ in range(60)
    ]
    path = write("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return prepare(
        config(source=path, text_fields=("q", "text"), loss_mask=("q",)), 257, progress=False
    )


def sharding(replica=1, data=1, context=1, model=1, spec=SPEC):
    n = replica * data * context * model
    devices = np.array(jax.devices()[:n]).reshape(replica, data, context, model)
    return NamedSharding(jax.sharding.Mesh(devices, ("replica", "data", "context", "model")), spec)


def load(corpus, data, split, sharding, microbatches=1, batches=None, **options):
    """The loader of one split of a corpus."""
    if split == "train":
        span = Span("", 0, 10**6, data.batch_size, data.sequence_length, (1.0,), 0, 0)
        content = TrainingBatches(Corpora((MixtureSource("", data),), (corpus,)), [span])
    else:
        held_out = ValidationSet(MixtureSource("", data), corpus, corpus.validation)
        content = HeldOutBatches("", held_out, data, batches)
    return Loader(content, sharding, microbatches, prefetch=data.prefetch, **options)


def index(loader, i):
    """The sequence at place i of all batches."""
    return loader.content.draw(i // BATCH, i % BATCH).number


def epoch_of(loader):
    """The number of sequences in an epoch."""
    return len(loader.content.draw(0, 0).sequences)


def flat(batch):
    """Sequences in their global order, [B, T] each."""
    return {name: np.asarray(array).reshape(BATCH, LENGTH) for name, array in batch.items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


LAYOUTS = [
    {"data": 8},
    {"replica": 2, "data": 2, "model": 2},
    {"data": 2, "context": 4},
    {"model": 8},
    {"replica": 2, "context": 2, "data": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("across", [True, False])
def test_mesh_changes_nothing(config, corpus, layout, across):
    data = config(attend_across_documents=across)
    with (
        load(corpus, data, "train", sharding()) as one,
        load(corpus, data, "train", sharding(**layout)) as many,
    ):
        for step in (0, 1, 30):
            batch = many.batch(step)
            assert (
                batch["tokens"].sharding == sharding(**layout) and batch["tokens"].dtype == np.int32
            )
            same(flat(batch), flat(one.batch(step)))
            assert ("segments" in batch) == (not across)


@pytest.mark.parametrize(
    ("microbatches", "layout"),
    [(2, {"data": 4}), (4, {"data": 2, "context": 2}), (8, {"model": 4}), (1, {"data": 2})],
)
def test_microbatches_cut_the_batch_in_order(config, corpus, microbatches, layout):
    with (
        load(corpus, config(), "train", sharding()) as one,
        load(corpus, config(), "train", sharding(**layout), microbatches) as many,
    ):
        batch = many.batch(3)
        assert (
            batch["tokens"].shape == (microbatches, BATCH // microbatches, LENGTH) == many.shape()
        )
        same(flat(batch), flat(one.batch(3)))
        for i in range(BATCH):
            place = (i // (BATCH // microbatches), i % (BATCH // microbatches))
            np.testing.assert_array_equal(
                np.asarray(batch["targets"])[place], flat(one.batch(3))["targets"][i]
            )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_replicas_that_train_apart_have_sequences_of_their_own(config, corpus, microbatches):
    """The same ones whatever the microbatches, in order."""
    layout = sharding(replica=2, data=2)
    with (
        load(corpus, config(), "train", sharding()) as one,
        load(corpus, config(), "train", layout, microbatches, independent_replicas=2) as many,
    ):
        wanted, got = flat(one.batch(3)), many.batch(3)
        for replica in range(2):
            parts = {
                k: np.asarray(a)
                .reshape(microbatches, 2, -1, LENGTH)[:, replica]
                .reshape(-1, LENGTH)
                for k, a in got.items()
            }
            same(parts, {k: a.reshape(2, -1, LENGTH)[replica] for k, a in wanted.items()})


def test_sharded_over_microbatches_too(config, corpus):
    spread = sharding(replica=2, data=2, context=2, spec=PartitionSpec("replica", "data"))
    with (
        load(corpus, config(), "train", sharding()) as one,
        load(corpus, config(), "train", spread, 4) as many,
    ):
        same(flat(many.batch(5)), flat(one.batch(5)))


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_threads_change_nothing(config, corpus, prefetch, monkeypatch):
    with load(corpus, config(), "train", sharding()) as reference:
        expected = [flat(reference.batch(step)) for step in range(12)]
    read = Sequences.ranges

    def uneven(sequences, r):
        time.sleep(0.003 * (r % 3))
        return read(sequences, r)

    monkeypatch.setattr(Sequences, "ranges", uneven)
    with load(corpus, config(prefetch=prefetch), "train", sharding(data=2)) as loader:
        for batch, sequences in zip(loader.iterate(0, 12), expected, strict=True):
            same(flat(batch), sequences)


def test_resuming_is_continuing(config, corpus):
    with load(corpus, config(), "train", sharding()) as loader:
        whole = [flat(batch) for batch in loader.iterate(0, 40)]
    with load(corpus, config(), "train", sharding(data=4), 2) as loader:
        for sequences, batch in zip(whole[17:], loader.iterate(17, 40), strict=True):
            same(flat(batch), sequences)


def order_of(corpus, data, steps):
    """The sequences of the split that steps are made of, found by content."""
    sequences = Sequences(corpus, corpus.train, LENGTH)
    index = {
        sequences[r]["tokens"].tobytes() + sequences[r]["targets"].tobytes(): r
        for r in range(len(sequences))
    }
    assert len(index) == len(sequences)
    with load(corpus, data, "train", sharding()) as loader:
        batches = [flat(loader.batch(step)) for step in range(steps)]
    return [
        index[batch["tokens"][i].tobytes() + batch["targets"][i].tobytes()]
        for batch in batches
        for i in range(BATCH)
    ], len(sequences)


def test_an_epoch_has_every_sequence_once_in_a_new_order(config, corpus):
    order, n = order_of(corpus, config(), 60)
    epochs = [order[i * n : (i + 1) * n] for i in range(len(order) // n)]
    assert len(epochs) >= 2
    for epoch in epochs:
        assert sorted(epoch) == list(range(n)) and epoch != sorted(epoch)
    assert epochs[0] != epochs[1]


def test_seed_decides_the_order(config, corpus):
    orders = [order_of(corpus, config(seed=seed), 60) for seed in (0, 1, 0, -3, 2**40)]
    assert orders[0] == orders[2]
    n = orders[0][1]
    firsts = [tuple(order[:n]) for order, _ in orders]
    assert len(set(firsts)) == 4
    # Neighbouring seeds must not be one another's epochs.
    assert orders[0][0][n : 2 * n] != orders[1][0][:n]


def test_golden_order(config, write):
    """A run that goes on must read on where it was: this order may never change."""
    corpus = prepare(
        config(source=write("a.txt", "0123456789" * 40), validation_fraction=0.0),
        257,
        progress=False,
    )
    with load(corpus, config(), "train", sharding()) as loader:
        assert [index(loader, i) for i in range(BATCH)] == [32, 30, 10, 0, 1, 29, 38, 17]
        assert [index(loader, 10**9 + i) for i in range(BATCH)] == [20, 37, 31, 32, 22, 15, 41, 18]


def test_each_sequence_is_read_once(config, corpus, monkeypatch):
    read, seen = Sequences.ranges, []
    monkeypatch.setattr(
        Sequences, "ranges", lambda sequences, r: seen.append(r) or read(sequences, r)
    )
    with load(
        corpus,
        config(attend_across_documents=False),
        "train",
        sharding(data=2, context=2, model=2),
        2,
    ) as loader:
        loader.batch(0)
    assert len(seen) == len(set(seen)) == BATCH


def test_only_the_sequences_of_this_process(config, corpus, monkeypatch):
    """As on process 1 of 2, whose devices are the second half."""
    whole = sharding(data=4, context=2)
    mine = {
        device: index
        for device, index in whole.addressable_devices_indices_map((2, 4, LENGTH)).items()
        if device.id >= 4
    }
    read, seen = Sequences.ranges, []
    with load(corpus, config(), "train", whole, 2) as loader:
        everything = [r for i in range(BATCH) for r in [index(loader, i)]]
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda *_: mine)
    with load(corpus, config(), "train", whole, 2) as loader:
        monkeypatch.setattr(
            Sequences, "ranges", lambda sequences, r: seen.append(r) or read(sequences, r)
        )
        monkeypatch.setattr(
            jax,
            "make_array_from_callback",
            lambda shape, sharding, block: [block(index) for index in mine.values()],
        )
        loader.batch(0)
    assert seen == [everything[i] for i in (2, 3, 6, 7)]  # sequences 2, 3 of each microbatch of 4


def test_another_number_of_processes_neither_repeats_nor_skips_a_sequence(
    config, corpus, monkeypatch, tmp_path
):
    """4, 2, 1 and again 4 of them, with batches that are taken twice as after a kill: what each has
    read makes whole batches, and every epoch has each sequence once."""
    whole, devices_of = sharding(data=8), NamedSharding.addressable_devices_indices_map
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, block: None)
    for start, stop, processes in ((0, 14, 4), (12, 26, 2), (25, 34, 1), (32, 44, 4)):
        for process in range(processes):
            mine = range(8 * process // processes, 8 * (process + 1) // processes)
            own = lambda s, shape, mine=mine: {
                device: index for device, index in devices_of(s, shape).items() if device.id in mine
            }
            monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", own)
            with load(
                corpus, config(), "train", whole, log=RowLog(tmp_path, process, processes)
            ) as loader:
                assert len([*loader.iterate(start, stop)]) == stop - start
    found = read_rows(tmp_path)
    assert check_rows(tmp_path)[""].sequences == 44 * BATCH
    assert [*found] == list(range(44)) and all(
        sequences.keys() == set(range(BATCH)) for sequences in found.values()
    )
    order = [sequences[place].number for sequences in found.values() for place in range(BATCH)]
    assert order == [index(loader, i) for i in range(44 * BATCH)] and 2 * epoch_of(loader) < len(
        order
    )
    for epoch in range(2):
        assert sorted(order[epoch * epoch_of(loader) : (epoch + 1) * epoch_of(loader)]) == list(
            range(epoch_of(loader))
        )


def test_the_log_proves_a_mixture_over_changes(config, write, monkeypatch, tmp_path):
    """8, 4 and 2 processes, batches that are taken twice, other weights, batch sizes and lengths in
    the middle of epochs: the files alone show that nothing is repeated or passed over."""
    sources = []
    for name, documents in (("web", 150), ("code", 60)):
        path = write(f"{name}.txt", "".join(chr(97 + i * i % 26) for i in range(documents * 9)))
        data = config(source=path, validation_fraction=0.0)
        sources.append((MixtureSource(name, data), prepare(data, 257, progress=False)))
    corpora = Corpora(*zip(*sources, strict=True))
    spans = [
        Span("", 0, 20, 8, 8, (0.7, 0.3), 0, 0),
        Span("weights", 20, 45, 8, 8, (0.4, 0.6), 160, 1280),
        Span("size", 45, 60, 16, 8, (0.4, 0.6), 360, 2880),
        Span("length", 60, 110, 16, 16, (0.4, 0.6), 600, 4800),
    ]
    whole, devices_of = sharding(data=8), NamedSharding.addressable_devices_indices_map
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, block: None)
    for start, stop, processes in ((0, 30, 8), (27, 66, 4), (66, 110, 2)):
        for process in range(processes):
            mine = range(8 * process // processes, 8 * (process + 1) // processes)
            own = lambda s, shape, mine=mine: {
                device: index for device, index in devices_of(s, shape).items() if device.id in mine
            }
            monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", own)
            log = RowLog(tmp_path, process, processes)
            with Loader(TrainingBatches(corpora, spans), whole, prefetch=0, log=log) as loader:
                assert len([*loader.iterate(start, stop)]) == stop - start
    checked = check_rows(tmp_path)
    assert sum(read.sequences for read in checked.values()) == 600 + 50 * 16
    assert checked["web"].epochs >= 4 and checked["code"].epochs >= 10
    assert sum(read.tokens for read in checked.values()) <= 4800 + 50 * 16 * 16


PROCESS = """
import sys, types
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
process, port, source, cache = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, process)
import numpy as np
from jaxtrain.config.groups.mixture_settings import MixtureSource
from jaxtrain.config.phases import Span
from jaxtrain.data import document_packing, loader
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.corpora import Corpora
from jaxtrain.data.preparing import prepare as tokens
data = types.SimpleNamespace(
    source=source, tokenizer="bytes", sequence_length=8, batch_size=8, seed=0,
    attend_across_documents=True, prefetch=2, loss_mask=("q",), text_fields=("q", "text"),
    validation_fraction=0.1, bad_records="stop", token_dtype="uint16", cache=cache, filter="",
    duplicates="keep",
)
corpus = tokens.prepare(data, 257, progress=False)
read, seen = document_packing.Sequences.ranges, []
document_packing.Sequences.ranges = lambda sequences, r: seen.append(r) or read(sequences, r)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
corpora = Corpora((MixtureSource("", data),), (corpus,))
span = Span("", 0, 10, 8, 8, (1.0,), 0, 0)
with loader.Loader(TrainingBatches(corpora, [span]), sharding, 2) as batches:
    total = np.zeros((2, 4, 8), np.int64)
    for batch in batches.iterate(3, 5):
        for shard in batch["targets"].addressable_shards:
            total[shard.index] = np.asarray(shard.data)
        print(len(seen), total.tolist())
"""


@pytest.mark.full
def test_two_processes(config, corpus, tmp_path, start_python):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        start_python(PROCESS, i, port, corpus.source, tmp_path / "cache") for i in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (
        [line for line in out.splitlines() if line[:1].isdigit()] for out, _ in outputs
    )
    assert len(first) == len(second) == 2
    halves = [[json.loads(line.split(" ", 1)[1]) for line in lines] for lines in (first, second)]
    with load(corpus, config(), "train", sharding(), 2) as loader:
        for step, mine, theirs in zip((3, 4), *halves, strict=True):
            expected = np.asarray(loader.batch(step)["targets"])
            np.testing.assert_array_equal(np.array(mine)[:, :2], expected[:, :2])
            np.testing.assert_array_equal(np.array(theirs)[:, 2:], expected[:, 2:])
            assert not np.array(mine)[:, 2:].any() and not np.array(theirs)[:, :2].any()
    # sequences read by then: its half of both steps
    assert [int(lines[-1].split(" ", 1)[0]) for lines in (first, second)] == [8, 8]


# ---- validation


@pytest.mark.parametrize(
    "layout", [{}, {"data": 8}, {"data": 2, "context": 2, "model": 2}], ids=str
)
def test_validation_is_read_once_in_order(config, corpus, layout):
    sequences = Sequences(corpus, corpus.validation, LENGTH, padded=True)
    with load(corpus, config(), "validation", sharding(**layout)) as loader:
        assert loader.content.batches == -(-len(sequences) // BATCH) and len(sequences) % BATCH
        batches = [flat(batch) for batch in loader.iterate()]
        again = [flat(batch) for batch in loader.iterate()]
    assert len(batches) == loader.content.batches
    for step, batch in enumerate(batches):
        same(batch, again[step])
        for i in range(BATCH):
            r = step * BATCH + i
            same(
                {name: array[i] for name, array in batch.items()},
                sequences[r] if r < len(sequences) else sequences.read([]),
            )
    counted = sum(batch["weights"].sum() for batch in batches)
    assert (
        counted == corpus.validation.read(np.asarray(corpus.mask), 1, len(corpus.validation)).sum()
    )
    with pytest.raises(IndexError):
        loader.batch(loader.content.batches)


def test_part_of_the_validation_split(config, corpus):
    sequences = Sequences(corpus, corpus.validation, LENGTH, padded=True)
    with load(corpus, config(), "validation", sharding(data=2), batches=1) as loader:
        batches = [flat(batch) for batch in loader.iterate()]
    assert len(batches) == 1
    index = {sequences[r]["tokens"].tobytes(): r for r in range(len(sequences))}
    found = [index[sequence.tobytes()] for sequence in batches[0]["tokens"]]
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] >= len(sequences) * 3 // 4
    with load(corpus, config(), "validation", sharding(), batches=10**6) as loader:
        assert loader.content.batches == -(-len(sequences) // BATCH)


def test_validation_smaller_than_a_sequence(config, write):
    corpus = prepare(
        config(source=write("a.txt", "abcdefghijklmnopqrstuvwxyz" * 2)), 257, progress=False
    )
    assert len(corpus.validation) == 5
    with load(corpus, config(), "validation", sharding(data=2), 2) as loader:
        (batch,) = [flat(batch) for batch in loader.iterate()]
    assert batch["weights"].sum() == 4 and batch["weights"][0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    corpus = prepare(config(source=corpus.source, validation_fraction=0.0), 257, progress=False)
    with load(corpus, config(), "validation", sharding()) as loader:
        assert loader.content.batches == 0 and list(loader.iterate()) == []


# ---- errors, threads, the rest


def test_too_little_text(config, write):
    corpus = prepare(
        config(source=write("a.txt", "abcdefg"), validation_fraction=0.0), 257, progress=False
    )
    with load(corpus, config(), "train", sharding()) as loader:  # 8 tokens, and 9 are needed
        few = (
            "data.source: its train split has 8 tokens, and data.sequence_length=8 takes 9: its "
            "documents repeat within a sequence"
        )
        assert epoch_of(loader) == 1 and loader.content.remarks() == [few]
        for batch in loader.iterate(5, 7):
            assert flat(batch)["tokens"].tolist() == [[*b"abcdefg", 256]] * BATCH
            assert flat(batch)["targets"].tolist() == [[*b"bcdefg", 256, 97]] * BATCH
    with load(corpus, config(sequence_length=7), "train", sharding()) as loader:
        few = (
            "data.source: its train split has 8 tokens, which are 1 sequence of 7, and "
            "data.batch_size=8: they repeat within a batch"
        )
        assert epoch_of(loader) == 1 and loader.content.remarks() == [few]
        list(loader.iterate(0, 2))
    with load(corpus, config(sequence_length=7, batch_size=1), "train", sharding()) as loader:
        assert not loader.content.remarks()
    with load(corpus, config(), "validation", sharding()) as loader:
        assert loader.content.remarks() == [
            "corpus: the validation split has 0 tokens: there is nothing to evaluate on"
        ]


def test_sequences_fewer_than_a_batch_repeat_evenly(config, write):
    """Sequence i of step t depends on seed, t and i, whatever the mesh; each sequence comes equally
    often."""
    corpus = prepare(
        config(source=write("a.txt", "".join(map(chr, range(32, 59)))), validation_fraction=0.0),
        257,
        progress=False,
    )
    with (
        load(corpus, config(), "train", sharding()) as one,
        load(corpus, config(), "train", sharding(data=4), 2) as many,
    ):
        assert epoch_of(one) == 3 and len(one.content.remarks()) == 1
        whole = [flat(batch) for batch in one.iterate(0, 6)]
        for sequences, batch in zip(whole[3:], many.iterate(3, 6), strict=True):
            same(flat(batch), sequences)
    counts = [
        sum(sequence[0] == first for sequences in whole[:3] for sequence in sequences["tokens"])
        for first in (32, 40, 48)
    ]
    assert counts == [8, 8, 8]


def test_nothing_left_to_train_on(config, tmp_path):
    np.save(tmp_path / "a.npy", np.array([5], np.uint16))
    corpus = prepare(
        config(source=tmp_path / "a.npy", tokenizer="none", validation_fraction=0.9),
        10,
        progress=False,
    )
    with pytest.raises(
        DataError,
        match=r"^data.validation_fraction=0.9 holds out all of the 1 tokens of .*: use "
        r"--config.data.validation_f",
    ):
        load(corpus, config(validation_fraction=0.9), "train", sharding())
    corpus = prepare(
        config(source=tmp_path / "a.npy", tokenizer="none", validation_fraction=0.0),
        10,
        progress=False,
    )
    with load(corpus, config(), "train", sharding()) as loader:
        assert (flat(loader.batch(0))["tokens"] == 5).all()


def test_a_token_file_that_changed_unseen(config, tmp_path):
    """While it is used: the ids are looked at as they are read."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(200, dtype=np.uint16) % 10)
    corpus = prepare(config(source=path, tokenizer="none"), 10, progress=False)
    np.save(path, np.full(200, 10, np.uint16))
    for split in ("train", "validation"):
        with (
            load(corpus, config(), split, sharding()) as loader,
            pytest.raises(DataError, match="token 10 is beyond the 10 ids"),
        ):
            list(loader.iterate(0, 1))


def test_wrong_arguments(config, corpus):
    with pytest.raises(ValueError, match="3 microbatches do not divide data.batch_size=8"):
        load(corpus, config(), "train", sharding(), 3)


def threads():
    """The threads of loaders; those that ask stores are there for the whole process."""
    names = ("jaxtrain-batches", "jaxtrain-encode")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_errors_surface_at_their_batch(config, corpus, monkeypatch, prefetch):
    read, count = Sequences.ranges, []

    def failing(sequences, r):
        count.append(r)
        if r == bad:
            raise OSError("the disk is gone")
        return read(sequences, r)

    with load(corpus, config(prefetch=prefetch), "train", sharding()) as loader:
        bad = index(loader, 2 * BATCH + 3)
        monkeypatch.setattr(document_packing.Sequences, "ranges", failing)
        batches = loader.iterate(0)
        next(batches), next(batches)
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
        assert next(batches, None) is None
    assert not threads()


def test_threads_end(config, corpus):
    with load(corpus, config(prefetch=4), "train", sharding()) as loader:
        for _, _batch in zip(range(3), loader.iterate(), strict=False):
            assert 1 <= len(threads()) <= 4
    assert not threads()
    with pytest.raises(RuntimeError):
        next(loader.iterate())


def test_reads_ahead_while_a_batch_is_used(config, corpus, monkeypatch):
    made = []
    read = Loader.read
    monkeypatch.setattr(
        Loader, "read", lambda loader, number: made.append(number) or read(loader, number)
    )
    with load(corpus, config(prefetch=3), "train", sharding()) as loader:
        batches = loader.iterate(5)
        next(batches)
        deadline = time.monotonic() + 30
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(made) == [5, 6, 7, 8]


def test_no_hidden_transfers(config, corpus):
    with (
        jax.transfer_guard("disallow"),
        load(corpus, config(), "train", sharding(data=4), 2) as loader,
    ):
        loader.batch(0)


def test_shapes_types_and_shardings(config, corpus):
    for across in (True, False):
        with load(
            corpus, config(attend_across_documents=across), "train", sharding(data=4), 2
        ) as loader:
            types = {} if across else {"segments": np.int32, "positions": np.int32}
            types |= {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
            batch = loader.batch(0)
            assert {name: array.dtype for name, array in batch.items()} == types
            for array in batch.values():
                assert (array.shape, array.sharding) == (loader.shape(), sharding(data=4))


def test_a_feed_jumps(config, corpus):
    with load(corpus, config(), "train", sharding()) as loader:
        feed, batches = Feed(loader, 2, 3), [flat(loader.batch(number)) for number in range(12)]
        same(flat(feed.next()), batches[2])
        assert feed.position == 3
        feed.jump(9, 2)
        for number in (9, 10):
            assert feed.position == number
            same(flat(feed.next()), batches[number])
        with pytest.raises(StopIteration):
            feed.next()


def test_a_batch_in_words_names_its_sequences(config, corpus):
    order, n = order_of(corpus, config(), 40)
    with load(corpus, config(), "train", sharding()) as loader:
        step = n // BATCH + 2
        sequences = ", ".join(map(str, order[step * BATCH : (step + 1) * BATCH]))
        assert loader.content.describe(step).startswith(
            f"batch {step}: epoch 1, sequences {sequences} of the {n} of the train split of "
            f"{corpus.source} (checksum "
        )
