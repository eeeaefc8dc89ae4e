"""The manifest: what it accepts comes back as it was, and nothing else than BundleError comes out of the rest."""

from __future__ import annotations

import copy
import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import bundles
from vtx.cli import export as export_command
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import FORMAT, MAX_BYTES, LayoutSpec, VideoSpec, check_inside
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.bundle.vtx_json import parse_manifest, write_manifest
from vtx.runtime.errors import BundleError

Way = tuple[str | int, ...]


@pytest.fixture(scope="module")
def sound(whole: Path) -> dict[str, Any]:
    return bundles.manifest(whole)


def ways(value: Any, way: Way = ()) -> Iterator[Way]:
    """The way to every value of a JSON document, but into the free-form record and the parts that no runtime reads.

    Of a list's items those to the first and to the last.
    """
    yield way
    if way != ("record",) and way[-2:-1] != ("parts",) and isinstance(value, dict | list):
        entries = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inner in entries if isinstance(value, dict) else [*entries[:1], *entries[1:][-1:]]:
            yield from ways(inner, (*way, key))


def at(value: Any, way: Way) -> Any:
    for step in way:
        value = value[step]
    return value


def put(value: Any, way: Way, new: Any) -> Any:
    """A copy of `value` with `new` at the end of `way`; what lies beside the way is shared."""
    if not way:
        return new
    step, *further = way
    changed = copy.copy(value)
    changed[step] = put(value[step], tuple(further), new) if further else new
    return changed


def strict_tables(sound: dict[str, Any]) -> list[Way]:
    """The objects whose keys are fixed: all but those that hold names of a model's own."""
    free = {("dialects",), ("files",), ("layout", "parameters"), ("record",)}
    free |= {("text", "control_tokens"), ("model", "parts", "text"), ("model", "parts", "vision")}
    return [way for way in ways(sound) if isinstance(at(sound, way), dict) and way not in free]


def refuse(value: Any) -> str:
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(value))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_manifest_comes_back_as_it_was_written(sound: dict[str, Any]) -> None:
    manifest = parse_manifest(json.dumps(sound))
    assert json.loads(write_manifest(manifest)) == sound
    assert parse_manifest(write_manifest(manifest)) == manifest


def test_a_newer_format_says_to_upgrade(sound: dict[str, Any]) -> None:
    assert "install a newer vtx" in refuse({**sound, "format": sound["format"] + 1})


def test_a_newer_format_is_told_before_its_unknown_keys(sound: dict[str, Any]) -> None:
    assert "newer" in refuse({"format": sound["format"] + 1, "something": "else"})


def test_an_older_format_names_the_command_that_makes_the_bundle_again(sound: dict[str, Any]) -> None:
    old = {
        "format": 2,
        "default_k": 5,
        "dialects": {"ort": {}, "plain": {}},
        "record": {
            "source": {"model": "my llava"},
            "options": {
                "k": [5, 3], "reduce": ["lsm+fastv:k=2,ratio=0.5"], "precision": "int4", "vision_precision": "int8",
                "head_precision": "int8", "kv_precision": "fp16", "max_context": None,
            },
        },
    }  # fmt: skip
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(old), "/bundles/old one")
    assert str(caught.value) == (
        f"the bundle has format 2, older than this vtx reads ({FORMAT}); make it again with: vtx-export --model "
        "'my llava' --k 5,3 --dialect ort,plain --precision int4 --vision-precision int8 --head-precision int8 "
        "--kv-precision fp16 --reduce lsm+fastv:k=2,ratio=0.5 --out '/bundles/old one' --force"
    )


