"""The onnxruntime module, and options of sessions that leave the process as it was for other users of it."""

from __future__ import annotations

from typing import Any

from vtx.runtime.errors import DeviceError

FATAL = 4  # the least severity that is logged: failures come back as exceptions, once
INT8_KV_RELEASE = (1, 27)  # its GroupQueryAttention is the first to take int8 caches with scales a channel


def load_onnxruntime() -> Any:
    """The onnxruntime module, or DeviceError with the command that installs it."""
    try:
        import onnxruntime
    except ImportError as e:
        raise DeviceError(
            'onnxruntime is not installed; pip install "vtx-edge[cpu]" (or "vtx-edge[gpu]" with an NVIDIA GPU)'
        ) from e
    return onnxruntime


def check_release(ort: Any, kv_dtype: str) -> None:
    """Raise DeviceError where this release of onnxruntime cannot attend over K and V of `kv_dtype`."""
    if kv_dtype == "int8" and _release(ort) < INT8_KV_RELEASE:
        wanted = ".".join(map(str, INT8_KV_RELEASE))
        raise DeviceError(
            f"K and V in int8 need onnxruntime {wanted} or newer, this is {ort.__version__}; "
            f'pip install -U "onnxruntime>={wanted}", or export with --kv-precision fp16'
        )


def _release(ort: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in ort.__version__.split(".")[:2])


def session_options(ort: Any, threads: int) -> Any:
    """Options of a session with a thread pool of its own.

    The threads of a pool spin for a while after a run, waiting for the next. A bundle has a session for each stage:
    they stop at once, so that the next stage finds the cores free.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = FATAL
    return options
