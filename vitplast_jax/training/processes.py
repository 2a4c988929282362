"""Several processes as one run: who are we, is everybody there, do all of us see the same files?

In: how many processes there are and where the first one listens, from flags, environment or the TPU's own description.
Out: `jax.devices()` spans all processes; or one line that names who is missing, in place of a hang.

The roll call comes before `jax.distributed.initialize`, which aborts a process that waits in vain: process 0 listens on
the port above the coordinator's, every other process reports there, and each hears of the rest.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vitplast_jax import files
from vitplast_jax.errors import UserError

TIMEOUT = 300  # seconds that the roll call waits
_TPU_PORT = 8476


@dataclasses.dataclass(frozen=True)
class Group:
    """This process's place; ``coordinator`` is "host:port" of process 0, ``hosts`` their names where known."""

    coordinator: str
    count: int
    index: int
    hosts: tuple[str, ...] = ()

    def name(self, index: int) -> str:
        return f"{index} ({self.hosts[index]})" if index < len(self.hosts) else str(index)


def find_group(coordinator: str = "", count: int = 0, index: int = -1, environ: Mapping = os.environ) -> Group | None:
    """The group that flags, else environment variables, describe; None if this process is alone.

    Environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; or, on TPUs of one slice,
    TPU_WORKER_HOSTNAMES and TPU_WORKER_ID (GKE sets both).

    Raises:
      UserError: a part of it is missing or impossible.
    """
    coordinator = coordinator or environ.get("JAX_COORDINATOR_ADDRESS", "")
    try:
        count = count or int(environ.get("JAX_NUM_PROCESSES", 0))
        index = index if index >= 0 else int(environ.get("JAX_PROCESS_ID", -1))
    except ValueError:
        raise UserError("JAX_NUM_PROCESSES and JAX_PROCESS_ID must be whole numbers") from None
    if coordinator or count or index >= 0:
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdigit() and count >= 1 and 0 <= index < count):
            raise UserError(
                f"processes: --coordinator {coordinator or 'HOST:PORT'} --processes {count or 'N'} --process "
                f"{index if index >= 0 else 'I'}: all three are needed, I from 0 to N-1 (or JAX_COORDINATOR_ADDRESS, "
                "JAX_NUM_PROCESSES, JAX_PROCESS_ID)"
            )
        return Group(coordinator, count, index) if count > 1 else None
    hosts = tuple(filter(None, environ.get("TPU_WORKER_HOSTNAMES", "").split(",")))
    if len(hosts) > 1 and environ.get("TPU_WORKER_ID", "").isdigit() and "MEGASCALE_NUM_SLICES" not in environ:
        return Group(f"{hosts[0]}:{_TPU_PORT}", len(hosts), int(environ["TPU_WORKER_ID"]), hosts)
    return None


def join(flags=None, timeout: float = TIMEOUT):
    """Makes this process one of its group; to be called before anything else asks jax for devices.

    Args:
      flags: with ``coordinator processes process``, as :data:`vitplast_jax.command.PROCESSES` defines them.
      timeout: seconds to wait for the others.
    Raises:
      UserError: somebody is missing.
    """
    given = (flags.coordinator, flags.processes, flags.process) if flags is not None else ()
    group = find_group(*given)
    if group is None and not _on_tpu_host():
        return
    import jax

    handler = signal.getsignal(signal.SIGTERM)
    if group is None:
        _join_tpu_pod(timeout)
    else:
        print(f"process {group.index}/{group.count}: waiting for the others at {group.coordinator}", flush=True)
        roll_call(group, timeout)
        jax.distributed.initialize(group.coordinator, group.count, group.index)
    signal.signal(signal.SIGTERM, handler)  # which jax has taken for a preemption service that nothing here asks
    if jax.process_count() > 1:
        place = f"process {jax.process_index()}/{jax.process_count()} on {socket.gethostname()}"
        print(f"{place}: {jax.local_device_count()} of {jax.device_count()} devices", flush=True)


def _on_tpu_host() -> bool:
    """Whether this machine has TPUs, and so may be one worker of several."""
    chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    asked = os.environ.get("JAX_PLATFORMS", "")
    return chips and importlib.util.find_spec("libtpu") is not None and (not asked or "tpu" in asked)


def _join_tpu_pod(timeout: float):
    """Lets jax find the workers of a TPU VM by itself; says what is waited for, should it last."""
    import jax

    hint = (
        "still waiting for the other workers of this TPU: start the same command on all of them "
        "(gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...)"
    )
    reminder = threading.Timer(min(20, timeout), lambda: print(hint, flush=True))
    reminder.daemon = True
    reminder.start()
    try:
        jax.distributed.initialize(initialization_timeout=int(timeout))
    except ValueError:  # jax knows no cluster here: a host by itself
        pass
    finally:
        reminder.cancel()


# --- the roll call ---------------------------------------------------------------------------------------------------


def roll_call(group: Group, timeout: float = TIMEOUT):
    """Returns when all processes of a group have reported to process 0.

    Raises:
      UserError: not all are there in time, one was started twice, or they were told different numbers of processes.
    """
    host, _, port = group.coordinator.rpartition(":")
    place, deadline = (host.strip("[]"), int(port) + 1), time.monotonic() + timeout
    problem = _call(group, place, deadline) if group.index == 0 else _report(group, place, deadline)
    if problem:
        raise UserError(problem)


