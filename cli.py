"""The commands that answer and look, and the list of all. They parse, call and print.

The others are imported when they are asked for by name, so that `vtx-run` is quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtx.commands.shared.options import (
    bundle_option,
    compute_option,
    device_option,
    fit_option,
    max_pixels_option,
    max_tiles_option,
    threads_option,
)
from vtx.runtime.process import without_collections
from vtx.runtime.terminal.console import Group, command, note, require_signature_option, say, say_json, table
from vtx.runtime.terminal.depth import DepthType
from vtx.runtime.terminal.last import last_bundle
from vtx.tools.common.demo import about

if TYPE_CHECKING:
    from PIL.Image import Image

    from vtx.commands.batch import batch as batch
    from vtx.commands.bench import bench as bench
    from vtx.commands.build import build as build
    from vtx.commands.calibrate import calibrate as calibrate
    from vtx.commands.calibrate import train_gate as train_gate
    from vtx.commands.chat import chat as chat
    from vtx.commands.doctor import doctor as doctor
    from vtx.commands.evaluate import evaluate as evaluate
    from vtx.commands.export import export as export
    from vtx.commands.plan import plan as plan
    from vtx.commands.serve import serve as serve
    from vtx.commands.tune import tune as tune
    from vtx.runtime.api.answer import Stats
    from vtx.runtime.api.conversation import Conversation
    from vtx.runtime.api.model import Model
    from vtx.runtime.api.options import Options
    from vtx.runtime.api.stream import AnswerStream
    from vtx.runtime.vision.video import Video

    main: click.Group


# --- vtx-run --------------------------------------------------------------------------------------


@command(
    epilog='vtx-run image.jpg "What color is the circle?"\n'
    'vtx-run image.jpg "How many shapes are there?" "Where is the star?" --k 16 --json\n'
    'cat image.jpg | vtx-run - "Is there a red star?"\n'
    'vtx-run a.jpg --image b.jpg "Which picture shows a star?"\n'
    'vtx-run clip.mp4 "What happens?" --frames 16\n'
    'vtx-run --text-only "Who are you?"',
    leaves=True,
)
@click.argument("arguments", nargs=-1, required=True, metavar="IMAGE|VIDEO QUESTION [QUESTION ...]")
@bundle_option
@click.option(
    "--k",
    type=DepthType(default=True),
    default="default",
    metavar="N|auto|none",
    help="A prebuilt K [default: the bundle's].",
)
@click.option(
    "--reduce",
    default="default",
    metavar="SPEC|none",
    help="Leave out vision tokens: fastv, mustdrop:192, lsm:tau=0.9+fastv:ratio=0.75 [default: the bundle's first].",
)
@click.option("--show-tokens", type=click.Path(path_type=Path), help="Draw the patches that survive each cut, as PNG.")
@click.option("--gate-threshold", type=float, default=0.5, show_default=True, help="With --k auto: exit above this.")
@click.option("--image", "more", multiple=True, type=click.Path(), help="One more image in the same prompt.")
@click.option("--video", "videos", multiple=True, type=click.Path(), help="One more video in the same prompt.")
@click.option("--frames", type=int, metavar="N", help="Frames sampled from each video [default: the bundle's].")
@fit_option
@max_tiles_option
@max_pixels_option
@click.option(
    "--image-formats", default="jpeg,png,webp,bmp,gif", show_default=True, help="Formats that are read; also ppm."
)
@click.option("--text-only", is_flag=True, help="There is no IMAGE; all arguments are questions.")
@click.option("--chat", is_flag=True, help="The questions are turns of one conversation, not independent.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per question on stdout, and nothing else.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on past end tokens, to --max-new-tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the most likely token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: all tokens.")
@click.option("--seed", type=int, help="For the same answer again when the temperature is above 0.")
@click.option(
    "--prompt-lookup", type=int, default=0, metavar="N",
    help="Draft up to N tokens from the prompt and the answer so far and verify them in one pass [default: 0, none].",
)  # fmt: skip
@device_option
@compute_option
@threads_option
@click.option("--force", is_flag=True, help="Load also where the free memory looks too small.")
@require_signature_option
def run(
    arguments: tuple[str, ...], bundle: str | None,
    k: int | str, reduce: str, show_tokens: Path | None, gate_threshold: float,
    more: tuple[str, ...], videos: tuple[str, ...], frames: int | None, fit: str | None, max_tiles: int | None,
    max_pixels: int | None,
    image_formats: str, text_only: bool, chat: bool,
    as_json: bool, max_new_tokens: int, ignore_eos: bool, temperature: float, top_p: float, top_k: int,
    seed: int | None, prompt_lookup: int, device: str, compute: str | None, threads: int | None,
    force: bool, require_signature: Path | None,
) -> None:  # fmt: skip
    """Answer questions about an image or a video. Several questions reuse it."""
    images, questions = ([], list(arguments)) if text_only else (list(arguments[:1]), list(arguments[1:]))
    if not questions:
        raise click.UsageError('no question given: vtx-run image.jpg "question"')
    names = [*images, *more, *videos]
    formats = [name.strip() for name in image_formats.split(",")]
    with without_collections():
        from vtx.commands.export import find_bundle
        from vtx.runtime.api.load import load
        from vtx.runtime.api.options import Options
        from vtx.runtime.prompt.messages import check_messages
        from vtx.runtime.session.sampling import Sampling

        for question in questions:
            check_messages([{"role": "user", "content": question}])
        sampling = Sampling(temperature, top_p, top_k, seed)
        options = Options(max_new_tokens, ignore_eos, sampling, gate_threshold, prompt_lookup=prompt_lookup)
        if show_tokens:
            from vtx.tools.common.files import check_folder

            check_folder(show_tokens)
        pictures = _read([*images, *more], videos, formats, reduce, frames)
        folder = find_bundle(bundle, (k,))
        model = load(
            folder, device=device, compute=compute, threads=threads, force=force, require_signature=require_signature,
            fit=fit, max_tiles=max_tiles, max_pixels=max_pixels, image_formats=formats,
        )  # fmt: skip
    source = {"image": names, "bundle": str(folder)}
    with model.open(pictures) as conversation:
        if show_tokens:
            from vtx.runtime.report.tokens_plot import check_shown

            check_shown(model.policy(k, options, reduce), conversation.images, model.manifest.image)
        answers = []
        streams = _streams(conversation, questions, k, options, reduce, chat=chat)
        for number, (question, stream) in enumerate(zip(questions, streams, strict=True)):
            if as_json:
                say_json({"question": question, **source, **stream.read().to_dict()})
            else:
                before = "" if number else _where(model, folder, automatic=device == "auto")
                _show(stream, model.manifest.or_more_context, before=before)
            answers.append(stream.answer.stats)
        if show_tokens:
            _draw(show_tokens, conversation, questions, answers)


def _read(
    names: Sequence[str], videos: Sequence[str], formats: Sequence[str], reduce: str, frames: int | None
) -> list[Image | Video]:
    """The pictures, read before anything expensive; a spec that is wrong is told before that too.

    How many frames of a video are needed only the bundle says, so videos are read later.
    """
    from vtx.runtime.errors import RequestError
    from vtx.runtime.policies.spec import parse
    from vtx.runtime.vision.image import load_image
    from vtx.runtime.vision.video import as_video, video

    if reduce != "default":
        parse(reduce)
    pictures: list[Image | Video] = []
    for name in names:
        if as_video(name):
            pictures.append(video(name, frames=frames))
        else:
            pictures.append(load_image(sys.stdin.buffer if name == "-" else name, formats))
    pictures += [video(name, frames=frames) for name in videos]
    if frames is not None and not any(as_video(picture) for picture in pictures):
        raise RequestError(f"--frames {frames} has no effect: there is no video; leave it out")
    return pictures


def _where(model: Model, folder: Path, *, automatic: bool) -> str:
    """Which bundle answers, on which device, and what must be known of the demo."""
    backend, precision = model.backend, model.manifest.precision
    device = f"{backend.device} (auto)" if automatic else backend.device
    where = f"bundle: {folder}; device: {device}; weights: {precision}; arithmetic: {backend.compute}"
    return "\n".join([where, *about(model.manifest.model.name)])


def _streams(
    conversation: Conversation, questions: Sequence[str], k: int | str, options: Options, reduce: str, *, chat: bool
) -> Iterator[AnswerStream]:
    turns = conversation.chat(k, reduce=reduce) if chat else None
    for question in questions:
        yield turns.stream(question, options) if turns else conversation.stream(question, k, options, reduce=reduce)


def _draw(path: Path, conversation: Conversation, questions: Sequence[str], answers: Sequence[Stats]) -> None:
    """Write the picture of the patches that survived to `path`, whole or not at all."""
    from vtx.runtime.errors import RequestError
    from vtx.runtime.report.tokens_plot import draw_tokens
    from vtx.tools.common.files import replacing

    picture = draw_tokens(questions, answers, conversation.images, conversation.model.manifest)
    try:
        with replacing(path) as partial:
            picture.save(partial, "PNG")
    except OSError as e:
        raise RequestError(f"cannot write the picture {path} ({e.strerror}); name another output file") from e


def _show(stream: AnswerStream, or_more_context: str, *, before: str) -> None:
    """Print an answer as it comes; `before` is noted once there is one, so that an error stands alone."""
    for piece in stream:
        if before:
            note(before)
            before = ""
        say(piece, line=False)
        sys.stdout.flush()
    click.echo()
    for line in stream.answer.stats.reduced.notes if stream.answer.stats.reduced else ():
        note(line)
    if stream.answer.stopped == "context":
        note(f"the answer ends here because the context is full; shorten the question for more{or_more_context}")


# --- vtx-inspect ----------------------------------------------------------------------------------


@command(epilog="vtx-inspect vtx-demo-k16-fp16\nvtx-inspect vtx-demo-k16-fp16 --json")
@click.argument("bundle", type=click.Path(), required=False, envvar="VTX_BUNDLE")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
@require_signature_option
def inspect(bundle: str | None, as_json: bool, require_signature: Path | None) -> None:
    """Show what is in a bundle, the last one exported if none is named: stages, precision, sizes, KV bytes per K."""
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import PublicKey
    from vtx.runtime.report.inspect import INT8_KV, TEXT_TOKENS, describe, images_seen

    facts = describe(
        Bundle.open(last_bundle(bundle), key=PublicKey.load(require_signature) if require_signature else None)
    )
    if as_json:
        say_json(facts)
        return
    from vtx.runtime.units import size

    model = facts["model"]
    say(f"{facts['bundle']}: {model['name']}, {facts['precision']} weights, {facts['kv_dtype']} KV cache")
    say(
        f"{model['family']}, {model['layers']} layers of {model['hidden']}, {model['heads']} heads on "
        f"{model['kv_heads']} key/value heads of {model['head_dim']}, {facts['layout']['max_tokens']} tokens an image"
    )
    click.echo(images_seen(facts))
    if "video" in facts:
        frames = facts["video"]["parameters"]["frames"]
        click.echo(f"videos: {frames} frames (--frames), {facts['video']['max_tokens']} tokens")
    whole, weights = size(facts["bytes"]["all"]), size(facts["bytes"]["weights"])
    if facts["kv_dtype"] == "int8":
        click.echo(INT8_KV)
    click.echo(f"context {facts['max_context']}; {whole}, {weights} of it weights")
    if facts["activation_aware"]:
        say(f"activation-aware: channels scaled by what {facts['activation_aware']} questions put through them")
    stages = [[f"{s['first']}..{s['last']}", s["graph"], size(s["graph_bytes"])] for s in facts["stages"]]
    table("stages", ["layers", "graph", "graph size"], stages)
    variants = [
        [str(v["k"] or "none") + (" (default)" if v["k"] == facts["default_k"] else ""), str(v["full_layers"]),
         size(v["kv_bytes_one_image"]), size(v["kv_bytes_full_context"])]
        for v in facts["variants"]
    ]  # fmt: skip
    if facts["reductions"]:
        say("reductions, the default first: " + ", ".join(facts["reductions"]))
    table("KV cache", ["K", "full layers", f"one image, {TEXT_TOKENS} text tokens", "full context"], variants)


# --- vtx ------------------------------------------------------------------------------------------


_HOMES = {  # the module of `commands/` that each of the other commands stands in
    "batch": "batch",
    "bench": "bench",
    "build": "build",
    "calibrate": "calibrate",
    "chat": "chat",
    "doctor": "doctor",
    "evaluate": "evaluate",
    "export": "export",
    "plan": "plan",
    "serve": "serve",
    "train_gate": "calibrate",
    "tune": "tune",
}
_SPOKEN = {"evaluate": "eval", "train_gate": "train-gate"}  # where a command's name is no function's


def __getattr__(name: str) -> Any:
    if name == "main":
        return _main()
    if name not in _HOMES:
        raise AttributeError(f"module 'vtx.cli' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vtx.commands.{_HOMES[name]}"), name)


@cache
def _main() -> click.Group:
    """The command `vtx`, with all others below it."""

    @click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
    @click.version_option(package_name="vtx-edge")
    def main() -> None:
        """LLaVA-type models as split engine graphs, visual tokens withdrawn in depth.

        Each command also stands alone: vtx run is vtx-run.
        """

    main.add_command(run, "run")
    main.add_command(inspect, "inspect")
    for name in _HOMES:
        main.add_command(__getattr__(name), _SPOKEN.get(name, name))
    return main
