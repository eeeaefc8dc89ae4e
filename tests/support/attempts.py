"""What tests try to do inside a confined child."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def environment(_: Any) -> list[str]:
    return sorted(os.environ)


def attempt(given: dict[str, Any]) -> str:
    """ "done", or which error it was."""
    try:
        _do(given["attempt"], given["request"])
    except PermissionError:
        return "PermissionError"
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def _do(name: str, given: Any) -> None:
    if name == "socket":
        socket.socket().close()
    elif name == "unix socket":
        socket.socket(socket.AF_UNIX).close()
    elif name == "exec":
        code = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', ''])"
        if given is None:  # out here in a process of its own
            subprocess.run([sys.executable, "-c", code], check=True)
        else:
            exec(code)
    elif name == "fork":
        child = os.fork() if given else os.posix_spawn("/bin/true", ["true"], {})
        os.waitpid(child, 0)
    elif name == "spawn":
        subprocess.run([sys.executable, "-c", ""], check=True)
    elif name == "signal":
        os.kill(given or os.getpid(), 0)
    elif name == "limits of the parent":
        resource.prlimit(given or os.getpid(), resource.RLIMIT_NOFILE)
    elif name == "thread":
        thread = threading.Thread(target=os.getpid)
        thread.start()
        thread.join()
    elif name in ("io_uring", "openat2"):
        _call({"io_uring": 425, "openat2": 437}[name])
    else:
        _change(name, Path(given))


def _change(name: str, file: Path) -> None:
    if name == "read":
        file.read_bytes()
    elif name == "write":
        file.write_text("other")
    elif name == "append":
        with file.open("a") as open_file:
            open_file.write("more")
    elif name == "truncate":
        os.truncate(file, 1)
    elif name == "create":
        os.close(os.open(file.with_name("new"), os.O_CREAT | os.O_RDONLY))
    elif name == "directory":
        file.with_name("new").mkdir()
    elif name == "remove":
        file.unlink()
    elif name == "rename":
        file.rename(file.with_name("new"))
    elif name == "mode":
        file.chmod(0o777)


def _call(number: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "refused")