def _call(group: Group, place: tuple[str, int], deadline: float) -> str:
    """Process 0's part: collects the others, tells them the outcome, returns what is wrong."""
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("", place[1]), backlog=group.count))
        except OSError as error:
            return f"process 0 cannot listen on port {place[1]} ({error.strerror}); is another run using it?"
        problem = ""
        while len(present) < group.count - 1 and not problem:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(5)
                told = json.loads(connection.makefile().readline())
                index, count = int(told["index"]), int(told["count"])
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue  # a stranger that said nothing
                missing = [group.name(i) for i in range(1, group.count) if i not in present]
                problem = (
                    f"of {group.count} processes, {', '.join(missing)} did not report within the time; start the same "
                    "command on every host, each with its own --process"
                )
                break
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not one of us
            if count != group.count:
                problem = (
                    f"process {index} was told of {count} processes, process 0 of {group.count}; tell all the same"
                )
            elif index in present or index == 0:
                problem = f"process {index} was started twice; give each its own --process"
            present[index] = connection
        for connection in present.values():
            with contextlib.suppress(OSError):
                connection.sendall((json.dumps(problem) + "\n").encode())
    return problem


def _report(group: Group, place: tuple[str, int], deadline: float) -> str:
    """The part of all others: reports to process 0 and returns what it says is wrong."""
    told = json.dumps({"index": group.index, "count": group.count}) + "\n"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(place, timeout=5) as connection:
                connection.sendall(told.encode())
                connection.settimeout(max(deadline - time.monotonic(), 0) + 10)  # process 0 times out first
                answer = connection.makefile().readline()
                if answer:
                    return json.loads(answer)
        except (OSError, ValueError):
            pass
        time.sleep(0.2)
    return (
        f"process {group.name(0)} does not answer at {place[0]}:{place[1]}; start the same command there with "
        f"--process 0, and let hosts reach its ports {place[1] - 1} and {place[1]}"
    )


# --- among those that are there --------------------------------------------------------------------------------------


def gather(values):
    """Every process's array of one shape and dtype: [...] -> [processes, ...]. All processes must call it."""
    import jax
    import numpy as np

    values = np.asarray(values)
    if jax.process_count() == 1:
        return values[None]
    place, replicate = _spread()
    return np.asarray(replicate(jax.make_array_from_process_local_data(place, values[None])))


@functools.lru_cache(maxsize=1)
def _spread():
    """(a sharding with one row a process, the function that gives every process all rows)."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    first = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.asarray([first[index] for index in sorted(first)]), ("process",))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
    return rows, jax.jit(lambda x: x, out_shardings=everywhere)


def together(function: Callable, *arguments, **options):
    """Calls a function on every process; where it fails on one, all stop, and nobody waits for who has gone."""
    import jax

    if jax.process_count() == 1:
        return function(*arguments, **options)
    result, failure = None, None
    try:
        result = function(*arguments, **options)
    except Exception as error:
        failure = error
    failed = gather(failure is not None).nonzero()[0].tolist()
    if failure is not None:
        raise failure
    if failed:
        raise UserError(f"process {', '.join(map(str, failed))} stopped: its own message says why")
    return result


def check_agreement(what: str, facts):
    """Raises a UserError on all processes unless all have the same facts (anything that JSON holds)."""
    import numpy as np

    text = json.dumps(facts, sort_keys=True, default=str)
    digests = gather(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8))
    if different := [index for index, digest in enumerate(digests) if (digest != digests[0]).any()]:
        raise UserError(
            f"process {', '.join(map(str, different))} has other {what} than process 0; give every host the same "
            "command and the same files"
        )


def check_shared(folder: str | os.PathLike, what: str):
    """Raises a UserError on all processes unless all see the folder of process 0.

    Process 0 leaves a file in the nearest folder above that exists, for the others to find, and takes it away again.
    """
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return
    folder = files.absolute(folder)
    above = folder
    if not files.in_bucket(folder):
        above = next(place for place in (folder, *folder.parents) if place.is_dir())
    mark = above / f".shared-{secrets.token_hex(8)}"
    together(files.write_text if jax.process_index() == 0 else lambda *_: None, mark, "")
    path = np.frombuffer(os.fsencode(mark).ljust(4096, b"\0"), np.uint8)
    mark = files.as_path(os.fsdecode(gather(path)[0].tobytes().rstrip(b"\0")))
    blind = gather(not mark.exists()).nonzero()[0].tolist()
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"{what} {folder} is not shared: process {', '.join(map(str, blind))} does not see what process 0 writes "
            "there; name a folder on a disk that all hosts mount (NFS, Filestore, a mounted bucket)"
        )


# --- an end that is asked for ----------------------------------------------------------------------------------------


class StopRequest:
    """Within its context SIGTERM asks for a stop at the next step in place of interrupting; a second one interrupts.

    >>> with StopRequest() as stop:
    ...     stop.asked
    False
    """

    def __init__(self):
        self.asked = False
        self._before = None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, *_):
        self.asked = True
        signal.signal(signal.SIGTERM, self._before)

    def anywhere(self) -> bool:
        """Whether any process was asked; all must call it."""
        return bool(gather(self.asked).any())
