"""The processes of a run: the start of jax.distributed, the GPUs of a process, and the values that
processes agree on.

A run has several processes if the flags say so (`--coordinator --processes --process_id`), if an
engine's environment says so (cluster_environment.py), or if the program that trains has started
jax.distributed already. jax finds some addresses by itself, but this file decides whether it is
asked, because a single process must never wait for others. launch.py starts processes on one
machine.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

# its store of keys and values: jax.distributed does not give it out
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.stages import Compiled, Lowered

from jaxtrain.devices.cluster_environment import (
    job,
    local_gpus,
    number,
    read_environment,
    several_processes,
    visible_gpus,
)
from jaxtrain.run import streams, watchdog
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.peers import Address, Peers, PeersError

T = TypeVar("T")
_TOLD = "jaxtrain/told"
BARRIER_MS = 24 * 3600 * 1000  # longer than any compilation
# Seconds until jax itself notices that a process is gone, if the run's connections (run/peers.py)
# do not tell.
HEARTBEAT_TIMEOUT_S = 50
MEETING_S = 300  # that processes wait for each other at the start; jax then aborts, with status 134
NOTICE_S = 10.0  # of waiting for the others, before a line says so
NAMES_MS = 60_000  # for the others' host names, when all processes have their devices
OF_A_PEER = (
    "UNAVAILABLE",
    "coordination service",
    "Coordination service",
    "CoordinationService",
    "another task died",
    "DEADLINE_EXCEEDED",
)
FAULT_OR_PEER_S = 5.0  # seconds in which an error turns out to be the death of another process
_questions = itertools.count()


class DevicesError(RunError):
    """A process that sees fewer devices than the others, or that ended before all had reported
    theirs; the text is one line.

    The status is that of a lost peer: on another host, or when this one is repaired, the same
    command resumes. An engine that bounds its restarts ends the run if the host is not repaired.
    """

    status = ExitStatus.LOST_PEER


def initialize(namespace: types.SimpleNamespace) -> None:
    """Starts jax.distributed if the run has several processes; nothing otherwise, or where it runs.

    Must come before the first use of a device, and before signal handlers are set. Raises
    ClusterError if the flags leave open what the environment does not say.
    """
    environment = os.environ
    if jax.distributed.is_initialized() or not (
        several_processes(namespace, environment) or _on_tpu_vm(environment)
    ):
        return
    # jax's own preemption service takes SIGTERM away from the process; the training loop handles
    # it.
    jax.config.update("jax_enable_preemption_service", False)
    devices = (
        None
        if environment.get("JAX_LOCAL_DEVICE_IDS")
        else local_gpus(environment, visible_gpus(environment))
    )
    known = job(namespace, environment)
    with (
        read_environment(),
        notice_of_waiting(known.get("num_processes"), known.get("coordinator_address", "")),
    ):
        jax.distributed.initialize(
            **known,
            local_device_ids=devices,
            initialization_timeout=MEETING_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    sys.excepthook = _leave_at_once
    watchdog.outlive_abort()


@contextlib.contextmanager
def notice_of_waiting(
    processes: int | None, address: str, after: float = NOTICE_S
) -> Iterator[None]:
    """A context in which the processes of a run meet. If that takes longer than `after` seconds, a
    line says which processes this one waits for.

    processes: of the run, None where jax alone knows; address: of process 0, "" where jax finds it.
    """
    where = f" at {address}" if address else ""
    line = (
        f"waiting for the {processes or 'other'} processes of this run to meet{where}; jax gives "
        f"up after {MEETING_S} s"
    )
    timer = threading.Timer(after, lambda: streams.log(line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_devices() -> None:
    """Raises DevicesError, in every process, if some see fewer devices than most, or if jax cannot
    tell because a process has ended.

    Every process must call this before any collective: those of jax need the same number of devices
    in each process.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:
        if not jax.distributed.is_initialized():
            raise
        raise DevicesError(
            "jax does not find the devices of all processes of this run: one of them has gone, or "
            f"has none ({' '.join(str(error).split())[:200]})"
        ) from error
    count = collections.Counter(device.process_index for device in devices)
    usual = max(count.values(), key=lambda devices: (list(count.values()).count(devices), devices))
    few = [process for process in range(jax.process_count()) if count[process] != usual]
    if not few:
        return
    _client().key_value_set(f"jaxtrain/host/{jax.process_index()}", socket.gethostname())
    seen = [
        f"host {_client().blocking_key_value_get(f'jaxtrain/host/{process}', NAMES_MS)} (process "
        f"{process}) sees {count[process]} of {usual} devices"
        for process in few[:4]
    ]
    others = f", and {len(few) - len(seen)} further processes" if len(few) > len(seen) else ""
    barrier("hosts are known")  # the store is process 0's, and goes with it
    raise DevicesError(
        f"{', '.join(seen)}{others}: each process of a run has as many devices; look after "
        "that host, or start without it"
    )


def connect_peers() -> Peers | None:
    """The connections of this process to the others of the run; None in a run of one process. Every
    process must call this.

    If process 0 cannot be reached, a line says so, and the run goes on without connections: jax
    alone then notices that a process is gone.
    """
    if jax.process_count() == 1:
        return None
    peers = Peers(jax.process_index(), jax.process_count())
    address = from_main(lambda: dataclasses.asdict(peers.listen()), PeersError)
    if not is_main():
        try:
            peers.connect(Address(tuple(address.pop("hosts")), **address), socket.gethostname())
        except PeersError as error:
            streams.log(f"warning: {error}: processes that hang or go will be found late")
    return peers


