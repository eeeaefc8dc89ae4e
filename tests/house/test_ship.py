"""The archives and packages of `make dist-cpp`, on machines with glibc, the C++ runtime and nothing else.

`make test-dist` runs it, once it has built them.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import vtx
from tests.support.bundles import export
from tests.support.distribution import ROOT, run
from vtx.exporter.bundling.prepare import demo_checkpoint

DIST = Path(os.environ.get("VTX_DIST", "."))
TOOLS = ROOT / "build/aarch64/root"  # what scripts/aarch64.sh unpacked
pytestmark = pytest.mark.skipif("VTX_DIST" not in os.environ, reason="builds archives; `make test-dist` runs it")

DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
LOADERS = {"x86_64": "lib64/ld-linux-x86-64.so.2", "aarch64": "lib/ld-linux-aarch64.so.1"}
RUNTIME = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1")
PICTURE, QUESTIONS = ROOT / "examples/scene-1.jpg", ("How many shapes are there?", "What color is the star?")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(demo_checkpoint(), tmp_path_factory.mktemp("ship") / "demo", (6,), "fp16").folder


@dataclass(frozen=True)
class Machine:
    """A root directory that a command sees alone, without network; a qemu in it runs a foreign processor's programs."""

    root: Path
    emulator: tuple[str, ...]

    def run(self, *command: str, proc: bool = True, code: int = 0, **variables: str) -> str:
        """The output of a command there; without `proc` nothing is mounted at /proc."""
        mount = f"mount -t proc proc {self.root}/proc && " if proc else ""
        enter = f'{mount}exec chroot {self.root} "$@"'
        isolated = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork")
        return run(
            *isolated, "sh", "-c", enter, "sh", *self.emulator, *command, cwd=self.root, env=variables, code=code
        )


def archive(architecture: str) -> Path:
    [found] = DIST.glob(f"vtx-*-linux-{architecture}.tar.gz")
    return found


def package(architecture: str) -> Path:
    [found] = DIST.glob(f"vtx_*_{DEBIAN[architecture]}.deb")
    return found


def unpack_archive(architecture: str, folder: Path) -> Path:
    """The folder with bin/, lib/ and the others."""
    with tarfile.open(archive(architecture)) as file:
        file.extractall(folder, filter="data")
    [top] = folder.iterdir()
    return top


