"""Options of commands: a table for each, and those of several declared once; how to load arrives as one `Loading`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from vtx.runtime.backends.engines import AUTO, COMPUTE, DEVICES, GPUS, split_device
from vtx.runtime.bundle.spec.stored import BLOCKS
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.installing import install
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.units import parse_size
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import Guide
    from vtx.tools.common.cluster import Cluster

Declare = Callable[[Callable[..., None]], Callable[..., None]]
PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
PRECISION = click.Choice(list(PRECISIONS), case_sensitive=False)
BLOCK_SIZE = click.Choice([str(block) for block in BLOCKS])
Depth = int | str | None  # K, "auto" for the gates, "card" for the card's by kind of answer, None for no withdrawal


class DepthType(click.ParamType):  # type: ignore[type-arg]
    """`17`, `none`, `auto`, and with `asking` `default` for the bundle's and `card` for its card's by kind of answer.

    With `several` also `none,17,9`, as a tuple; that option is `multiple`, with the callback `joined`.
    """

    name = "depth"

    def __init__(self, *, several: bool = False, auto: bool = True, asking: bool = False) -> None:
        self._several = several
        self._names: dict[str, str | None] = {"none": None}
        self._names |= {
            name: name for name, allowed in (("auto", auto), ("default", asking), ("card", asking)) if allowed
        }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")] if self._several else [value.strip()]
        try:
            depths: list[Depth] = [self._names[part] if part in self._names else int(part) for part in parts]
        except ValueError:
            forms = ["a number", *self._names, *(["a list like none,17,9"] if self._several else [])]
            self.fail(f"{value!r} is not {', '.join(forms[:-1])} or {forms[-1]}", param, ctx)
        return tuple(depths) if self._several else depths[0]


def joined(_: click.Context, __: click.Parameter, given: tuple[tuple[Depth, ...], ...]) -> tuple[Depth, ...]:
    """The lists of an option that was given more than once, as one."""
    return tuple(depth for depths in given for depth in depths)


def whole(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """The number of a choice, None if there is none."""
    return None if value is None else int(value)


def size_of(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The bytes of an option such as --limit 2GB."""
    try:
        return None if value is None else parse_size(value, parameter.opts[0])
    except RequestError as e:
        raise click.BadParameter(str(e)) from e


def option(name: str, value: Any, help: str | None = None, **more: Any) -> Declare:
    """An option; `value` is its type (bool: a flag), or its default, which is shown and gives the type.

    `name`: --option, and behind a space the argument that it fills if that has another name.
    """
    if value is bool:
        more["is_flag"] = True
    elif isinstance(value, type | click.ParamType):
        more["type"] = PATH if value is Path else value
    else:
        more = {"default": value, "show_default": True, "type": type(value), **more}
    return click.option(*name.split(), help=help, **more)


class DeviceType(click.ParamType):  # type: ignore[type-arg]
    name = "device"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(f'{name}[:N]' if name in GPUS else name for name in DEVICES)}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            split_device(value.lower())
        except DeviceError as e:
            self.fail(str(e), param, ctx)
        return value.lower()


