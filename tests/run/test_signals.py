"""SIGTERM and Ctrl-C before, in and after the loop, also while the main thread is in C code; in
processes of their own, without jax."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support import ROOT

# C code that takes minutes, does not hold the interpreter and listens to no signal, as a
# compilation does.
PROGRAM = """
import hashlib, os, signal, sys, time
from jaxtrain.run.signals import Signals
busy = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
signal.signal(signal.SIGINT, signal.SIG_DFL)
with Signals(lambda: os.write(1, b"cleaned up\\n")) as signals:
    if sys.argv[1] == "before":
        print("ready", flush=True)
        busy()
    if sys.argv[1] == "forks":
        child = os.fork()
        if not child:
            print("ready", os.getpid(), flush=True)
            time.sleep(60)
        print("child ended by", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
    if sys.argv[1] in ("in", "twice"):
        with signals.deferred():
            print("ready", flush=True)
            while not signals.asked:
                time.sleep(0.01)
            print("asked", flush=True)
            if sys.argv[1] == "twice":
                busy()
    if sys.argv[1] == "after":
        with signals.deferred():
            pass
        print("ready", flush=True)
        busy()
print("done", flush=True)
time.sleep(float(sys.argv[2]))
"""


def start(*words: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return process


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ends_at_once_and_cleans_up_although_the_main_thread_is_busy(number, when):
    process = start(when, "0")
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)  # until the C code runs
    process.send_signal(number)
    assert end(process) == (-number, "cleaned up\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_in_the_loop_it_asks(number):
    process = start("in", "0")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    notice = (
        "stopping after this step; Ctrl-C again ends at once, without saving\n"
        if number == signal.SIGINT
        else ""
    )
    assert end(process) == (0, "asked\ndone\n", notice)


def test_under_nohup_a_closed_terminal_is_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("in", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, "asked\ndone\n", "")


def test_the_second_ctrl_c_ends_the_process():
    process = start("twice", "0")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)  # asks once more, which changes nothing
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    status, out, _ = end(process)
    assert (status, out) == (-signal.SIGINT, "cleaned up\n")


PYTHON_PROGRAM = """
import os, signal, time
from jaxtrain.run.signals import Signals
with Signals(lambda: os.write(1, b"cleaned up")) as signals:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        print("before the loop", flush=True)
    time.sleep(0.1)
with Signals(lambda: os.write(1, b"cleaned up")) as signals, signals.deferred():
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            while not signals.interrupted:
                time.sleep(0.01)
            print("asked", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_in_a_program_with_a_handler_of_its_own():
    """Before the loop, and for the second time in it, Python's own handler raises
    KeyboardInterrupt; the process lives on, as a notebook's has to."""
    process = subprocess.Popen(
        [sys.executable, "-c", PYTHON_PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    status, out, _ = end(process)
    assert (status, out) == (0, "before the loop\nasked\ninterrupted\nTrue\n")


def test_afterwards_signals_are_as_they_were():
    process = start("nothing", "60")
    assert process.stdout.readline() == "done\n"
    process.send_signal(signal.SIGTERM)
    assert end(process) == (-signal.SIGTERM, "", "")


def test_a_forked_process_does_not_answer_for_its_parent():
    process = start("forks", "0")
    word, child = process.stdout.readline().split()
    assert word == "ready"
    os.kill(int(child), signal.SIGTERM)
    assert end(process) == (0, f"child ended by {int(signal.SIGTERM)}\ndone\n", "")
