"""Fixtures shared by the tests: tiny checkpoints and their references, each made once a session."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import bundles
from tests.support.budget import Budget
from tests.support.covering import covering
from tests.support.fixtures import Checkpoints
from tests.support.old_onnxruntime import skipped_where_it_is_too_old
from tests.support.quick import left_out, repeated, values
from tests.support.shared import Shared
from tests.support.store import new_folder, open_store, publish, verified
from tests.support.tiny import Tiny, make

if TYPE_CHECKING:
    from tests.support.exported import Models
    from tests.support.reference import Reference
    from vtx.runtime.api.model import Model
    from vtx.runtime.host.confined import Child
    from vtx.runtime.session.session import Prompt

# The comparisons that test files share show what differs, as those in test files do.
pytest.register_assert_rewrite(*(f"tests.support.{name}" for name in ("cabi", "cpp", "parity", "reduced", "traces")))
# Before transformers is imported anywhere: no test may reach for the network.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
# What commands remember, such as the bundle exported last, is the user's: tests write it elsewhere, their children too.
_state = tempfile.TemporaryDirectory(prefix="vtx-tests-")
os.environ["XDG_STATE_HOME"] = _state.name
# Commands find the programs of this environment first, as where it is activated: messages then name `pip` alone.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
# Tests run side by side, a process per core: each computes, and has what it starts compute, on its own.
os.environ["OMP_NUM_THREADS"] = "1"
if (worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")).isdigit() and hasattr(
    os, "sched_setaffinity"
):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
# An example may take long where other work keeps the cores busy; how long says nothing about what it shows.
# Examples are the same each time, so that a change breaks what it breaks; `make fuzz` draws others.
RANDOM = "VTX_FUZZ_EXAMPLES" in os.environ
settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not RANDOM, print_blob=RANDOM
)
settings.load_profile("busy")
# A shell's background job ignores Ctrl-C, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take minutes where slow tests are run: begun first, so that all processes end at once.
LONG = tuple(
    f"tests/{name}.py"
    for name in (
        "tools/tensorrt/test_engines_rtx", "runtime/session/test_contract", "runtime/session/test_contract_checkpoints",
    )
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Thousands of tests and modules are made and none is ever garbage: nobody need look for it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that `covering` does not need and those with a model that repeat the values of others.

    Slow are all but each n-th case of a `sampled(n)` test, all but the first of a `sampled` one, and tests of which
    `tests.support.quick` says so. `LONG` files are the first.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    tests: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("covering")):
            tests.setdefault((item.nodeid.partition("[")[0], marker.args[0]), []).append(item)
    not_needed = set[pytest.Item]()
    for (_, strength), cases in tests.items():
        needed = {cases[number] for number in covering([values(case) for case in cases], strength)}
        not_needed.update(case for case in cases if case not in needed)
    _deselect(config, items, not_needed)
    seen = Counter[str]()
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % (marker.args[0] if marker.args else len(items)):
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    for item in left_out(items):
        item.add_marker(pytest.mark.slow)
    _deselect(config, items, set(repeated(items)))


def _deselect(config: pytest.Config, items: list[pytest.Item], cases: set[pytest.Item]) -> None:
    if cases:
        config.hook.pytest_deselected(items=[item for item in items if item in cases])
        items[:] = [item for item in items if item not in cases]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    with skipped_where_it_is_too_old():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    with skipped_where_it_is_too_old():
        return (yield)


@pytest.fixture(scope="session")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this worker's that lasts until the run's end."""
    return Path(tempfile.mkdtemp(dir=_of_all_workers(tmp_path_factory)))


def _of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run's that lasts until its end, whichever worker asks."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def folders_removed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a file's fixtures wrote goes with them, unless a test failed: a run that keeps it all fills a disk."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed == failed:
        for folder in tmp_path_factory.getbasetemp().iterdir():
            if folder.is_symlink():
                folder.unlink()
            elif folder.is_dir() and folder.name != "shared":  # what is left is pytest's lock of the folder
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Nothing that a test writes need survive a power failure, and a small export waits for the disk 40 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def store() -> Path:
    """A folder for what tests make and share: all workers', and later runs' while the code stays the same."""
    return open_store()