_LOADING: dict[str, Declare] = {  # by the field of `Loading` that each fills
    "device": option("--device", "auto", "Device to run on; cuda:1 and tensorrt:1 select the second GPU.",
                     type=DeviceType()),
    "compute": option("--compute", click.Choice([AUTO, *COMPUTE], case_sensitive=False), "Arithmetic: f32, bf16 or "
                      "int8 (openvino), f16 (tensorrt); auto: the fastest that left the answers unchanged at export "
                      "[default: auto].",
                      callback=lambda _, __, value: None if value == AUTO else value),
    "threads": option("--threads", int, "CPU threads [default: all cores]."),
    "fit": option("--fit", click.Choice(["crop", "pad", "squash", "released"]), "Handling of non-square images: crop "
                  "the sides, pad with bars, or squash; released: LLaVA-NeXT tiling as in CDPruner's code, pi0's "
                  "inputs as in openpi [default: as the checkpoint's image processor]."),
    "max_tiles": option("--max-tiles", int, "For tiling models: at most N tiles per image, including the overview of "
                        "the whole image.", metavar="N"),
    "max_pixels": option("--max-pixels", int, "For models with native image resolution: downscale images above N "
                         "pixels.", metavar="N"),
    "image_formats": option("--image-formats", "jpeg,png,webp,bmp,gif", "Accepted image formats; ppm is also possible.",
                            callback=lambda _, __, value: tuple(name.strip() for name in value.split(","))),
    "force": option("--force", bool, "Load even if free memory looks too small."),
    "require_signature": option("--require-signature", Path, "Load the bundle only if it was signed with the private "
                                "half of this Ed25519 key (PEM); every file is hashed first.", metavar="PUBKEY"),
}  # fmt: skip
_GUIDING: dict[str, Declare] = {  # by the argument of `_guide` that each fills
    "json_schema": option("--json-schema", str, "Constrain the answer to JSON of this schema.", metavar="FILE|JSON"),
    "schema_in_prompt": option("--schema-in-prompt", bool, "Also write the schema behind the question."),
    "fill": option("--fill", bool, "Answer freely, then fill in the schema's fields by a question each."),
    "choices": option(
        "--choices", str, "Constrain the answer to one of these; a JSON list is also accepted.", metavar="A,B,..."
    ),
    "regex": option("--regex", str, "Constrain the answer to this regular expression."),
    "grammar": option(
        "--grammar", FILE, "Constrain the answer to this grammar (llguidance's Lark syntax).", metavar="FILE"
    ),
}
_CLUSTER: dict[str, Declare] = {  # by the argument of `_cluster` that each fills
    "ray_address": option("--ray-address", str, "Answer on a Ray cluster: host:port, or auto.", metavar="ADDR"),
    "ray_gpus": option("--ray-gpus", float, "GPUs per Ray worker, may be fractional [default: 1 if --device is a GPU, "
                       "else 0].", metavar="N"),
}  # fmt: skip
_SHARED: dict[str, Declare] = {
    "data": click.argument("data", default="scenes", metavar="[DATA]"),
    "bundle": option("--bundle", click.Path(), "Bundle directory [default: $VTX_BUNDLE, else the last one exported].",
                     envvar="VTX_BUNDLE"),
    "positional": option("--bundle named", click.Path(), "The same as BUNDLE."),
    "hub_model": option("--model hub_model", str, "Hugging Face id, instead of a bundle; downloaded and exported on "
                        "first use, then cached (vtx-cache).", metavar="ORG/NAME[@REVISION]"),
    "hub_precision": option("--precision", PRECISION, "With --model: precision of the decoder weights [default: "
                            "fp16; a quantised checkpoint's own]."),
    "k": click.option("--k", type=DepthType(asking=True), default="default", metavar="N|auto|card|none",
                      help="Prebuilt K; card: that of the bundle's card for the kind of answer [default: the "
                           "bundle's]."),
    "rest": option("--rest", str, "Image tokens that stay from K on, those that the question attends to most: a share "
                   "of them, e.g. 10%, or a number [default: the card's; without a card none].", metavar="N%|N"),
    "ks": option("--k ks", DepthType(several=True), "Prebuilt K, none or auto [default: all in the bundle; with "
                 "--reduce, none].", multiple=True, callback=joined, metavar="K,K,..."),
    "reduce": click.option("--reduce", default="default", metavar="SPEC|none",
                           help="Token reduction, e.g. fastv, mustdrop:192 or lsm:tau=0.9+fastv:ratio=0.75 [default: "
                           "the bundle's first]."),
    "max_new_tokens": option("--max-new-tokens", 256, "Maximum tokens per answer."),
    "image_tokens": option("--image-tokens", int, "At most N tokens per image, for models that see images in tiles, at "
                           "native resolution or within a budget (Gemma 4: 70, 140, 280, 560 or 1120).", metavar="N"),
    "thinking": click.option("--thinking/--no-thinking", default=None, help="Think before the answer, or do not."),
    "max_thinking_tokens": option("--max-thinking-tokens", int, "End the thought after N tokens [default: no limit].",
                                  metavar="N"),
    "images": option("--images", Path, "Image directory [default: that of the data file]."),
    "seed": option("--seed", 0, "Sampling seed."),
    "model": option("--model", "demo", "Checkpoint directory or Hugging Face id; demo: the built-in model."),
    "vision_precision": option("--vision-precision", PRECISION, "Precision of tower and projector [default: "
                               "--precision; int8 for int8 and int4]."),
    "head_precision": option("--head-precision", PRECISION, "Precision of the output matrix [default: --precision; "
                             "int8 for int8 and int4]."),
    "int4_block": option("--int4-block", BLOCK_SIZE, "int4 weights per scale; 128: smaller and faster, less precise; "
                         "32: with zero points, more precise [default: 64].", callback=whole),
    "int8_block": option("--int8-block", BLOCK_SIZE, "int8 weights per scale, which is more precise than a scale per "
                         "row [default: a row's].", callback=whole),
    "bits": option("--bits", float, "Mean bits per weight of an int4 decoder and its head, e.g. 6.3: some of its "
                   "matrices become int8 [default: none do]."),
    "tower": option("--tower", str, "Directory or Hugging Face id of the vision tower, if the checkpoint only names "
                    "it.", metavar="PATH"),
    "allow_pickle": option("--allow-pickle", bool, "Also read the tensors in pickle files; no code in them runs."),
    "chat_template": option("--chat-template", Path, "Jinja file, or name of an original LLaVA template, e.g. "
                            "llava_v1; for checkpoints without a template."),
    "items": option("--items", 1000, "Items to train on, sampled from DATA."),
    "report": option("--json as_json", bool, "Print only the report, as one JSON object."),
}  # fmt: skip


