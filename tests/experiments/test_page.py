"""`jaxtrain page`: the file, the server, and both in a browser."""

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from support import ROOT
from support.chromium import CHROMIUM, browser
from support.run_folders import write_run

from jaxtrain import load_recipe, replace
from jaxtrain.experiments.page import PageServer, main

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