@pytest.fixture(scope="session", autouse=True)
def tokenizers_resolved_once(store: Path) -> Iterator[None]:
    """A confined child takes a second of processor time; what it makes of the same files serves every worker."""
    from vtx.exporter.checkpoint import text

    folder = store / "resolved"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "RESOLVED", Shared(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def children_forked() -> Iterator[Callable[..., Child]]:
    """Confined children are forked from processes that have made their imports; gives what starts one without."""
    from tests.support.fork_server import ForkServers
    from vtx.runtime.host import confined

    if sys.platform != "linux":
        yield confined.start_child
        return
    servers, start = ForkServers(), confined.start_child
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confined, "start_child", servers.start)
        yield start
    servers.close()


@pytest.fixture
def children_started(children_forked: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of this test are those that users have, imports and all."""
    from vtx.runtime.host import confined

    monkeypatch.setattr(confined, "start_child", children_forked)


@pytest.fixture(scope="session", autouse=True)
def crop_noted_already() -> None:
    """The note about crops comes once per process; which test it would meet must not depend on their order."""
    from vtx.runtime.vision import preprocess

    preprocess.noted.set()


@pytest.fixture(scope="session")
def pi0_bundle(lasting: Path) -> Path:
    """A bundle of a tiny pi0; copy it before you change it."""
    from tests.support.families.pi0 import export_pi0

    return export_pi0(lasting / "pi0")


@pytest.fixture
def tiny_pi(monkeypatch: pytest.MonkeyPatch) -> None:
    """PaliGemma's sizes in LeRobot's policies made tiny."""
    from tests.support.families.lerobot import make_pi_tiny

    make_pi_tiny(monkeypatch)


@pytest.fixture(scope="session")
def openvla(lasting: Path) -> tuple[Path, Path]:
    """A checkpoint of a tiny OpenVLA, and its bundle; copy them before you change them."""
    from tests.support.families.openvla import export_openvla

    return export_openvla(lasting / "openvla")


@pytest.fixture(scope="session")
def needs_arithmetic() -> Callable[[str], None]:
    """`needs_arithmetic("int8")` skips a test where the processor has no instructions for that arithmetic."""
    from vtx.runtime.backends.devices import missing_instructions

    def check(compute: str) -> None:
        if reason := missing_instructions(compute):
            pytest.skip(reason)

    return check


@pytest.fixture(scope="session")
def tiny_checkpoint(store: Path) -> Callable[..., Path]:
    """`tiny_checkpoint(tiny=Tiny(), seed=0)`: the folder of that checkpoint; copy it before you change it."""
    (store / "tiny").mkdir(exist_ok=True)
    (store / "bundles").mkdir(exist_ok=True)
    bundles.SHARED = store / "bundles"

    @cache
    def folder(tiny: Tiny = Tiny(), seed: int = 0) -> Path:  # noqa: B008 - frozen
        target = store / "tiny" / hashlib.sha256(repr((tiny, seed)).encode()).hexdigest()[:16]
        if not target.exists():
            publish(make(new_folder(store), tiny, seed), target)
        return verified(target)

    return folder


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Checkpoints) -> Callable[..., Reference]:
    """`reference(tiny=Tiny(), seed=0)`: transformers' float32 model of that checkpoint."""

    @cache
    def load(tiny: Tiny = Tiny(), seed: int = 0) -> Reference:  # noqa: B008 - frozen
        from tests.support.reference import Reference

        return Reference(tiny_checkpoint(tiny, seed))

    return load


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private key and its public key, as files."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from tests.support.keys import write_keys

    return write_keys(tmp_path_factory.mktemp("keys"), "ours", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture(scope="module")
def models(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Checkpoints,
) -> Models:
    """`models(tiny, ks, precision, reductions)`: that bundle on the CPU, in the dialects that the file names."""
    from tests.support.exported import Models

    marker = request.node.get_closest_marker("dialects")
    return Models(tmp_path_factory.mktemp("bundles"), tiny_checkpoint, marker.args if marker else ("ort",))


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Prompt]:
    """`tests.support.exported.mixed_prompts` for the model of a test file."""
    from tests.support.exported import mixed_prompts

    return mixed_prompts(model)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Ray cluster on this machine: a head that computes nothing, and two workers of one core."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_health_check_period_ms", "500")):
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
    made.wait_for_nodes()
    yield made
    made.shutdown()
