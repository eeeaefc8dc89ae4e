"""The house itself: who imports whom, what an import loads, which names and commands there are."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import vtx
from vtx import cli

ROOT = Path(__file__).parents[2]
RUNTIME_MAY_IMPORT = {
    "av",
    "click",
    "cryptography",
    "cuda",
    "jinja2",
    "llguidance",
    "numpy",
    "onnxruntime",
    "opentelemetry",
    "openvino",
    "PIL",
    "rich",
    "starlette",
    "uvicorn",
    "h11",
    "tokenizers",
    "tomli",
    "vtx",
}
EXPORTING = {"huggingface_hub", "onnx", "onnx_ir", "safetensors", "torch", "transformers"}
HEAVY = EXPORTING | {
    "av",
    "jinja2",
    "numpy",
    "onnxruntime",
    "opentelemetry",
    "openvino",
    "PIL",
    "polygraphy",
    "rich",
    "starlette",
    "uvicorn",
    "h11",
    "tokenizers",
}
SCRIPTS = dict(
    script
    for path in ("pyproject.toml", "plugins/tune/pyproject.toml")
    for script in re.findall(r'^vtx-([\w-]+) = "vtx\.start:(\w+)"$', (ROOT / path).read_text(), re.MULTILINE)
)


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a new interpreter has loaded after `code`."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at its top or inside a function."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


# --- imports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["runtime", "profiles"])
def test_the_runtime_imports_nothing_that_a_device_need_not_have(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        if path.name == "hook-vtx.py":  # PyInstaller runs it
            continue
        roots = {name.partition(".")[0] for name in imported(path)} - {*sys.stdlib_module_names, "tomllib"}
        assert roots <= RUNTIME_MAY_IMPORT, path


def test_engines_are_imported_in_functions_only() -> None:
    for path in (ROOT / "runtime").rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        top = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        top |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
        assert not any(name.startswith(("cuda", "onnxruntime", "openvino", "tensorrt")) for name in top), path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what import-linter looks at, to break."""
    for name in ("commands", "exporter", "profiles", "runtime", "src", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("demo_model"))
    for name in ("cli.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    env = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


# Modules, what each must not import, and whether a line within a function does.
AGAINST_THE_DIRECTION = (
    ("runtime/units", "torch", False),
    ("runtime/units", "onnx", True),
    ("runtime/units", "vtx.exporter.graphs.builder", False),
    ("profiles/__init__", "vtx.runtime.units", False),
    ("exporter/graphs/builder", "vtx.cli", False),
    ("exporter/weights/plan", "vtx.exporter.graphs.builder", False),
    ("tools/bench/work", "vtx.exporter.weights.plan", False),
    ("tools/data/items", "vtx.tools.bench.work", False),
    ("exporter/python", "vtx.commands.export", False),
    ("exporter/bundling/export", "vtx.exporter.calibration.source", True),
    ("runtime/bundle/spec/manifest", "vtx.runtime.prompt.text", False),
    ("runtime/policies/base", "vtx.runtime.session.session", False),
)


def test_imports_against_the_direction_are_found(tree: Path) -> None:
    """That there are none, `make imports` shows."""
    for module, target, late in AGAINST_THE_DIRECTION:
        with (tree / f"{module}.py").open("a", encoding="utf-8") as out:
            out.write(f"\ndef late() -> None:\n    import {target}\n" if late else f"\nimport {target}\n")
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    for module, target, _ in AGAINST_THE_DIRECTION:
        importer = "vtx." + module.removesuffix("/__init__").replace("/", ".")
        assert f" {importer} -> {target} (l." in done.stdout


def test_importing_vtx_loads_no_library() -> None:
    assert not loaded_by("import vtx") & HEAVY


def test_the_commands_load_no_library_before_they_run() -> None:
    assert not loaded_by("import vtx.cli") & HEAVY


def test_vtx_run_loads_no_other_command() -> None:
    script = "import sys; from vtx.cli import run; print(*[m for m in sys.modules if 'vtx.commands.' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {name.split(".")[2] for name in done.stdout.split()} == {"run", "shared"}


def test_the_runtime_loads_no_exporting_library() -> None:
    assert (
        not loaded_by(
            "import vtx; vtx.load, vtx.Sampling; import vtx.runtime.backends.ort.backend, vtx.runtime.report.golden"
        )
        & EXPORTING
    )


# --- names ----------------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_public_names_are_these() -> None:
    names = {
        "ActionLoop", "Answer", "AnswerStream", "AsyncAnswerStream", "Chat", "Continuation", "Conversation", "Guide",
        "Model", "Options", "Sampling", "Stats", "ToolCall", "Tools", "bgr", "export", "load", "video",
    }  # fmt: skip
    errors = {
        "BundleError", "CheckpointError", "ContextError", "ConversationBusyError", "DeadlineError", "DeviceError",
        "ExportError", "ImageError", "ModelClosedError", "RequestError", "TemplateError", "UnsupportedModelError",
        "VtxError",
    }  # fmt: skip
    assert set(vtx.__all__) == names | errors | {"__version__"}
    assert set(dir(vtx)) == set(vtx.__all__)
    for name in names | errors:
        assert getattr(vtx, name).__doc__, name
    assert not hasattr(vtx, "Nothing")


def test_every_error_is_exported() -> None:
    from vtx.runtime import errors

    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.VtxError):
            assert getattr(vtx, name) is kind


