"""Rights that this process gives up for good: network, other programs, writing files, reading other files.

    enter(["/data/weights"])  # it may read these, and the folders that Python imports from

On Linux. Seccomp refuses the system calls (x86-64 and aarch64, kernels that have it): sockets, execve, new processes,
signals and memory of other processes, opening a file for writing, renaming, removing, mounting, io_uring, and every
call that is newer than this list. Landlock (Linux 5.13) refuses to read files that were not named, and to write any.
A refused call fails with EPERM or EACCES; the process goes on. Threads are allowed, and so is reading and writing files
that are open already. On other systems nothing is given up.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

# System calls by number: (x86-64, aarch64); None if the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201),
    "socketpair": (53, 199), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "creat": (85, None), "truncate": (76, 45), "mknod": (133, None), "mknodat": (259, 33), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "acct": (163, 89),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "io_setup": (206, 0),
    "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip
_OPEN = (2, None)
_OPENAT = (257, 56)
_CLONE = (56, 220)
_KILL = (62, 129)
_TGKILL = (234, 131)
_PRLIMIT = (302, 261)
_NEW = 424  # the first call with one number on every machine; from it on only these are allowed
_NEW_ALLOWED = {"close_range": 436, "faccessat2": 439, "futex_waitv": 449}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store",
    "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/proc/self", "/proc/cpuinfo", "/proc/meminfo",
    "/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu", "/sys/devices/system/node", "/dev/urandom",
)  # fmt: skip


def enter(reads: Sequence[str] = ()) -> tuple[str, ...]:
    """Give up all but computing and reading; returns which of "seccomp" and "landlock" this kernel enforces."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES or sys.maxsize < 1 << 32:
        return ()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return ()
    restrictions = ("landlock",) if _restrict_files(libc, [*_imported_from(), *_SYSTEM, *reads]) else ()
    program = _program(*_MACHINES[machine], os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    filtered = libc.syscall(_SECCOMP[machine], 1, 1, pointer) == 0  # set a filter, on all threads
    return (*restrictions, "seccomp") if filtered else restrictions


def _imported_from() -> list[str]:
    """The folders of Python, of its packages and of vtx; no folder that holds the user's home, where scripts may be."""
    home = os.path.realpath(os.path.expanduser("~"))
    named = [*sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    folders = {os.path.realpath(folder) for folder in named if os.path.isabs(folder)}
    vtx = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    return [
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        vtx,
        sys.executable,  # a frozen program holds its modules
        *(folder for folder in folders if os.path.commonpath([folder, home]) != folder),
    ]


def _restrict_files(libc: ctypes.CDLL, paths: Sequence[str]) -> bool:
    """Landlock: `paths` may be read, and no file written; no TCP, no signals to others."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    attributes = struct.pack("=QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    try:
        for path in dict.fromkeys(paths):
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # it does not exist
            try:
                rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
                libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, beneath), 0)
            finally:
                os.close(beneath)
        return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _program(column: int, architecture: int, process: int) -> bytes:
    """The filter in the kernel's classic BPF."""
    load = 0x20
    equal = 0x15
    at_least = 0x35
    any_bit = 0x45
    leave = 0x06
    allow = 0x7FFF0000
    refuse = 0x00050000 | errno.EPERM
    unknown = 0x00050000 | errno.ENOSYS
    instructions: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (leave, 0, 0, 0x80000000),
        (load, 0, 0, 0),
    ]

    def unless(number: int | None, argument: int, test: int, value: int, *, refused: bool) -> None:
        """Test the lower half of an argument of the call `number`; `refused`: refuse the call if the test holds."""
        if number is not None:
            outcome = (0, 1) if refused else (1, 0)
            instructions.extend(
                [
                    (equal, 0, 4, number),
                    (load, 0, 0, 16 + 8 * argument),
                    (test, *outcome, value),
                    (leave, 0, 0, refuse),
                    (leave, 0, 0, allow),
                ]
            )

    for number in _NEW_ALLOWED.values():
        instructions += [(equal, 0, 1, number), (leave, 0, 0, allow)]
    instructions += [(at_least, 0, 1, _NEW), (leave, 0, 0, unknown)]
    unless(_OPEN[column], 1, any_bit, _WRITES, refused=True)
    unless(_OPENAT[column], 2, any_bit, _WRITES, refused=True)
    unless(_CLONE[column], 0, any_bit, _CLONE_THREAD, refused=False)
    unless(_KILL[column], 0, equal, process, refused=False)
    unless(_TGKILL[column], 0, equal, process, refused=False)
    unless(_PRLIMIT[column], 0, equal, 0, refused=False)
    for numbers in _REFUSED.values():
        if numbers[column] is not None:
            instructions += [(equal, 0, 1, numbers[column] or 0), (leave, 0, 0, refuse)]
    instructions.append((leave, 0, 0, allow))
    return b"".join(struct.pack("=HBBI", *step) for step in instructions)