def _leave_at_once(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Ends the process at an uncaught error: jax's shutdown would wait minutes for the others,
    which wait for this one's collectives."""
    watchdog.wait_for_ending(FAULT_OR_PEER_S)
    if isinstance(error, jax.errors.JaxRuntimeError) and any(
        word in str(error) for word in OF_A_PEER
    ):
        # Before this process knows the others by connections of its own (connect_peers), the store
        # alone tells that one has gone.
        streams.write_error(
            f"error: another process of the run has gone: {' '.join(str(error).split())[:200]}\n"
        )
        os._exit(ExitStatus.LOST_PEER)
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_main() -> bool:
    """True if this process writes the logs."""
    return jax.process_index() == 0


def log(*lines: str) -> None:
    """Prints lines as `streams.log`, in the process that writes the logs alone."""
    if is_main():
        streams.log(*lines)


def compile_everywhere(name: str, program: Lowered) -> Compiled:
    """The compiled program, as soon as every process has compiled it, so that none runs it and
    waits for others that still compile.

    name: of the program, used once.
    """
    compiled = program.compile()
    barrier(f"compiled: {name}")
    return compiled


def barrier(name: str) -> None:
    """Waits until every process has reached the barrier of this name, which is used once.

    This is no collective: on CPU a collective gives up when a process is 30 s later than another,
    which happens when one compiles a program that the other has in its cache (on CPU only process 0
    has one). The wait ends when a process dies, which the coordination service notices.
    """
    ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=BARRIER_MS)


def least(value: int) -> int:
    """The least of all processes' values. Every process must call this, at the same point of the
    program."""
    return (
        value
        if jax.process_count() == 1
        else int(np.min(multihost_utils.process_allgather(np.int32(value))))
    )


def from_main(decide: Callable[[], Any], refusal: type[Exception]) -> Any:
    """The result of `decide()` in process 0, after a round trip through JSON, on every process; the
    others do not call `decide`.

    Every process must call this, in the same order. A `refusal` that `decide` raises is raised on
    all of them with the same text.
    """

    def answer() -> dict:
        try:
            return {"value": decide()}
        except refusal as error:
            return {"refusal": str(error)}

    if jax.process_count() == 1:
        return json.loads(json.dumps(decide()))
    question = f"decision {next(_questions)}"
    values = told_by_main(question, answer)
    if "refusal" in values:
        barrier(f"{question} is known")  # process 0 may end now, and the others ask it
        raise refusal(values["refusal"])
    return values["value"]


def in_all(do: Callable[[], T], refusal: type[Exception]) -> T:
    """The result of `do()`. A `refusal` that it raises in some processes is raised in all of them,
    with the text of the first.

    Every process must call this, at the same point of the program.
    """
    result, text = None, ""
    try:
        result = do()
    except refusal as error:
        if jax.process_count() == 1:
            raise
        text = str(error)
    if text := next(filter(None, gather(text)), ""):
        barrier(f"refusal {next(_questions)} is known")  # process 0 may end now
        raise refusal(text)
    return result  # type: ignore[return-value]


def told_by_main(question: str, decide: Callable[[], Any]) -> Any:
    """The result of `decide()` in process 0, after a round trip through JSON, on every process.

    Threads may call this: it has no collective, and questions have no order. Every process must ask
    each question once, in the same words. `decide` must not raise: the others would wait.
    """
    if jax.process_count() == 1:
        return json.loads(json.dumps(decide()))
    if not is_main():
        return json.loads(
            _client().blocking_key_value_get(f"{_TOLD}/{question}/answer", BARRIER_MS)
        )
    text = json.dumps(decide())
    _client().key_value_set(f"{_TOLD}/{question}/answer", text)
    return json.loads(text)


def told_to_main(question: str, report: str) -> list[str]:
    """The reports of all processes, by process, on process 0; none on the others. Threads may call
    this, as `told_by_main`."""
    if jax.process_count() == 1:
        return [report]
    _client().key_value_set(f"{_TOLD}/{question}/{jax.process_index()}", report)
    if not is_main():
        return []
    return [
        _client().blocking_key_value_get(f"{_TOLD}/{question}/{index}", BARRIER_MS)
        for index in range(jax.process_count())
    ]


def forget(question: str) -> None:
    """Deletes the answers to a question and those below it, `question/…`. Process 0 calls this when
    all processes have their answers."""
    if jax.process_count() > 1:
        _client().key_value_delete(f"{_TOLD}/{question}/")


def _client() -> Any:
    """The coordination service, of which jax has no public interface."""
    return distributed.global_state.client


def gather(value: Any) -> list[Any]:
    """The values of all processes, by process, after a round trip through JSON.

    Every process must call this, at the same point of the program.
    """
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    barrier(f"gathering {next(_questions)}")  # one may come later than the others' collectives wait
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    texts = multihost_utils.process_allgather(np.pad(text, (0, int(sizes.max()) - text.size)))
    return [
        json.loads(np.asarray(text, np.uint8)[:size].tobytes())
        for text, size in zip(texts, sizes, strict=True)
    ]


def _on_tpu_vm(environment: Mapping[str, str]) -> bool:
    """True if this is a TPU machine whose slice may have others. jax then asks the machine itself,
    even for a slice of one machine.

    jax sets its platforms to "tpu,cpu" when it finds TPU chips; a single Kubernetes pod names one
    host and has nobody to ask.
    """
    settings: Any = jax.config  # its attributes have no declared types
    if "tpu" not in (settings.jax_platforms or "").split(","):
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts and "," in hosts:
        number(environment, "TPU_WORKER_ID")
    return hosts is None or "," in hosts or "MEGASCALE_NUM_SLICES" in environment
