"""The onnxruntime module, and session options that do not affect its other users in the process."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import version
from vtx.runtime.installing import install, pip_install
from vtx.runtime.precision import KV_DTYPES
from vtx.runtime.process import owns_process

FATAL = 4  # the least severity that is logged: failures come back as exceptions, once
INFO = 1
LOG = "VTX_ONNXRUNTIME_LOG"  # if set, its messages from INFO on go to stderr
SILENCE = "ORT_DISABLE_TELEMETRY"
INT8_KV_RELEASE = (1, 27)  # its GroupQueryAttention is the first to take int8 caches with scales a channel
OPSET_24_RELEASE = (1, 24)  # the first to compute graphs of the dialect `trt`
# From 1.27 on a matrix of more than 1 GiB in float32 would stay narrow, and be widened for each token.
FOLD_LARGE = ("optimization.constant_folding_max_output_size_in_bytes", "0")
OLD_PYTHON = sys.version_info < (3, 11)  # onnxruntime 1.23 was the last for it


_pool_threads = 0  # of the one thread pool of a process of our own
_lock = threading.Lock()


def import_onnxruntime() -> Any:
    """The onnxruntime module, with telemetry off unless the environment turns it on.

    Releases with telemetry (1.31 for Linux) also keep a database and a number of the device in the user's home.
    """
    os.environ.setdefault(SILENCE, "1")
    import onnxruntime

    return onnxruntime


def load_onnxruntime() -> Any:
    """The onnxruntime module, or DeviceError with the command that installs it."""
    try:
        return import_onnxruntime()
    except ImportError as e:
        raise DeviceError(
            f'onnxruntime is not installed; {install("cpu")} (or "vtx-edge[gpu]" with an NVIDIA GPU)'
        ) from e


def onnxruntime_release() -> str | None:
    """The release of the package that is installed, for a CPU or for GPUs, without loading it; None without one."""
    return version("onnxruntime") or version("onnxruntime-gpu")


def check_release(ort: Any, kv_dtype: str) -> None:
    """Raise DeviceError if this release of onnxruntime cannot attend over K and V of `kv_dtype`."""
    if KV_DTYPES[kv_dtype].scaled and (obstacle := int8_kv_obstacle(ort.__version__)):
        raise DeviceError(obstacle)


def check_opset(ort: Any, dialect: str) -> None:
    """Raise DeviceError if this release of onnxruntime does not compute graphs of `dialect`."""
    if dialect == "trt" and _numbers(ort.__version__) < OPSET_24_RELEASE:
        raise DeviceError(
            f"graphs of the dialect trt need onnxruntime {_text(OPSET_24_RELEASE)} or newer, this is "
            f"{ort.__version__}; {_newer(OPSET_24_RELEASE)}, or compare ort with plain"
        )


def int8_kv_obstacle(release: str) -> str | None:
    """The reason why a release of onnxruntime cannot attend over K and V in int8, with the fix; None if it can."""
    if _numbers(release) >= INT8_KV_RELEASE:
        return None
    return (
        f"K and V in int8 need onnxruntime {_text(INT8_KV_RELEASE)} or newer, this is {release}; "
        f"{_newer(INT8_KV_RELEASE)}, or export with --kv-precision fp16"
    )


def lacks(release: str) -> list[str]:
    """The features that a release of onnxruntime lacks, each with the first release that has it."""
    releases = {"K and V in int8": INT8_KV_RELEASE, "graphs of the dialect trt": OPSET_24_RELEASE}
    return [f"{what} need {_text(least)}" for what, least in releases.items() if _numbers(release) < least]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _newer(release: tuple[int, ...]) -> str:
    if OLD_PYTHON:
        return "use Python 3.11 or newer, for which it is released"
    return f'{pip_install()} -U "onnxruntime>={_text(release)}"'


def log_severity() -> int:
    """The least severity of what sessions log."""
    return INFO if os.environ.get(LOG) else FATAL


def session_options(ort: Any, threads: int) -> Any:
    """Options of a session: in a process of our own it computes on the process's pool, else on one of its own.

    A session of one thread takes part in the process's pool as well. The threads of a pool spin for a while after a
    run, waiting for the next. A bundle has a session for each stage. If each has a pool of its own, its threads stop at
    once, so that the next stage finds the cores free, and must be woken at its next run.
    """
    global _pool_threads
    options = ort.SessionOptions()
    options.log_severity_level = log_severity()
    options.add_session_config_entry(*FOLD_LARGE)
    if owns_process():
        with _lock:
            if not _pool_threads:  # its size is fixed before the first session
                ort.set_global_thread_pool_sizes(threads, 1)
                _pool_threads = threads
        assert threads in (1, _pool_threads), "a command computes with one number of threads"
        options.use_per_session_threads = False
        return options
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
