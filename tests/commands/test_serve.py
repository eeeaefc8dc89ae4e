"""vtx-serve as a program: it says where it listens, answers, and ends when it is told to."""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from click.testing import CliRunner

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.serving import WAIT, Served, asking, until, user
from tests.support.tiny import Tiny
from vtx.cli import serve

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)


SERVE = "from vtx.cli import serve; serve()"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Path:
    return export(tiny_checkpoint(Tiny()), tmp_path_factory.mktemp("serve") / "tiny", (3,), "fp32").folder


class Started(NamedTuple):
    """The program, what it says on stderr after `line`, which tells where it listens, and the server there."""

    process: subprocess.Popen[str]
    stderr: IO[str]
    line: str
    served: Served


@contextmanager
def started(bundle: Path, *words: str, program: str = SERVE, **settings: Any) -> Iterator[Started]:
    """vtx-serve as a process, with further settings of it, from where it listens to the end of the block."""
    command = [sys.executable, "-c", program, "--bundle", str(bundle), "--port", "0", "--threads", "1", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **settings) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            where = re.search(r":(\d+)/", line)
            assert where, line
            yield Started(process, process.stderr, line, Served(int(where[1]), None))  # type: ignore[arg-type]
        finally:
            process.kill()


@pytest.mark.sampled
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(bundle: Path, end: signal.Signals) -> None:
    with started(bundle, "--fit", "squash") as (process, stderr, line, served):
        assert line.startswith(f"serving tiny at http://127.0.0.1:{served.port}/")
        [described] = served.request("GET", "/v1/models").json["data"]
        assert described["vtx"]["image"]["fit"] == "squash"
        assert served.chat(asking(user("red?"), k=3)).status == 200
        process.send_signal(end)
        assert "Traceback" not in stderr.read()
        assert process.wait() in (0, 130, -end)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_it_speaks_https_with_a_certificate(bundle: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with started(bundle, "--tls-cert", str(cert), "--tls-key", str(key)) as (_, _, line, served):
        assert line.startswith(f"serving tiny at https://127.0.0.1:{served.port}/")
        trusted = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", served.port, timeout=WAIT, context=trusted)
        connection.request("GET", "/v1/models")
        assert b'"tiny"' in connection.getresponse().read()
        connection.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--tls-cert", "a.pem"], "belong together"), (["--tls-cert", "a.pem", "--tls-key", "b.pem"], "no certificate")],
)
def test_a_certificate_that_cannot_be_used_is_refused(bundle: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(serve, ["--bundle", str(bundle), *arguments])
    assert result.exit_code == 1
    assert words in result.output


STALLED = """
import sys, threading
from vtx.runtime.scheduler.engine import Engine
opened = Engine.__init__
def stalling(self, *args):
    opened(self, *args)
    self.model.backend.head = lambda *_: threading.Event().wait()  # a run of a graph that does not return
Engine.__init__ = stalling
from vtx.cli import serve
serve()
"""


@pytest.mark.slow  # it waits for seven seconds
def test_a_graph_that_does_not_return_ends_the_process(bundle: Path, tmp_path: Path) -> None:
    """systemd hears that it begins and lives; a supervisor sees that it failed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
        stalled = started(bundle, "--stall-timeout", "5", program=STALLED, env=environment)
        with stalled as (process, stderr, _, served):
            assert [systemd.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
            with served.open_chat(asking(user("red?"))) as client:
                assert client.recv(100) == b"", "its connection ends with the process"
            assert process.wait(WAIT) == 1
            told = stderr.read().splitlines()
            assert (
                told[-1]
                == "vtx-serve: tiny gave no sign of life for 5 s, the limit of --stall-timeout; the server ends"
            )
            assert any("scheduler.py" in line for line in told), "where each thread is"


SLOW = """
import time
from vtx.runtime.scheduler.engine import Engine
opened = Engine.__init__
def slow(self, *args):
    opened(self, *args)
    head = self.model.backend.head
    self.model.backend.head = lambda hidden: (time.sleep(0.1), head(hidden))[1]
Engine.__init__ = slow
from vtx.cli import serve
serve()
"""


@pytest.mark.slow
@pytest.mark.parametrize("grace", ["60", "0.5"])
def test_answers_end_before_the_server_does(bundle: Path, grace: str) -> None:
    """Within its grace; what is left then ends with an error in its stream."""
    with started(bundle, "--grace", grace, program=SLOW) as (process, stderr, _, served):
        body = asking(user("red?"), k=3, stream=True, max_tokens=30, ignore_eos=True)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.chat, body)
            served.until_active(1, "the answer begins")
            assert served.request("GET", "/readyz").status == 200
            process.send_signal(signal.SIGTERM)
            if grace == "60":
                until(lambda: served.request("GET", "/readyz").status == 503, "the signal arrives")
                assert served.request("GET", "/livez").status == 200
                refused = served.chat(body)
                assert refused.status == 503
                assert refused.headers["retry-after"]
            last = answer.result(WAIT).events[-1]
        if grace == "60":
            assert last["choices"][0]["finish_reason"] == "length"
        else:
            assert "shutting down" in last["error"]["message"]
        assert process.wait(WAIT) in (0, -signal.SIGTERM)
        assert "Traceback" not in stderr.read()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_hangup_replaces_bundles_that_have_changed_and_requests_are_logged(bundle: Path) -> None:
    with started(bundle, "--access-log", "text", stdout=subprocess.PIPE) as (process, stderr, _, served):
        assert process.stdout is not None
        until(lambda: served.request("GET", "/readyz").status == 200, "it serves")
        assert " GET /readyz 200 " in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert "is unchanged" in stderr.readline()
        assert served.request("GET", "/readyz").status == 200


def test_a_port_that_is_taken_is_told_in_one_line(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(serve, ["--bundle", str(bundle), "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert "choose another --port" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--compute", "bf16", "--device", "cpu"), "cpu computes in f32, not bf16"),
        (("--max-tiles", "2"), "max_tiles has no effect here"),
    ],
)
def test_what_a_further_bundle_cannot_do_is_told_at_the_start(
    bundle: Path, tmp_path: Path, tiny_checkpoint: Checkpoints, words: tuple[str, ...], told: str
) -> None:
    tiles = export(tiny_checkpoint(Tiny(family="llava_next", layers=2)), tmp_path / "tiles", (), "fp32").folder
    done = CliRunner().invoke(serve, ["--bundle", str(tiles), "--bundle", f"second={bundle}", "--port", "0", *words])
    assert done.exit_code == 1
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert "second: " in done.stderr or "--compute" in words


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--memory", "nan"), 2, "'--memory': nan is not a number from 0 to 1,000,000"),
        (("--kv-cache", "inf"), 2, "'--kv-cache': inf"),
        (("--stall-timeout", "4"), 1, "must be at least 5 seconds"),
        (("--timeout", "-1"), 2, "'--timeout': -1.0"),
        (("--max-batch", "0"), 2, "'--max-batch'"),
        (("--image-host", "https://pictures.example.org"), 1, "is not a host name"),
    ],
)
def test_numbers_and_hosts_that_are_none_are_told_by_the_option(
    bundle: Path, words: tuple[str, str], code: int, told: str
) -> None:
    done = CliRunner().invoke(serve, ["--bundle", str(bundle), "--port", "0", *words])
    assert (done.exit_code, done.exception is None or isinstance(done.exception, SystemExit)) == (code, True)
    assert told in done.stderr
    assert "serving" not in done.stderr


def test_a_key_with_spaces_around_it_is_refused(bundle: Path) -> None:
    done = CliRunner().invoke(serve, ["--bundle", str(bundle)], env={"VTX_API_KEY": "secret "})
    assert done.exit_code == 1
    assert "an API key must be" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
def test_an_access_log_that_nobody_reads_holds_up_nothing(bundle: Path, closed: bool) -> None:
    """Its lines are dropped and counted, and stderr says once that nobody reads them."""
    reading, writing = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with started(bundle, "--access-log", "text", stdout=writing) as (process, stderr, _, served):
        os.close(writing)
        if closed:
            os.close(reading)
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WAIT)
        for _ in range(1500):
            connection.request("GET", "/livez")
            assert connection.getresponse().read() == b'{"status":"ok"}'
        connection.close()
        until(lambda: served.metrics()["vtx_log_lines_dropped_total"] > 100, "lines are dropped")
        assert served.chat(asking(user("red?"), k=3)).status == 200
        process.send_signal(signal.SIGTERM)
        told = stderr.read().splitlines()
        assert process.wait(WAIT) in (0, -signal.SIGTERM)
    if not closed:
        os.close(reading)
    said = "nobody reads the access log any more" if closed else "the access log is read too slowly"
    assert [line for line in told if "access log" in line] == [line for line in told if line.startswith(said)]
    assert sum(line.startswith(said) for line in told) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("trusted", "client"), [([], "127.0.0.1"), (["--trusted-proxy", "127.0.0.0/8"], "192.0.2.7")])
def test_only_a_configured_proxy_names_clients(bundle: Path, trusted: list[str], client: str) -> None:
    with started(bundle, "--access-log", "text", *trusted, stdout=subprocess.PIPE) as (process, _, _, served):
        assert process.stdout is not None
        served.request("GET", "/livez", X_Forwarded_For="192.0.2.7")
        assert process.stdout.readline().split()[1] == client


@pytest.mark.slow
def test_too_few_files_are_an_error_at_the_start(bundle: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); from vtx.cli import serve; serve()"
    words = [sys.executable, "-c", code, "--bundle", str(bundle), "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "may open 100 files, a server needs 512; raise `ulimit -n`" in done.stderr
    soft = code.replace("(100, 100)", "(100, 4096)") + "\n"
    wrong = [sys.executable, "-c", soft, "--bundle", str(bundle), "--trusted-proxy", "proxy.example"]
    told = subprocess.run(wrong, capture_output=True, text=True, check=False).stderr
    assert "--trusted-proxy 'proxy.example' is not an IP address or network" in told
