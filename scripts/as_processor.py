"""Run a command, and all that it starts, as on a lesser processor of x86-64.

    python scripts/as_processor.py avx2 pytest tests/runtime/backends/test_integers.py

OpenVINO, onnxruntime and numpy ask the processor (CPUID) and /proc/cpuinfo what it has; as_processor.c answers them
without the features of later processors. Their code is then that of the lesser processor, and so are its results; its
speed is not. PyTorch, with which tests compare, keeps what it has. Needs a C compiler and objdump; without arguments it
prints the kinds that this machine can be.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

BUILD = Path(__file__).parents[1] / "build" / "as-processor"
SOURCE = Path(__file__).with_suffix(".c")
REGISTERS = ("ebx", "ecx", "edx", "eax of subleaf 1", "edx of subleaf 1")  # of CPUID's leaf 7
FEATURES = {  # by their flag in /proc/cpuinfo: the register and the bit there
    "avx512f": (0, 16), "avx512dq": (0, 17), "avx512ifma": (0, 21), "avx512cd": (0, 28), "avx512bw": (0, 30),
    "avx512vl": (0, 31), "avx512vbmi": (1, 1), "avx512_vbmi2": (1, 6), "avx512_vnni": (1, 11),
    "avx512_bitalg": (1, 12), "avx512_vpopcntdq": (1, 14), "avx512_vp2intersect": (2, 8), "amx_bf16": (2, 22),
    "avx512_fp16": (2, 23), "amx_tile": (2, 24), "amx_int8": (2, 25), "avx_vnni": (3, 4), "avx512_bf16": (3, 5),
    "amx_fp16": (3, 21), "avx_ifma": (3, 23), "avx_vnni_int8": (4, 4), "avx_ne_convert": (4, 5), "amx_complex": (4, 8),
    "avx_vnni_int16": (4, 10), "avx10": (4, 19),
}  # fmt: skip
AVX512 = {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}
VNNI = AVX512 | {"avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq"}
KINDS: dict[str, set[str]] = {  # what a kind has of these
    "avx2": set(),
    "avx2_vnni": {"avx_vnni"},
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "avx512_bf16": VNNI | {"avx512_bf16"},
}
ASKING = {  # packages whose libraries choose code by the processor
    "openvino": ("libs/libopenvino.so*", "libs/libopenvino_intel_cpu_plugin.so"),
    "onnxruntime": ("capi/*.so*",),
    "numpy": ("_core/_multiarray_umath*.so", "linalg/*.so"),
}
NEEDED = ("cc", "objdump")


def flags() -> set[str]:
    """Of this processor."""
    line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(line[1].split()) if line else set()


def obstacle(kind: str) -> str | None:
    """Why this machine cannot be a processor of that kind, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{kind} is a kind of x86-64 on Linux, and this is {platform.system()} on {platform.machine()}"
    lacking = sorted((KINDS[kind] | {"avx2"}) - flags())
    if lacking:
        return f"this processor is none of kind {kind}: it has no {', '.join(lacking)}"
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    return f"{kind} needs {' and '.join(missing)}, which are not installed" if missing else None


def possible_kinds() -> list[str]:
    """The kinds that this machine can be and is not; writes one line for each of the others."""
    obstacles = {kind: obstacle(kind) for kind in KINDS}
    for kind, reason in obstacles.items():
        if reason is None and not flags() & set(FEATURES) - KINDS[kind]:
            obstacles[kind] = f"this processor is one of kind {kind}"
    for reason in filter(None, obstacles.values()):
        print(f"as_processor: {reason}", file=sys.stderr)
    return [kind for kind, reason in obstacles.items() if reason is None]


def libraries() -> Iterator[Path]:
    """The files of installed libraries that choose code by the processor, each once."""
    for package, patterns in ASKING.items():
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            for pattern in patterns:
                yield from {path.resolve() for path in Path(spec.origin).parent.glob(pattern)}


def cpuid_offsets(library: Path) -> str:
    """Where the CPUID instructions of a library are in memory, as hexadecimal offsets; searched for once."""
    file = library.stat()
    remembered = BUILD / f"{library.name}-{file.st_size}-{file.st_mtime_ns}"
    if not remembered.exists():
        listing = subprocess.run(
            ("objdump", "-d", "--no-show-raw-insn", library), capture_output=True, text=True, check=True
        )
        offsets = re.findall(r"^\s*([0-9a-f]+):\s+cpuid\b", listing.stdout, re.MULTILINE)
        write_whole(remembered, " ".join(offsets).encode())
    return remembered.read_text()


def write_whole(path: Path, content: bytes) -> None:
    """Several commands may start at once: a file is there with all of its content or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.rename(path)


def compiled() -> Path:
    library = BUILD / f"as-processor-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not library.exists():
        part = library.with_name(f"{library.name}.{os.getpid()}")
        subprocess.run(("cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", part, SOURCE, "-ldl"), check=True)
        part.rename(library)
    return library


def environment(kind: str) -> dict[str, str]:
    """The variables under which a program runs as on a processor of that kind."""
    BUILD.mkdir(parents=True, exist_ok=True)
    hidden = {flag: place for flag, place in FEATURES.items() if flag not in KINDS[kind]}
    masks = [0xFFFFFFFF] * len(REGISTERS)
    for register, bit in hidden.values():
        masks[register] &= ~(1 << bit)
    lines = []
    for library in libraries():
        file = library.stat()
        lines.append(f"{file.st_dev} {file.st_ino} {cpuid_offsets(library)}\n")
    table, library = "".join(lines).encode(), str(compiled())
    listed = BUILD / f"table-{hashlib.sha256(table).hexdigest()[:12]}"
    write_whole(listed, table)
    return {
        **os.environ,
        "LD_AUDIT": library,
        "LD_PRELOAD": library,
        "VTX_CPUID_TABLE": str(listed),
        "VTX_CPUID_KEEP": " ".join(f"{mask:x}" for mask in masks),
        "VTX_CPUID_HIDDEN": " ".join(hidden),
    }


def main() -> None:
    if len(sys.argv) == 1:
        print(*possible_kinds())
        return
    kind, *command = sys.argv[1:]
    if kind not in KINDS or not command:
        raise SystemExit(f"usage: python scripts/as_processor.py KIND COMMAND...; KIND is one of {', '.join(KINDS)}")
    if reason := obstacle(kind):
        raise SystemExit(f"as_processor: {reason}")
    os.execvpe(command[0], command, environment(kind))


if __name__ == "__main__":
    main()