def test_the_calls_that_users_write_keep_their_parameters() -> None:
    assert parameters(vtx.load)[:5] == ["bundle", "device", "compute", "threads", "force"]
    assert parameters(vtx.load)[5:] == ["require_signature", "fit", "max_tiles", "max_pixels", "image_formats"]
    assert parameters(vtx.Model.open) == ["images", "system", "fit", "prefix_file", "image_tokens"]
    asking = ["question", "k", "options", "keywords"]
    assert parameters(vtx.Model.ask) == asking
    kind = vtx.Conversation
    for call in (kind.ask, kind.stream, kind.aask, kind.astream):
        assert parameters(call) == [*asking[:3], "image_tokens", *asking[3:]]
    for call in (vtx.Model.generate, vtx.Model.stream, vtx.Model.agenerate):
        assert parameters(call) == ["messages", *asking[1:]]
    assert parameters(vtx.Model.batch) == ["items", "k", "options", "threads", "keywords"]
    assert parameters(vtx.Conversation.chat) == ["k", "reduce"]
    for call in (vtx.Chat.ask, vtx.Chat.stream, vtx.Chat.aask, vtx.Chat.astream):
        assert parameters(call) == ["question", "options", "keywords"]
    assert parameters(vtx.Options)[:3] == ["max_new_tokens", "ignore_eos", "sampling"]  # more may follow
    assert parameters(vtx.Sampling)[:4] == ["temperature", "top_p", "top_k", "seed"]


def test_the_api_reference_describes_every_public_name() -> None:
    pages = [ROOT / "docs" / "reference" / name for name in ("api.md", "api-answers.md", "api-actions.md")]
    described = set(
        re.findall(r"^### vtx\.(\w+)$", "".join(p.read_text(encoding="utf-8") for p in pages), re.MULTILINE)
    )
    assert described == set(vtx.__all__) - {"__version__"}


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert vtx.__version__ == version("vtx-edge")


# --- commands -------------------------------------------------------------------------------------


def help_of(command: click.Command) -> str:
    done = CliRunner().invoke(command, ["--help"], prog_name="vtx")
    assert done.exit_code == 0
    return done.output


def test_vtx_lists_every_command_that_is_installed() -> None:
    assert {"doctor", "export", "inspect", "run"} <= set(SCRIPTS)
    _, _, listed = help_of(cli.main).partition("Commands:")
    assert {line.split()[0] for line in listed.splitlines() if re.match(r"  \S", line)} == set(SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_command_stands_alone_and_shows_examples(name: str) -> None:
    command = getattr(cli, SCRIPTS[name])
    assert command is cli.main.commands[name]
    _, _, examples = help_of(command).partition("Examples:")
    assert f"vtx-{name}" in examples