@pytest.mark.slow
def test_the_command_that_makes_a_bundle_again_is_one_that_vtx_export_takes(
    sound: dict[str, Any], tmp_path: Path
) -> None:
    message = refuse({**sound, "format": 1})
    words = shlex.split(message.partition("make it again with: ")[2])
    assert words[0] == "vtx-export"
    out = str(tmp_path / "again")
    done = CliRunner().invoke(export_command, [*words[1:], "--out", out], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    again = bundles.manifest(Path(out))
    same = ("model", "precision", "vision_precision", "head_precision", "max_context", "variants", "stages", "dialects")
    assert {key: again[key] for key in same} == {key: sound[key] for key in same}


@pytest.mark.parametrize(
    "record", [None, 1, [], {}, {"options": []}, {"options": {"model": 3}}, {"options": {"model": "a\nb"}}]
)
def test_an_older_format_without_a_record_says_to_export_again(record: Any) -> None:
    message = refuse({"format": 1, "record": record})
    assert message.endswith("export it again with vtx-export")


@pytest.mark.parametrize("format", ["1", 1.0, True, None, [1]])
def test_a_format_that_is_no_whole_number_is_refused(sound: dict[str, Any], format: Any) -> None:
    assert "format" in refuse({**sound, "format": format})


@pytest.mark.slow
def test_an_unknown_key_at_any_level_is_refused(sound: dict[str, Any]) -> None:
    tables = strict_tables(sound)
    assert len(tables) > 10
    for way in tables:
        assert "surprise" in refuse(put(sound, (*way, "surprise"), 1)), way


@pytest.mark.slow
def test_a_missing_key_at_any_level_is_refused(sound: dict[str, Any]) -> None:
    for way in strict_tables(sound):
        table = at(sound, way)
        for key in table:
            others = {name: value for name, value in table.items() if name != key}
            assert key in refuse(put(sound, way, others)), (way, key)


@pytest.mark.slow
def test_a_value_of_another_type_is_refused(sound: dict[str, Any]) -> None:
    wrong: dict[type, list[Any]] = {
        int: ["1", None, 1.5, True, [], {}],
        str: [1, True, [], {}],
        bool: [1, "true", None, []],
        list: [1, "x", {}, [None], [{}]],
        dict: [1, "x", None, []],
        float: ["1", True, [], None],
    }
    nullable = {("image", "pad"), ("default_k",)}
    for number, way in enumerate(ways(sound)):
        value = at(sound, way)
        if way[:1] == ("record",) or value is None or way in nullable:
            continue
        if way[:2] == ("layout", "parameters") and len(way) > 2:
            continue  # the layout itself reads these: tests/runtime/vision/layouts
        for new in wrong[type(value)][number % 3 :: 3]:
            if way[0:1] == ("image",) or (way[0:1] == ("text",) and new is None):
                continue  # these two have tests of their own
            if way[-1:] == ("parts",) and new == [None]:
                continue  # None is the place of an image
            with pytest.raises(BundleError):
                parse_manifest(json.dumps(put(sound, way, new)))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a\\b", "C:/x", "C:x", "\0", "", "weights/.."])
def test_a_path_that_leaves_the_bundle_is_refused(sound: dict[str, Any], name: str) -> None:
    with pytest.raises(BundleError, match="leaves the bundle"):
        check_inside(name)
    record = sound["files"][sound["rope"]]
    assert "leaves the bundle" in refuse(put(sound, ("files", name), record))
    assert "leaves the bundle" in refuse({**put(sound, ("files", name), record), "rope": name})


def test_a_graph_without_a_checksum_is_refused(sound: dict[str, Any]) -> None:
    for way in [("rope",), ("golden",), ("dialects", "ort", "head"), ("dialects", "ort", "stages", 0)]:
        assert "elsewhere.onnx" in refuse(put(sound, way, "elsewhere.onnx"))


@pytest.mark.parametrize(
    "change",
    [
        {"variants": [5, 3]},
        {"variants": [3, 3]},
        {"variants": [1, 3, 5]},
        {"variants": [3, 5, 9]},
        {"default_k": 4},
        {"default_k": "auto"},
        {"default_k": "sometimes"},
        {"kv_dtype": "bfloat16"},
        {"precision": "int3"},
        {"max_context": 0},
        {"max_context": 1 << 24},
        {"dialects": {}},
    ],
    ids=str,
)
def test_values_that_contradict_each_other_are_refused(sound: dict[str, Any], change: dict[str, Any]) -> None:
    refuse({**sound, **change})


def test_a_stage_may_end_where_no_k_is_and_must_where_one_is(sound: dict[str, Any]) -> None:
    fewer = {**sound, "variants": [5], "default_k": 5}
    parse_manifest(json.dumps(fewer))
    assert "do not cut" in refuse({**fewer, "variants": [4, 5]})


def test_queries_and_the_graph_that_scores_them_go_together(sound: dict[str, Any]) -> None:
    unscored = put(put(sound, ("stages", 0, "query"), False), ("stages", 1, "query"), False)
    assert "score graph" in refuse(unscored)
    assert "score graph" in refuse(put(sound, ("dialects", "ort", "score"), None))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_has_a_file_for_each_stage_and_gate(sound: dict[str, Any], dialect: str) -> None:
    stages = sound["dialects"][dialect]["stages"]
    assert "2 stages and 0 gates, the bundle 3 and 0" in refuse(put(sound, ("dialects", dialect, "stages"), stages[1:]))
    assert "3 stages and 1 gates" in refuse(put(sound, ("dialects", dialect, "gates"), stages[:1]))


def test_a_manifest_whose_dialects_are_cut_apart_cannot_be_written(whole: Path) -> None:
    manifest = Bundle.open(whole).manifest
    plain = manifest.dialects["plain"]
    other = dataclasses.replace(plain, stages=plain.stages[1:])
    with pytest.raises(BundleError, match="'plain' has 2 stages"):
        dataclasses.replace(manifest, dialects={**manifest.dialects, "plain": other})


def test_gates_stand_at_variants(sound: dict[str, Any]) -> None:
    file = sound["rope"]
    gated = {**sound, "dialects": {name: {**graphs, "gates": [file]} for name, graphs in sound["dialects"].items()}}
    assert "interface" in refuse({**gated, "gates": [5]}), "sound but for the interface, which has no gate yet"
    assert "do not fit" in refuse({**gated, "gates": [4]})


@pytest.mark.slow
def test_what_graphs_take_and_give_is_declared_and_compared(sound: dict[str, Any]) -> None:
    declared = sound["interface"]
    stage = declared["dialects"]["ort"]["stage"]
    assert stage["inputs"]["hidden"] == {"dtype": "float32", "shape": ["tokens", sound["model"]["hidden"]]}
    assert set(stage["outputs"]) == {"hidden_out", "present_key.{layer}", "present_value.{layer}"}
    assert declared["constants"]["class_token"] == -1
    for way in ways(declared):
        value = at(declared, way)
        if isinstance(value, dict | list):
            continue
        new = value + 1 if isinstance(value, int | float) else f"{value}x"
        assert "this vtx knows" in refuse(put(sound, ("interface", *way), new)), way


def test_the_scales_of_int8_keys_are_a_file_of_the_bundle(sound: dict[str, Any]) -> None:
    assert "scales go together" in refuse({**sound, "kv_scales": sound["rope"]})
    assert "scales go together" in refuse({**sound, "kv_dtype": "int8"})


def test_no_stage_is_scored_after_the_last_layer(sound: dict[str, Any]) -> None:
    scored = put(sound, ("stages", 2, "query"), True)
    assert "do not cut" in refuse(put(scored, ("dialects", "ort", "score"), sound["rope"]))


def test_stages_must_cut_the_layers_at_the_variants(sound: dict[str, Any]) -> None:
    stages = ("stages",)
    whole = at(sound, stages)
    refuse(put(sound, stages, whole[:-1]))
    refuse(put(sound, stages, whole[::-1]))
    refuse(put(sound, stages, [*whole, whole[-1]]))
    refuse(put(sound, (*stages, 0, "last"), 3))
    refuse(put(sound, (*stages, 0, "first"), 0))
    refuse(put(sound, ("model", "layers"), 9))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [0, -1, 1 << 31, 10**400])