def options(*entries: str | Declare, record: type[Any] | None = None) -> Declare:
    """Give a command these options: by name those of several commands, else its own.

    Its only argument is then a `record` with a field for each option, or without one it has an argument for each.
    The options with which a bundle is loaded are together its `loading`; "guide" stands for those of guided answers,
    which are together its `guide`, and "cluster" for those of a Ray cluster, together its `cluster`.
    """
    names = list[str | Declare]()
    for entry in entries:
        names += _GROUPS[entry][0] if entry in ("guide", "cluster") else [entry]

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def collected(**values: Any) -> None:
            for argument, (group, build) in _GROUPS.items():
                if parts := {name: values.pop(name) for name in group if name in names}:
                    values[argument] = build(**parts)
            if record is None:
                function(**values)
            else:
                function(record(**values))

        result: Callable[..., None] = collected
        declared = {**_LOADING, **_GUIDING, **_CLUSTER, **_SHARED}
        for entry in reversed(names):
            declaration = declared[entry] if isinstance(entry, str) else entry
            result = declaration(result)
        return result

    return declare


def _guide(
    json_schema: str | None = None,
    choices: str | None = None,
    regex: str | None = None,
    grammar: Path | None = None,
    *,
    schema_in_prompt: bool = False,
    fill: bool = False,
) -> Guide | None:
    """The form of answers that these options name, or None. Raises RequestError."""
    for name, value in (("--schema-in-prompt", schema_in_prompt), ("--fill", fill)):
        if value and json_schema is None:
            raise RequestError(f"{name} is for a schema; add --json-schema, or leave {name} out")
    if (json_schema, choices, regex, grammar) == (None, None, None, None):
        return None
    from vtx.runtime.bundle.files import read_text_file
    from vtx.runtime.prompt.guiding import MAX_GRAMMAR, MAX_SCHEMA, Guide
    from vtx.runtime.prompt.text import utf8

    def read(file: Path, limit: int) -> str:
        return utf8(read_text_file(file, limit), file.name, RequestError)

    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        json_schema = read(Path(json_schema), MAX_SCHEMA)
    if choices is not None and not choices.strip():
        raise RequestError("--choices is empty; write A,B,... or a JSON list")
    listed = None if choices is None else choices.split(",")
    if choices is not None and choices.lstrip().startswith("["):
        try:
            listed = json.loads(choices)
        except ValueError as e:
            raise RequestError(f"--choices is not a JSON list ({e}); write A,B,... or correct it") from e
    text = None if grammar is None else read(grammar, MAX_GRAMMAR)
    return Guide(json_schema, listed, regex, text, schema_in_prompt=schema_in_prompt, fill=fill)


def _cluster(ray_address: str | None, ray_gpus: float | None) -> Cluster | None:
    """The cluster that these options name, or None. Raises RequestError."""
    if ray_address is None:
        if ray_gpus is not None:
            raise RequestError("--ray-gpus is for the workers of a cluster; give its --ray-address, too")
        return None
    from vtx.tools.common.cluster import Cluster

    if ray_gpus is not None and not 0 <= ray_gpus < math.inf:
        raise RequestError(f"--ray-gpus is {ray_gpus}; it must be a number of at least 0")
    return Cluster(ray_address, ray_gpus)


# Of options that are one argument: by name their declarations, and what makes the argument from their values.
_GROUPS: dict[str, tuple[dict[str, Declare], Callable[..., Any]]] = {
    "loading": (_LOADING, Loading),
    "guide": (_GUIDING, _guide),
    "cluster": (_CLUSTER, _cluster),
}


def need_exporter() -> None:
    """Raise DeviceError, with the command that installs it, if a library of the exporter is missing."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # errors of a model are reported by vtx
    try:
        import vtx.exporter.bundling.export  # noqa: F401
    except ImportError as e:
        name = click.get_current_context().info_name
        raise DeviceError(f"{name} needs {e.name} here; {install('export')}") from e


def named_once(bundle: str | None, named: str | None) -> str | None:
    """The bundle that is named as an argument or by --bundle. Raises click's UsageError if by both."""
    if named is not None and given("bundle"):
        raise click.UsageError("BUNDLE and --bundle both name a bundle; leave one out")
    return named or bundle


def given(name: str) -> bool:
    """Return True if the command line gives an option, even with its default value."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