def runtime_libraries(architecture: str) -> Path:
    """Where the loader, glibc and libstdc++ of that processor are on this machine."""
    if architecture == platform.machine():
        found = subprocess.run(["gcc", "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True)
        return Path(found.stdout.strip()).parent
    places = (TOOLS / "usr/aarch64-linux-gnu/lib", Path("/usr/aarch64-linux-gnu/lib"))
    return next(place for place in places if (place / "libc.so.6").exists())


@pytest.fixture(params=["x86_64", "aarch64"])
def architecture(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    emulated = platform.machine() == "x86_64" and value == "aarch64"
    if value != platform.machine() and not emulated:
        pytest.skip(f"programs for {value} do not run on {platform.machine()}")
    return value


@pytest.fixture
def machine(architecture: str, bundle: Path, tmp_path: Path) -> Machine:
    """A machine with the archive in /opt/vtx, a bundle and a picture."""
    namespace = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    if shutil.which("unshare") is None or subprocess.run(namespace, check=False, capture_output=True).returncode:
        pytest.skip("needs unshare and namespaces of users, to run programs in a root directory of their own")
    root = tmp_path / "root"
    for name in ("lib", "lib64", "proc", "tmp", "opt"):
        (root / name).mkdir(parents=True)
    libraries = runtime_libraries(architecture)
    for name in RUNTIME:
        folders = [libraries, libraries.parent.parent / "usr/lib" / libraries.name]
        shutil.copy(next(folder / name for folder in folders if (folder / name).exists()), root / "lib" / name)
    loader = LOADERS[architecture]
    shutil.copy(libraries / Path(loader).name, root / loader)
    shutil.move(unpack_archive(architecture, tmp_path / "archive"), root / "opt/vtx")
    shutil.copytree(bundle, root / "bundle")
    shutil.copy(PICTURE, root / "picture.jpg")
    if architecture == platform.machine():
        return Machine(root, ())
    shutil.copy(TOOLS / "usr/bin/qemu-aarch64", root / "qemu")
    return Machine(root, ("/qemu",))


ASK = ("/opt/vtx/bin/vtx-cpp-run", "--bundle", "/bundle", "--threads", "1")


def test_the_archive_answers_as_python_without_python_compiler_and_network(machine: Machine, bundle: Path) -> None:
    lines = machine.run(*ASK, "--json", "--k", "6", "/picture.jpg", *QUESTIONS).splitlines()
    with vtx.load(bundle, device="cpu") as model, model.open(PICTURE) as image:
        answers = [image.ask(question, k=6) for question in QUESTIONS]
    assert [json.loads(line)["token_ids"] for line in lines] == [list(answer.token_ids) for answer in answers]


def test_the_archive_s_llguidance_constrains_answers(machine: Machine) -> None:
    free = json.loads(machine.run(*ASK, "--json", "/picture.jpg", QUESTIONS[1]))["text"]
    other = "red" if free != "red" else "blue"
    forced = json.loads(machine.run(*ASK, "--json", "--choices", f"{other},white", "/picture.jpg", QUESTIONS[1]))
    assert free not in (other, "white")
    assert forced["text"] in (other, "white")
    schema = (
        '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'
    )
    answer = json.loads(machine.run(*ASK, "--json", "--json-schema", schema, "/picture.jpg", QUESTIONS[0]))
    assert json.loads(answer["text"])["n"] in (1, 2)


def test_without_proc_one_line_says_what_to_mount(machine: Machine) -> None:
    if machine.emulator:
        pytest.skip("qemu itself needs /proc")
    told = machine.run(*ASK, "/picture.jpg", QUESTIONS[0], proc=False, code=1, LD_LIBRARY_PATH="/opt/vtx/lib")
    assert told.splitlines()[-1] == (
        "Error: onnxruntime needs /proc, which this container or chroot lacks; mount it: mount -t proc proc /proc"
    )


def test_every_library_that_goes_along_has_its_licence(architecture: str, tmp_path: Path) -> None:
    top = unpack_archive(architecture, tmp_path)
    licences = {path.name for path in (top / "share/doc/vtx/licences").iterdir() if path.stat().st_size > 0}
    texts = {
        "libjpeg": "libjpeg62-turbo.txt", "libpng16": "libpng16-16.txt", "libz": "zlib1g.txt",
        "libonnxruntime": "onnxruntime.txt", "libllguidance": "llguidance.txt", "llguidance": "llguidance.txt",
    }  # fmt: skip
    libraries = {path.name.partition(".")[0] for path in (top / "lib/vtx").iterdir()}
    assert {texts[library] for library in libraries} < licences
    assert {"nlohmann-json.txt", "llama.cpp-jinja.txt", "onnxruntime-third-party.txt"} < licences
    assert (top / "share/doc/vtx/copyright").read_bytes() == (ROOT / "LICENSE").read_bytes()


def project_by_cmake(prefix: Path, work: Path) -> Path:
    source = prefix / "share/doc/vtx/examples/cpp"
    run("cmake", "-S", source, "-B", work / "build", f"-DCMAKE_PREFIX_PATH={prefix}", cwd=work)
    run("cmake", "--build", work / "build", cwd=work)
    return work / "build/vtx-example-ask"


def program_by_pkg_config(prefix: Path, work: Path) -> Path:
    source = prefix / "share/doc/vtx/examples/cpp/ask.cpp"
    flags = run("pkg-config", "--cflags", "--libs", "vtx", cwd=work,
                env={**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}).split()  # fmt: skip
    run("g++", "-std=c++17", source, "-o", "ask", *flags, f"-Wl,-rpath,{prefix}/lib", cwd=work)
    return work / "ask"


@pytest.mark.parametrize("build", [project_by_cmake, program_by_pkg_config])
def test_a_program_is_built_with_the_archive(build: Callable[[Path, Path], Path], bundle: Path, tmp_path: Path) -> None:
    needed = {"cmake": project_by_cmake, "pkg-config": program_by_pkg_config, "g++": build}
    for tool in (name for name, user in needed.items() if user is build):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    prefix = unpack_archive(platform.machine(), tmp_path / "archive")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VTX_", "LD_"))}
    lines = run(build(prefix, tmp_path), bundle, PICTURE, QUESTIONS[0], cwd=tmp_path, env=clean)
    with vtx.load(bundle, device="cpu") as model, model.open(PICTURE) as image:
        answer = image.ask(QUESTIONS[0])
    assert lines == f"{answer.text}  ({len(answer.token_ids)} tokens)\n"


def commands_of_the_device() -> str:
    """The lines of docs/how-to/ship.md that a device runs, for a root user and this machine's processor."""
    page = (ROOT / "docs/how-to/ship.md").read_text(encoding="utf-8")
    block = page.partition("On the device:\n\n```sh\n")[2].partition("```")[0]
    assert len(block.splitlines()) == 5
    return block.replace("sudo ", "").replace("arm64", DEBIAN[platform.machine()])


def test_a_fresh_debian_runs_the_page_s_commands(bundle: Path, tmp_path: Path) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip("needs debootstrap and root, for a Debian of its own")
    root = tmp_path / "debian"
    run("debootstrap", "--variant=minbase", "bookworm", root, cwd=tmp_path)
    shutil.copy(package(platform.machine()), root)
    shutil.copy(PICTURE, root)
    with tarfile.open(root / "kiosk-1.tar.gz", "w:gz") as file:
        file.add(bundle, "bundle")
    machine = Machine(root, ())
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    told = machine.run("sh", "-ec", commands_of_the_device(), **clean)
    assert told.endswith("\n5\n")
    ask = ("vtx-cpp-run", "--bundle", "/srv/vtx/current/bundle", f"/{PICTURE.name}", QUESTIONS[0])
    assert "onnxruntime needs /proc" in machine.run(*ask, proc=False, code=1, **clean)
    assert "libvtx.so.0" in machine.run("ldconfig", "--print-cache", **clean)
    machine.run("dpkg", "--remove", "vtx", **clean)
    assert not (root / "usr/bin/vtx-cpp-run").exists()
    assert not (root / "usr/lib/vtx").exists()


def test_the_package_names_its_processor_and_has_the_archive_s_files(architecture: str, tmp_path: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    deb = package(architecture)
    assert run("dpkg-deb", "--field", deb, "Architecture", cwd=tmp_path).strip() == DEBIAN[architecture]
    top = unpack_archive(architecture, tmp_path / "archive")
    run("dpkg-deb", "--extract", deb, tmp_path / "deb", cwd=tmp_path)
    files = {
        side: {path.relative_to(side): path.read_bytes() for path in side.rglob("*") if path.is_file()}
        for side in (top, tmp_path / "deb/usr")
    }
    assert files[top] == files[tmp_path / "deb/usr"]
