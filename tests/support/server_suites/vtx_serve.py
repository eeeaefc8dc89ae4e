"""A vtx-serve process for one test of another server's suite."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress

COMMAND = os.environ["VTX_SERVE"]
BUNDLE = os.environ["VTX_SERVE_BUNDLE"]
START_SECONDS = 120


def start(names: Sequence[str], host: str, port: int, *options: str, key: str = "") -> subprocess.Popen[bytes]:
    """A server that is ready, of a bundle with the first of these names and the others as its aliases, and a key."""
    name, *others = names
    aliases = [option for other in others for option in ("--alias", f"{other}={name}")]
    command = [
        COMMAND,
        "--bundle",
        f"{name}={BUNDLE}",
        *aliases,
        "--host",
        host,
        "--port",
        str(port),
        "--device",
        "cpu",
        "--threads",
        "1",
        *options,
    ]
    process = subprocess.Popen(command, env=os.environ | {"VTX_API_KEY": key})
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://{host}:{port}/health", timeout=5):
            return process
        time.sleep(0.05)
    stop(process)
    raise RuntimeError(f"vtx-serve is not ready after {START_SECONDS} s: {' '.join(command)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, as a service manager does."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
