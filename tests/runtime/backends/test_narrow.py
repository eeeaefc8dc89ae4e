"""Weights on OpenVINO stay as narrow as the bundle holds them, and their files' pages do not stay in memory."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.exported import Models
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.tiny import Tiny, random_image
from vtx.runtime.backends.openvino.backend import DIALECT, OpenvinoBackend, arithmetic
from vtx.runtime.backends.openvino.narrow import keep_narrow, releasing_pages
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.vision.tokens import TokenStates

openvino = pytest.importorskip("openvino", reason='openvino is not installed; pip install "vtx-edge[openvino]"')

NARROW = {"fp16": {"f16"}, "bf16": {"bf16"}}
LONGEST = 30  # seconds until pages are taken to stay


NATIVE = Tiny(family="qwen2_vl", text="qwen2", tokenizer="bytes", layers=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Models:
    return Models(tmp_path_factory.mktemp("narrow"), tiny_checkpoint, ("ort", DIALECT))


@pytest.fixture(scope="module")
def bundles(models: Models) -> Callable[[str], Bundle]:
    return lambda precision: models(precision=precision).bundle


def read(bundle: Bundle, graph: str) -> Any:
    graphs = bundle.manifest.dialects[DIALECT]
    name = {"vision": graphs.vision, "embed": graphs.embed, "head": graphs.head, "stage": graphs.stages[0]}[graph]
    model = openvino.Core().read_model(str(bundle.path(name)))
    if graph == "vision":
        image = bundle.manifest.image
        model.reshape({names.PIXELS: [1, 3, *image.size]})
    return model


def matrices(model: Any, precision: str, compute: str = "f32") -> set[str]:
    """The types of what a compiled graph multiplies by, or gathers from."""
    settings = arithmetic(compute, precision, 1)
    nodes = openvino.Core().compile_model(model, "CPU", settings).get_runtime_model().get_ordered_ops()
    readers = [node for node in nodes if said(node, "layerType") in ("FullyConnected", "Gather")]
    tables = [node.input_value(said(node, "layerType") == "FullyConnected").get_node() for node in readers]
    kept = [node for node in tables if said(node, "layerType") == "Const" and len(node.get_output_shape(0)) == 2]
    return {said(node, "outputPrecisions") for node in kept}


def said(node: Any, key: str) -> str:
    told = node.get_rt_info()
    return str(told[key].value) if key in told else ""


@pytest.mark.sampled
@pytest.mark.parametrize("graph", ["embed", "stage", "head"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_matrices_stay_narrow(bundles: Callable[[str], Bundle], precision: str, graph: str) -> None:
    model = read(bundles(precision), graph)
    keep_narrow(model, "f32")
    assert matrices(model, precision) == NARROW[precision]


@pytest.mark.parametrize("graph", ["stage", "head"])
def test_matrices_of_bfloat16_are_multiplied_as_such_in_bfloat16(
    bundles: Callable[[str], Bundle], graph: str, needs_arithmetic: Callable[[str], None]
) -> None:
    needs_arithmetic("bf16")
    model = read(bundles("bf16"), graph)
    before = [port.get_names() for port in model.outputs]
    keep_narrow(model, "bf16")
    widened = [node.input_value(0) for node in model.get_ordered_ops() if node.get_type_name() == "Convert"]
    tables = [value for value in widened if value.get_node().get_type_name() == "Constant"]
    assert not [table for table in tables if len(table.get_shape()) == 2]
    assert [port.get_names() for port in model.outputs] == before
    assert matrices(model, "bf16", "bf16") == {"bf16"}


def test_without_the_marks_they_are_widened(bundles: Callable[[str], Bundle]) -> None:
    assert matrices(read(bundles("fp16"), "stage"), "fp16") == {"f32"}


def test_a_towers_integers_are_not_multiplied_by_their_scales(bundles: Callable[[str], Bundle]) -> None:
    model = read(bundles("int8"), "vision")
    assert matrices(model, "int8") >= {"i8", "f32"}, "this tower proves nothing"
    keep_narrow(model, "f32")
    assert matrices(model, "int8") == {"i8"}


def test_what_a_graph_gives_out_keeps_its_shape() -> None:
    """As the patches that CLIP's text tower is compared with."""
    from openvino import opset13 as ops

    rows = ops.parameter([-1, 9, 32], np.float32)
    integers = ops.convert(ops.constant(np.ones((16, 32), np.int8)), "f32")
    weights = ops.multiply(integers, ops.constant(np.ones((16, 1), np.float32)))
    given = ops.matmul(ops.reshape(rows, ops.constant([-1, 32]), False), weights, False, True)
    biased = ops.add(given, ops.constant(np.ones(16, np.float32)))
    model = openvino.Model([biased], [rows], "patches")
    before = model.output(0).get_partial_shape()
    keep_narrow(model, "f32")
    assert len(before) == 2
    assert model.output(0).get_partial_shape() == before


