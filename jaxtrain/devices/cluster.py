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
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

# its store of keys and values: jax.distributed does not give it out
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.stages import Compiled, Lowered

from jaxtrain.devices.cluster_environment import (
    PLACE,
    ClusterError,
    job,
    local_gpus,
    number,
    read_environment,
    several_processes,
    visible_gpus,
)
from jaxtrain.run import peers, streams, watchdog
from jaxtrain.run.exit_status import ExitStatus, RunError

T = TypeVar("T")
_TOLD = "jaxtrain/told"
BARRIER_MS = 24 * 3600 * 1000  # longer than any compilation
# Seconds until jax itself notices that a process is gone, if the run's connections (run/peers.py)
# do not tell.
HEARTBEAT_TIMEOUT_S = 50
LAST_S = 0.5  # in which all processes end, when they know why
NOTICE_S = 10.0  # of waiting for the others, before a line says so
OF_A_PEER = (
    "UNAVAILABLE",
    "coordination service",
    "Coordination service",
    "CoordinationService",
    "another task died",
    "DEADLINE_EXCEEDED",
)
_questions = itertools.count()


class DevicesError(RunError):
    """A process that has not come, that sees fewer devices than the others, or that ended before
    all had reported theirs; the text is one line.

    The status is that of a lost peer: on another host, or when this one is repaired, the same
    command resumes. An engine that bounds its restarts ends the run if the host is not repaired.
    """

    status = ExitStatus.LOST_PEER


def initialize(namespace: types.SimpleNamespace) -> None:
    """Starts jax.distributed if the run has several processes; nothing otherwise, or where it runs.

    Must come before the first use of a device, and before signal handlers are set. Raises
    ClusterError if the flags leave open what the environment does not say; it or
    DevicesError if the processes do not meet.
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
        meeting = peers.meet(**known)
        if meeting.status:
            raise (DevicesError if meeting.status == ExitStatus.LOST_PEER else ClusterError)(
                meeting.text
            )
        jax.distributed.initialize(
            **known,
            local_device_ids=devices,
            initialization_timeout=int(peers.MEETING_S),
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
    line = (
        f"waiting for the {processes or 'other'} processes of this run to meet"
        f"{' at ' * bool(address)}{address}, for {peers.MEETING_S:.0f} s at most"
    )
    timer = threading.Timer(after, streams.log, [line])
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
    hosts = gather(socket.gethostname())
    seen = [
        f"host {hosts[process]} (process {process}) sees {count[process]} of {usual} devices"
        for process in few[:4]
    ]
    barrier("hosts are known")
    raise _again(
        DevicesError,
        f"{', '.join(seen)}{f' (and {len(few) - 4} others)' * (len(few) > 4)}: each process of a "
        "run has as many devices; look after that host, or start without it",
        ExitStatus.LOST_PEER,
    )


def connect_peers() -> peers.Peers | None:
    """The connections of this process to the others of the run; None in a run of one process. Every
    process must call this.

    If process 0 cannot be reached, a line says so, and the run goes on without connections: jax
    alone then notices that a process is gone.
    """
    if jax.process_count() == 1:
        return None
    others = peers.Peers(jax.process_index(), jax.process_count())
    place = distributed.global_state.coordinator_address or ""
    address = from_main(
        lambda: dataclasses.asdict(others.listen(place.rpartition(":")[0].strip("[]"))),
        peers.PeersError,
    )
    if not is_main():
        try:
            others.connect(
                peers.Address(tuple(address.pop("hosts")), **address), socket.gethostname()
            )
        except peers.PeersError as error:
            streams.log(f"warning: {error}: processes that hang or go will be found late")
    return others


def _leave_at_once(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Ends the process at an uncaught error: jax's shutdown would wait minutes for the others,
    which wait for this one's collectives."""
    watchdog.wait_for_ending(watchdog.ABORT_S)
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
    if distributed.global_state.num_processes > 1:
        _client().wait_at_barrier(f"jaxtrain/{name}", BARRIER_MS)


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
            return {"refusal": [str(error), int(getattr(error, "status", ExitStatus.FAULT))]}

    question = f"decision {next(_questions)}"
    values = told_by_main(question, answer)
    if "refusal" in values:
        barrier(f"{question} is known")  # process 0 may end now, and the others ask it
        raise _again(refusal, *values["refusal"])
    return values["value"]


def in_all(do: Callable[[], T], refusal: type[Exception]) -> T:
    """The result of `do()`. A `refusal` that it raises in some processes is raised in all of them,
    with the text of the first.

    Every process must call this, at the same point of the program.
    """
    result, refused = None, None
    try:
        result = do()
    except refusal as error:
        refused = [str(error), int(getattr(error, "status", ExitStatus.FAULT))]
    if first := next(filter(None, gather(refused)), None):
        barrier(f"refusal {next(_questions)} is known")  # process 0 may end now
        raise _again(refusal, *first)
    return result  # type: ignore[return-value]


def _again(refusal: type[Exception], text: str, status: int) -> Exception:
    """The error of one process, by its text and status, for all of them. Process 0 leaves last:
    jax aborts the others when it goes."""
    time.sleep(LAST_S * (distributed.global_state.service is not None))
    error: Any = refusal(text)
    error.status = ExitStatus(status)  # a subclass may have its own
    return error


def agree(values: Mapping[str, str]) -> None:
    """Raises ClusterError, with the same text in all processes of a run, if one of them has another
    value than process 0. Every process must call this, at the same point of the program.

    values: name → text, of which only what stands before PLACE is compared
    """
    me = f" on {socket.gethostname()} (process {distributed.global_state.process_id})"
    main, process_0 = from_main(lambda: [dict(values), me], ClusterError)

    def compare() -> None:
        for name in {**main, **values}:
            ours, theirs = (of.get(name, "none")[:200] for of in (main, values))
            if main.get(name, "").partition(PLACE)[0] != values.get(name, "").partition(PLACE)[0]:
                raise ClusterError(
                    f"{name}={theirs}{me}, and {ours}{process_0}: all processes of a run need the "
                    "same".replace(PLACE, " in ")
                )

    in_all(compare, ClusterError)


def told_by_main(question: str, decide: Callable[[], Any]) -> Any:
    """The result of `decide()` in process 0, after a round trip through JSON, on every process.

    Threads may call this: it has no collective, and questions have no order. Every process must ask
    each question once, in the same words. `decide` must not raise: the others would wait.
    """
    if distributed.global_state.num_processes == 1:  # jax's own functions would start the devices
        return json.loads(json.dumps(decide()))
    if distributed.global_state.process_id:
        return json.loads(
            _client().blocking_key_value_get(f"{_TOLD}/{question}/answer", BARRIER_MS)
        )
    text = json.dumps(decide())
    _client().key_value_set(f"{_TOLD}/{question}/answer", text)
    return json.loads(text)


def told_to_main(question: str, report: str) -> list[str]:
    """The reports of all processes, by process, on process 0; none on the others. Threads may call
    this, as `told_by_main`."""
    if distributed.global_state.num_processes == 1:
        return [report]
    _client().key_value_set(f"{_TOLD}/{question}/{distributed.global_state.process_id}", report)
    if distributed.global_state.process_id:
        return []
    return [
        _client().blocking_key_value_get(f"{_TOLD}/{question}/{index}", BARRIER_MS)
        for index in range(distributed.global_state.num_processes or 1)
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
    question = f"gathering {next(_questions)}"
    reports = told_to_main(f"{question}/each", json.dumps(value))
    return told_by_main(f"{question}/all", lambda: [json.loads(report) for report in reports])


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