def test_sizes_that_no_model_has_are_refused(sound: dict[str, Any], size: int) -> None:
    for way in ways(sound["model"]):
        value = at(sound["model"], way)
        if isinstance(value, int) and not isinstance(value, bool) and "feature_layers" not in way:
            assert len(refuse(put(sound, ("model", *way), size))) < 600, way
    assert len(refuse(put(sound, ("layout", "max_tokens"), size))) < 600


@pytest.mark.parametrize("value", [0.0, -1e-5, 10**400])
def test_numbers_that_no_model_has_are_refused(sound: dict[str, Any], value: float) -> None:
    for way in (("eps",), ("rope", "theta")):
        assert way[-1] in refuse(put(sound, ("model", *way), value))


def test_an_image_larger_than_the_context_is_refused(sound: dict[str, Any]) -> None:
    assert "does not fit" in refuse(put(sound, ("layout", "max_tokens"), sound["max_context"]))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
        b'{"format": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"format": 1, "vtx": "\\ud800"}',
    ],
    ids=range(12),
)
def test_what_is_no_sound_json_is_refused(text: bytes) -> None:
    with pytest.raises(BundleError):
        parse_manifest(text)


def test_a_deep_record_is_refused(sound: dict[str, Any]) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert "deep" in refuse({**sound, "record": {"x": deep}})


def test_a_manifest_beyond_its_size_limit_is_not_read(whole: Path, tmp_path: Path) -> None:
    other = bundles.copy(whole, tmp_path / "copy")
    with (other / "vtx.json").open("ab") as file:
        file.write(b" " * MAX_BYTES)
    with pytest.raises(BundleError, match="limit"):
        Bundle.open(other)


@pytest.mark.parametrize("parameters", [{}, {"tokens": "4"}, {"tokens": 0}])
def test_a_graph_of_frames_has_a_number_of_tokens(parameters: dict[str, Any]) -> None:
    image = ImageSettings(None, (56, 56), "bicubic", None, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    with pytest.raises(BundleError, match=r"vtx.json: video: tokens is .*, outside 1\.\.2147483647"):
        VideoSpec(LayoutSpec("frames", 32, parameters), image, own_graph=True)


def test_a_manifest_cannot_be_altered_in_memory(sound: dict[str, Any]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_manifest(json.dumps(sound)).rope = "x"  # type: ignore[misc]