@pytest.mark.parametrize("compute", ["f32", "int8"])
def test_towers_of_one_image_at_its_own_size_compute_the_same_with_integers(
    models: Models, compute: str, needs_arithmetic: Callable[[str], None]
) -> None:
    needs_arithmetic(compute)
    model = models(NATIVE, (), "int4")  # the tower's weights are int8; a row of the decoder's is one block
    with closing(OpenvinoBackend(model.bundle, 1, compute)) as backend:
        for shape in ((150, 60), (40, 90)):
            image = model.loaded.images.prepare(random_image(1, shape))
            found, wanted = (image.encode(engine).hidden for engine in (backend, model.backend))
            assert_near(found, wanted, 0.03 * np.abs(wanted).max())
        hidden = np.ones((40, NATIVE.hidden), np.float32)
        ran = [engine.stage(0, 64).append(TokenStates(hidden), np.arange(40)) for engine in (backend, model.backend)]
    assert_near(ran[0], ran[1], 0.05 * np.abs(ran[1]).max())


def gathering(table: Any, numbers: list[int]) -> Any:
    """Rows of a table whose numbers are in the graph, in float32, added to an input [n, width]."""
    from openvino import opset13 as ops

    rows = ops.gather(table, ops.constant(np.array(numbers, np.int64)), ops.constant(np.int64(0)))
    given = ops.parameter([-1, table.get_output_shape(0)[1]], np.float32)
    return openvino.Model([ops.add(given, ops.convert(rows, "f32"))], [given], "rows")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_rows_whose_numbers_are_in_the_graph_are_the_tables(kind: str) -> None:
    from openvino import opset13 as ops

    values = np.random.default_rng(0).standard_normal((9, 32)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else values.astype(np.float16)
    wanted = (bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else bits.astype(np.float32)
    model = gathering(ops.constant(openvino.Tensor(bits, bits.shape, getattr(openvino.Type, kind))), [7, 2])
    keep_narrow(model, "f32")
    found = openvino.Core().compile_model(model, "CPU")([np.zeros((2, 32), np.float32)])[0]
    np.testing.assert_array_equal(found, wanted[[7, 2]])


ROWS, WIDTH = 1 << 18, 512  # a table of 256 MiB, which OpenVINO would widen to 512
COMPILING = """
import re, sys
import numpy as np, openvino
from tests.runtime.backends.test_narrow import ROWS, WIDTH, gathering
from vtx.runtime.backends.openvino.narrow import keep_narrow
from openvino import opset13 as ops

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))

core = openvino.Core()
core.compile_model(gathering(ops.constant(np.zeros((2, 32), np.float16)), [1]), "CPU")  # what the first graph loads
table = np.memmap(sys.argv[1], np.float16, "r+", shape=(ROWS, WIDTH))
model = gathering(ops.constant(table, shared_memory=True), [3])
before = peak()
keep_narrow(model, "f32")
core.compile_model(model, "CPU")
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_table_of_which_a_graph_reads_one_row_is_not_widened(tmp_path: Path) -> None:
    file = tmp_path / "table"
    with file.open("wb") as table:
        table.truncate(2 * ROWS * WIDTH)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, str(file)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100  # MiB


@pytest.mark.parametrize("graph", ["vision", "embed"])
def test_pages_of_weights_that_the_first_run_reads_are_let_go(models: Models, graph: str) -> None:
    """A tower of images at their own size is packed when it first runs."""
    model = models(NATIVE, (), "int4")
    with closing(OpenvinoBackend(model.bundle, 1)) as backend:
        if graph == "vision":
            model.loaded.images.prepare(random_image(1, (150, 60))).encode(backend)
        else:
            backend.embed(np.arange(9))
        assert resident(model.bundle.folder) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_weights_are_let_go_and_can_be_read_again(bundles: Callable[[str], Bundle]) -> None:
    model = read(bundles("fp16"), "stage")
    constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    bundle, limit = bundles("fp16").folder, time.monotonic() + LONGEST
    with releasing_pages(model):
        before = [np.array(node.data) for node in constants]
        while resident(bundle):
            assert time.monotonic() < limit, "pages stay until the graph is loaded"
            time.sleep(0.01)
        assert all(np.array_equal(old, node.data) for old, node in zip(before, constants, strict=True))
    assert resident(bundle) == 0
    assert all(np.array_equal(old, node.data) for old, node in zip(before, constants, strict=True))
    assert resident(bundle) > 0


def resident(folder: Path) -> int:
    """kB of the weights' mappings that are resident."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = str(folder.resolve() / "weights") in line
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found
