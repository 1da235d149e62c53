"""`jaxtrain page`: the file, what it has from runs in any state, of any length, within bounds; the
server, and both in a browser."""

import http.client
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from support import ROOT
from support.chromium import CHROMIUM, browser
from support.run_folders import ONE_DEVICE, write_run

from jaxtrain import load_recipe, replace
from jaxtrain.experiments.page import POINTS, PageServer, curve, main, page_data
from jaxtrain.experiments.run_folder import read_run

EVIL = '</script><script>document.title = "gone"</script><img src=x onerror="document.title=1">'


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose texts are not kind."""
    records = [
        {"step": 0, "wall_s": 1.0, "validation_loss": 5.0, "validation_loss/<i>": 5.1},
        *(
            {"step": i, "wall_s": 2.0 * i, "loss": 5 / i, "tokens": 64 * i, "tokens_per_s": 32.0}
            | {"grad_norm": 1.0, "learning_rate": 3e-4, "expert_load": 1.5, "mfu": 0.4}
            for i in range(1, 60)
        ),
        {"step": 40, "wall_s": 99.0, "rolled_back_from": 50, "why": EVIL},
        {"step": 59, "wall_s": 130.0, "validation_loss": 2.0, "validation_loss/<i>": 2.1},
        {"step": 59, "wall_s": 131.0, "evaluation/accuracy": 0.5},
    ]
    line = {"start": 1, "began": 1e9, "time": 1e9 + 10, "step": 59, "seconds": {"stepping": 10.0}}
    start = {"time": 1e9 + 1, "step": 30, "devices": EVIL, "changed": [EVIL], "processes": 2}
    start |= {"versions": {"jax": EVIL}, "memory": {"moments": 9, "moments on the host": 4}}
    start["compiled_memory"] = {"total": 20}
    settings = {"mesh.data": 1, "mesh.stage": 2, "mesh.model": 1, "train.sample_prompt": EVIL}
    return write_run(
        tmp_path / "<b>&$run",
        replace(load_recipe("tiny"), settings),
        metrics=[*records, '{"step": 60, "lo'],
        metrics__rolled_back=[{"step": 45, "wall_s": 95.0, "loss": 99.0}],
        goodput=[line],
        starts=[start],
        samples=[{"step": 59, "temperature": 0.8, "prompt": EVIL, "text": EVIL}],
    )


def data_in(text: str) -> dict:
    """The data of a page, as a browser reads them."""
    content = re.search('id="data">(.*?)</script>', text)[1]
    assert "<" not in content
    return json.loads(content, parse_constant=pytest.fail)


def test_the_file(run, tmp_path, capsys):
    assert main([str(run)]) in (0, None)
    assert re.fullmatch(rf"{re.escape(str(run))}/page.html: \d+ kB\n", capsys.readouterr().out)
    text = (run / "page.html").read_text()
    assert EVIL not in text and "<title>&lt;b&gt;&amp;$run</title>" in text
    assert len(re.findall("</script>", text)) == 3
    own = re.sub('id="data">.*', "", text)  # without the data, which are no addresses
    assert re.findall(r"\w+://[^\"' ]+", own) == ["http://www.w3.org/2000/svg"]
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'nonce-") and "connect" not in policy
    assert main([str(run), f"--out={tmp_path / 'other.html'}"]) in (0, None)
    assert (tmp_path / "other.html").stat().st_size > 20_000


def test_damaged_files(tmp_path, capsys):
    """Numbers that are not finite, and values of other kinds than a run writes, are no traceback;
    what cannot be shown is left out."""
    odd = [
        "5\n",
        "null\n",
        "[1]\n",
        '"text"\n',
        '{"time": NaN, "step": -Infinity, "text": 1e999}\n',
    ]
    line = {"start": 1, "began": 1.0, "time": 2.0, "step": 3, "seconds": {"stepping": 1.0}}
    lines = [line | {name: "x"} for name in line] + [line | {"seconds": {"stepping": None}}]
    lines += [line | {"began": math.nan}, {"start": 1}, line]
    points = [{"step": 1, "wall_s": "x", "loss": 1.0}, {"step": 2, "loss": 2.0}] * 500
    going_back = {"step": 1, "rolled_back_from": math.inf}
    write_run(
        tmp_path,
        metrics=[*odd, *points, going_back],
        goodput=[*odd, *lines],
        starts=odd,
        samples=odd,
    )
    assert main([str(tmp_path)]) in (0, None) and not capsys.readouterr().err
    data = data_in((tmp_path / "page.html").read_text())
    assert len(data["goodput"]) == 1 and data["rollbacks"][0]["rolled_back_from"] is None
    assert data["starts"] == data["samples"] == [{"time": None, "step": None, "text": None}]
    assert 0 < len(data["curves"]["loss"]) <= 802


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "page is about one folder, not 0: jaxtrain page RUN"),
        (["a", "b"], "page is about one folder, not 2: jaxtrain page RUN"),
        (["none"], "'none' is not the folder of a run: "),
        (["RUN", "--out=none/page.html"], "--out='none/page.html' cannot be written"),
        (["RUN/.."], "is not the folder of a run: "),
        (["linked"], "'linked' is not the folder of a run: [Errno 1] it is a link to "),
        (["other"], "'other' cannot be read: [Errno 1] it is a link to "),
        (["none", "--serve"], "'none' is not the folder of a run: "),
        (["RUN", "--serve=70000"], "--serve=70000"),
        (["RUN", "--serve=PORT"], "cannot be used (Address already in use): use --serve="),
    ],
)
def test_what_cannot_work(run, argv, says, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    write_run(linked := run.parent / "linked")
    (linked / "metrics.jsonl").symlink_to(run / "metrics.jsonl")
    write_run(other := run.parent / "other")
    (other / "samples.jsonl").symlink_to(run / "samples.jsonl")
    before = sorted(run.parent.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.replace("PORT", str(taken.getsockname()[1])) for word in argv]
        assert main([word.replace("RUN", str(run)) for word in words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and sorted(run.parent.rglob("*")) == before


# --- its data -------------------------------------------------------------------------------------

TINY = {"mesh.data": 1, "mesh.stage": 2, "mesh.model": 1}


def data_of(folder) -> dict:
    """What a browser reads."""
    return json.loads(json.dumps(page_data(read_run(folder)), allow_nan=False))


def test_a_run_without_records(tmp_path):
    data = data_of(write_run(tmp_path))
    assert data["curves"] == {} and data["is_running"] is None and data["goodput"] == []
    assert data["schedule"] == ["one stage, whose microbatches follow each other", ""]


def test_curves_rollbacks_and_damaged_lines(tmp_path):
    """Values that are no numbers have no point, and a record that a kill has cut off is none."""
    records = [
        {"step": 1, "wall_s": 2.0, "loss": 3.0, "mfu": None, "why": "<b>"},
        '{"step": 2, "wall_s": 3.0, "loss": NaN, "tokens": 1e999}\n',
        {"step": 2, "wall_s": 4, "rolled_back_from": 5, "why": "</script>", "validation_loss/a": 2},
        '{"step": 3, "los',
    ]
    lost = [{"step": 5, "wall_s": 3.5, "loss": 9.0}, "[]\n"]
    data = data_of(write_run(tmp_path, metrics=records, metrics__rolled_back=lost))
    assert data["curves"]["loss"] == [[1, 2.0, 3.0]] and not {"mfu", "tokens"} & {*data["curves"]}
    assert data["curves"]["validation_loss/a"] == [[2, 4, 2.0]]
    assert data["discarded"] == [[5, 3.5, 9.0]]
    assert [each["why"] for each in data["rollbacks"]] == ["</script>"]


@pytest.mark.parametrize("count", [1, POINTS, POINTS + 1, 2 * POINTS + 7, 30_000])
def test_a_thinned_curve_keeps_spikes_and_ends(count):
    records = [{"step": i, "wall_s": 0.1 * i, "loss": 2.0 + i % 7} for i in range(1, count + 1)]
    records[count // 3]["loss"], records[count // 2]["loss"] = 99.0, -5.0
    points = curve(records, "loss")
    steps, values = [point[0] for point in points], [point[2] for point in points]
    assert len(points) <= min(count, POINTS + 3) and steps == sorted(steps) and steps[-1] == count
    assert max(values) == max(r["loss"] for r in records) and -5.0 in values
    assert count > POINTS or len(points) == count


def test_whether_it_runs(tmp_path):
    lock = write_run(tmp_path) / "run.lock"
    lock.write_text("{}")
    assert data_of(tmp_path)["is_running"] is True
    long_ago = time.time() - 60
    os.utime(lock, (long_ago, long_ago))
    assert data_of(tmp_path)["is_running"] is False


def test_starts_goodput_samples_and_phases(tmp_path):
    line = {"began": 100.0, "time": 110.0, "step": 4, "seconds": {"imports": 4.0, "stepping": 6.0}}
    later = line | {"start": 2, "began": 200.0, "time": 210.0, "step": 2}
    phases = {"train.phases": ("long.step=5", "long.sequence_length=64")}
    data = data_of(
        write_run(
            tmp_path,
            replace(ONE_DEVICE, phases),
            goodput=[line | {"start": 1, "step": 0}, line | {"start": 1}, later, '{"start": 3, "'],
            starts=[
                {"time": 101.0, "step": 0},
                {"time": 201.0, "step": 2, "changed": ["a: 1 → 2"]},
            ],
            samples=[{"step": step, "text": "…"} for step in range(9)],
        )
    )
    first, second = data["goodput"]
    assert first["parts"] == {"useful steps": 3.0, "redone steps": 3.0, "imports": 4.0}
    assert second["start"] == 2 and sum(data["parts"].values()) == 20
    assert data["starts"][1]["changed"] == ["a: 1 → 2"]
    assert [sample["step"] for sample in data["samples"]] == [6, 7, 8]
    assert data["phases"] == {"": 0, "long": 5}


def test_schedules(tmp_path):
    """Of many microbatches the first rounds are drawn; a schedule that cannot be made says why."""
    tiny = replace(load_recipe("tiny"), TINY | {"data.batch_size": 64, "pipeline.microbatches": 16})
    line, svg = data_of(write_run(tmp_path, tiny))["schedule"]
    assert (
        line == "4 of the 16 microbatches of a step, by the exact clock" and svg.count("<rect") > 30
    )
    missing = replace(tiny, {"pipeline.schedule": "csv:gone.csv"})
    line, svg = data_of(write_run(tmp_path, missing))["schedule"]
    assert line.startswith("no picture: ") and "gone.csv" in line and not svg
    line, svg = data_of(write_run(tmp_path, replace(tiny, {"mesh.data": -1})))["schedule"]
    assert line == "no picture: mesh.data=-1 is no number of devices" and not svg


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture
def server(run):
    with PageServer(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server, path="/", host="localhost", method="GET"):
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_what_is_served(server, run):
    assert server.server_address[0] == "127.0.0.1"
    status, headers, text = asked(server, host=f"127.0.0.1:{server.server_port}")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in text and data_in(text)["name"] == run.name
    for path in ("/page.html", "/../config.json", "/?x=1"):
        assert asked(server, path)[0] == 404
    for host in ("evil.example", "localhost.evil.example", "evil.example:80", "127.0.0.2", "[::1]"):
        assert asked(server, host=host)[0] == 404
    for method in ("POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
        assert asked(server, method=method)[0] == 501


def test_newer_data_are_served_and_a_folder_that_is_gone_is_said(server, run):
    assert data_in(asked(server)[2])["curves"]["loss"][-1][0] == 59
    with open(run / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 61, "wall_s": 140.0, "loss": 1.0}\n')
    assert data_in(asked(server)[2])["curves"]["loss"][-1][0] == 61
    (run / "config.json").unlink()
    assert asked(server)[0] == 503


def test_a_reader_that_goes_away_is_no_traceback(server, capsys):
    reader = socket.create_connection(server.server_address)
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.reading.acquire()
    reader.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
    time.sleep(0.2)
    reader.close()  # by a reset
    server.reading.release()
    assert asked(server)[0] == 200
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_the_server(run):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "jaxtrain", "page", str(run), f"--serve={port}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == f"http://127.0.0.1:{port}/ until Ctrl-C\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "\n")


# --- in a browser ---------------------------------------------------------------------------------

SEEN = "document.getElementById('{}').textContent"


@pytest.mark.full
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")
def test_in_chromium(run, server, tmp_path):
    """At both widths, dark and light: no request, no word on the console, no text of a run as HTML,
    and nothing beyond the edge. Keys and choices move what is shown; what is served follows."""
    main([str(run)])
    empty = write_run(tmp_path / "empty")
    main([str(empty)])
    with browser(tmp_path / "profile") as tab:
        for width in (400, 1600):
            for dark in (False, True):
                tab.open((run / "page.html").as_uri(), width, dark=dark)
                assert tab.value("document.title") == run.name == tab.value(SEEN.format("name"))
                assert tab.value("document.documentElement.scrollWidth") == width
                edges = (
                    "[...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect())"
                )
                assert tab.value(f"Math.max(...{edges}.map(box => box.right))") <= width
                assert len(tab.requests()) == 1 and tab.complaints() == []
        heads = "[...document.querySelectorAll('.chart h3')].map(each => each.firstChild.data)"
        assert tab.value(heads) == [
            *("loss", "gradient norm", "learning rate", "expert load"),
            *("tokens/s", "MFU", "accuracy"),
        ]
        assert EVIL in tab.value(SEEN.format("samples")) and EVIL in tab.value(
            SEEN.format("goodput")
        )
        assert tab.value("document.querySelectorAll('main img').length") == 0
        tab.value("document.getElementById('chart0').focus()")
        for key in ("Home", "ArrowRight"):
            tab.ask("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert tab.value(SEEN.format("spoken")).startswith("step 2: training 2.5, validation ")
        for name in ("axis1", "axis2", "log"):
            tab.value(f"document.getElementById('{name}').click()")
            labels = tab.value("[...document.querySelectorAll('#chart0 text')].at(-1).textContent")
            assert labels == {"axis1": "tokens", "axis2": "seconds", "log": "seconds"}[name]
        drawn = tab.value("document.querySelector('#chart0 path').getAttribute('d')")
        assert drawn.count("L") == 58 and "NaN" not in drawn
        assert len(tab.requests()) == 1 and tab.complaints() == []

        tab.open((empty / "page.html").as_uri(), 400)
        assert "No records yet" in tab.value(SEEN.format("charts")) and tab.complaints() == []

        address = f"http://localhost:{server.server_port}/"
        tab.open(address, 400)
        with open(run / "metrics.jsonl", "a") as file:
            file.write('\n{"step": 61, "wall_s": 140.0, "loss": 1.0}\n')
        is_newer = "data.curves.loss.at(-1)[0] === 61 && done(1)"
        assert tab.value(f"new Promise(done => setInterval(() => {is_newer}, 50))") == 1
        assert "step 61 of" in tab.value(SEEN.format("state"))
        assert {*tab.requests()} == {address} and tab.complaints() == []
