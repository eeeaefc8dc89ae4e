"""vtx-run: questions about images or videos, answered. It parses, calls and prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.answers import print_answer
from vtx.commands.shared.options import Depth, given, option, options
from vtx.runtime.process import without_collections
from vtx.runtime.terminal.console import INCOMPLETE, command, note, say_json
from vtx.tools.common.loading import Loading, about_model

if TYPE_CHECKING:
    from PIL.Image import Image

    from vtx.runtime.api.answer import Answer
    from vtx.runtime.api.conversation import Conversation
    from vtx.runtime.api.model import Model
    from vtx.runtime.api.options import Options
    from vtx.runtime.api.stream import AnswerStream
    from vtx.runtime.prompt.guiding import Guide
    from vtx.runtime.vision.video import Video

MAX_STATE = 1 << 20  # bytes
NO_STATE = Path("none")
OF_ACTIONS = ("steps", "deadline_ms", "normalized", "unnorm_key")  # options that need --act


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The options of vtx-run."""

    arguments: tuple[str, ...]
    bundle: str | None
    hub_model: str | None
    precision: str | None
    k: Depth
    rest: str | None
    reduce: str
    about: str | None
    show_tokens: Path | None
    boxes: bool
    show_boxes: Path | None
    gate_threshold: float
    more: tuple[str, ...]
    videos: tuple[str, ...]
    frames: int | None
    image_tokens: int | None
    thinking: bool | None
    max_thinking_tokens: int | None
    text_only: bool
    chat: bool
    as_json: bool
    max_new_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    prompt_lookup: int
    guide: Guide | None
    accept: str | None
    act: Path | None
    steps: int | None
    deadline_ms: float | None
    normalized: bool
    unnorm_key: str | None
    loading: Loading

    @property
    def images(self) -> list[str]:
        """The pictures of the prompt; the first one may be a video."""
        return [*(() if self.text_only else self.arguments[:1]), *self.more]

    @property
    def questions(self) -> list[str]:
        return [*(self.arguments if self.text_only else self.arguments[1:])]

    def options(self) -> Options:
        """The options of an answer. Raises RequestError for values out of range."""
        from vtx.runtime.api.options import Options
        from vtx.runtime.session.sampling import Sampling

        return Options(
            self.max_new_tokens,
            self.ignore_eos,
            Sampling(self.temperature, self.top_p, self.top_k, self.seed),
            self.gate_threshold,
            prompt_lookup=self.prompt_lookup,
            about=self.about,
            guide=self.guide,
            rest=self.rest,
            accept=self.accept,
            boxes=self.boxes or self.show_boxes is not None,
            thinking=self.thinking,
            max_thinking_tokens=self.max_thinking_tokens,
        )


@command(
    epilog='vtx-run image.jpg "What color is the circle?"\n'
    'vtx-run image.jpg "How many shapes are there?" "Where is the star?" --k 16 --json\n'
    'vtx-run scan.png "What is the total?" --k 16 --rest 10%\n'
    'cat image.jpg | vtx-run - "Is there a red star?"\n'
    'vtx-run a.jpg --image b.jpg "Which picture shows a star?"\n'
    'vtx-run clip.mp4 "What happens?" --frames 16\n'
    'vtx-run --text-only "Who are you?"\n'
    'vtx-run --model HuggingFaceTB/SmolVLM-256M-Instruct photo.jpg "What is on the table?"',
    leaves=True,
)
@click.argument("arguments", nargs=-1, required=True, metavar="IMAGE|VIDEO QUESTION [QUESTION ...]")
@options(
    "bundle",
    "hub_model",
    "hub_precision",
    "k",
    "rest",
    "reduce",
    option("--about", str, "Select image tokens by this text instead of the question (cdpruner, dart:k=0)."),
    option("--show-tokens", Path, "Write a PNG of the patches that survive each cut."),
    option("--boxes", bool, "Also read the boxes that an answer names, in pixels of the picture."),
    option("--show-boxes", Path, "Write a PNG of the picture with the boxes that the answers name."),
    option("--gate-threshold", 0.5, "With --k auto: withdraw when a gate's probability exceeds this."),
    option("--image more", click.Path(), "Additional image in the same prompt; repeat for more.", multiple=True),
    option("--video videos", click.Path(), "Additional video in the same prompt; repeat for more.", multiple=True),
    option("--frames", int, "Frames sampled from each video [default: the bundle's].", metavar="N"),
    "image_tokens",
    "thinking",
    "max_thinking_tokens",
    option("--text-only", bool, "Ask without an image; all arguments are questions."),
    option("--chat", bool, "Treat the questions as turns of one conversation."),
    option("--json as_json", bool, "Print only JSON, one object per question."),
    "max_new_tokens",
    option("--ignore-eos", bool, "Continue past end tokens, up to --max-new-tokens."),
    option("--temperature", 0.0, "Sampling temperature; 0: greedy."),
    option("--top-p", 1.0, "Nucleus sampling: smallest set of tokens with at least this probability; 1: all."),
    option("--top-k", 0, "Sample from this many of the most likely tokens; 0: all."),
    option("--seed", int, "Sampling seed, used if the temperature is above 0."),
    click.option(
        "--prompt-lookup",
        type=int,
        default=0,
        metavar="N",
        help="Prompt lookup decoding: draft up to N "
        "tokens from the prompt and the answer so far, verify them in one pass [default: 0, off].",
    ),
    "guide",
    option(
        "--accept",
        str,
        "With --choices: the probability that an answer must have; below it the answer is unsure. "
        "card: the threshold of the bundle's card (vtx-eval --coverage).",
        metavar="P|card",
    ),
    option(
        "--act",
        Path,
        "File with the robot's state, a JSON list of numbers, or none. The arguments are camera "
        "images (or NAME=IMAGE), then the instruction. Prints actions as JSON.",
        metavar="STATE",
    ),
    option("--steps", int, "With --act: number of Euler steps [default: the checkpoint's].", metavar="N"),
    option("--deadline-ms", float, "With --act: fail if the actions take longer than this.", metavar="MS"),
    option("--normalized", bool, "With --act: state and actions are in normalised units."),
    option("--unnorm-key", str, "With --act: dataset whose statistics scale the actions (OpenVLA).", metavar="NAME"),
    "fit",
    "max_tiles",
    "max_pixels",
    "image_formats",
    "device",
    "compute",
    "threads",
    "force",
    "require_signature",
    record=RunSettings,
)
def run(settings: RunSettings) -> None:
    """Answer one or more questions about an image or a video, which is encoded once."""
    if settings.act is not None:
        _act(settings, settings.act)
        return
    for name in OF_ACTIONS:
        if given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is for actions; add --act, or leave it out")
    _check_questions(settings.questions, settings.arguments[0])
    with without_collections():
        from vtx.commands.shared.bundles import find_bundle
        from vtx.runtime.prompt.messages import check_messages

        for question in settings.questions:
            check_messages([{"role": "user", "content": question}])
        options = settings.options()
        _check_folders(settings)
        pictures = _read(settings)
        folder = find_bundle(settings.bundle, (settings.k,), settings.hub_model, settings.precision)
        model = settings.loading.load(folder)
    introduction = _introduction(settings, folder, model)
    with model.open(pictures, image_tokens=settings.image_tokens) as conversation:
        if settings.show_tokens:
            from vtx.runtime.report.tokens_plot import check_shown

            policy = model.loaded.policy(settings.k, options, settings.reduce)
            check_shown(policy, conversation.images, model.manifest.image)
        answers = _answers(settings, folder, model, options, conversation, introduction)
        stats = [answer.stats for answer in answers]
        if settings.show_tokens:
            from vtx.runtime.report.tokens_plot import draw_tokens

            tokens = draw_tokens(settings.questions, stats, conversation.images, model.manifest)
            _save(tokens, settings.show_tokens)
        if settings.show_boxes:
            from vtx.runtime.report.boxes_plot import draw_boxes

            _save(
                draw_boxes(pictures[0], [box for answer in answers for box in answer.boxes or ()]), settings.show_boxes
            )

    if any(answer.incomplete for answer in answers):
        from vtx.runtime.prompt.open_ends import bounds_needed

        note(f"an answer was cut before its form was complete; {bounds_needed(settings.guide)}")
        click.get_current_context().exit(INCOMPLETE)


def _check_folders(settings: RunSettings) -> None:
    """Raise RequestError if a picture cannot be written where it shall be."""
    for path in (settings.show_tokens, settings.show_boxes):
        if path is not None:
            from vtx.tools.common.files import check_folder

            check_folder(path)


def _introduction(settings: RunSettings, folder: Path, model: Model) -> str:
    """The bundle, device and arithmetic of answers, for stderr; empty if told today, or if only JSON is wanted."""
    from vtx.runtime.terminal.last import first_today

    device = model.backend.device
    if settings.loading.device == "auto":
        device += " (auto)"
    facts = f"weights: {model.manifest.precision}; arithmetic: {model.backend.compute}"
    card = [model.loaded.card.in_words] if model.loaded.card else []
    lines = [f"bundle: {folder}; device: {device}; {facts}", *card, *about_model(model.manifest.model.name)]
    introduction = "\n".join(lines)
    return introduction if settings.as_json or first_today(introduction) else ""


def _answers(
    settings: RunSettings,
    folder: Path,
    model: Model,
    options: Options,
    conversation: Conversation,
    introduction: str,
) -> list[Answer]:
    """Print the answers to the questions, and return them."""
    source = {"image": [*settings.images, *settings.videos], "bundle": str(folder)}
    turns = conversation.chat(settings.k, reduce=settings.reduce) if settings.chat else None
    answers: list[Answer] = []
    for question in settings.questions:
        if turns:
            stream = turns.stream(question, options)
        else:
            stream = conversation.stream(question, settings.k, options, reduce=settings.reduce)
        if settings.as_json:
            say_json({"question": question, **source, **stream.read().to_dict()})
        else:
            _show(stream, model.manifest.or_more_context, before="" if answers else introduction)
        answers.append(stream.answer)
    return answers


def _save(picture: Image, path: Path) -> None:
    """Write a picture as PNG; raise RequestError if that is not possible."""
    from vtx.runtime.bundle.files import replacing
    from vtx.runtime.errors import RequestError

    try:
        with replacing(path) as partial:
            picture.save(partial, "PNG")
    except OSError as e:
        raise RequestError(f"cannot write the picture {path} ({e.strerror}); name another output file") from e


def _check_questions(questions: Sequence[str], first: str) -> None:
    """Raise click's UsageError without a question, or for one that is the name of a picture or a video."""
    from vtx.runtime.vision.limits import KNOWN_FORMATS
    from vtx.runtime.vision.video import SUFFIXES

    pictures = (".jpg", *(f".{name.lower()}" for name in KNOWN_FORMATS))
    if not questions:
        if " " in first and not Path(first).exists():
            raise click.UsageError(f"{first!r} is not a picture; name one before it, or ask without one by --text-only")
        raise click.UsageError('no question given: vtx-run image.jpg "question"')
    for question in questions:
        ending = "" if " " in question else Path(question).suffix.lower()
        if ending in pictures:
            raise click.UsageError(f"{question!r} is a picture, not a question; use --image {question}")
        if ending in SUFFIXES:
            raise click.UsageError(f"{question!r} is a video, not a question; use --video {question}")


def _act(settings: RunSettings, state: Path) -> None:
    """Print the actions for the state in a file, the pictures and the instruction that the arguments end with."""
    from vtx.commands.shared.bundles import find_bundle
    from vtx.runtime.bundle.files import read_text_file
    from vtx.runtime.bundle.safetensors import parse_json
    from vtx.runtime.errors import RequestError

    if settings.rest is not None:
        raise click.UsageError("--rest is for answers in words; leave it out with --act")
    *pictures, instruction = settings.arguments
    if not pictures:
        raise click.UsageError('no picture given: vtx-run --act state.json camera.jpg "instruction"')
    numbers = None
    if state != NO_STATE:
        numbers = parse_json(read_text_file(state, MAX_STATE), str(state), error=RequestError)
    if numbers is not None and not isinstance(numbers, list):
        raise RequestError(f"{state} is not a JSON list of numbers, which is the robot's state")
    folder = find_bundle(settings.bundle, (settings.k,), settings.hub_model, settings.precision)
    with settings.loading.load(folder) as model:
        named = dict(picture.split("=", 1) for picture in pictures if "=" in picture)
        cameras = named if len(named) == len(pictures) and model.manifest.action else pictures
        actions = model.act(
            cameras,
            instruction,
            numbers,
            k=settings.k,
            seed=settings.seed,
            reduce=settings.reduce,
            **{name: getattr(settings, name) for name in OF_ACTIONS},
        )
        seconds = model.actor.seconds
        say_json(
            {
                "instruction": instruction,
                "image": pictures,
                "bundle": str(folder),
                "actions": actions.tolist(),
                "seconds": {"tower": seconds.tower, "prompt": seconds.prompt, "expert": seconds.expert},
            }
        )


def _read(settings: RunSettings) -> list[Image | Video]:
    """Read the pictures before anything expensive, after a check of the reduction.

    Videos are read later: how many of their frames are needed is in the bundle.
    """
    from vtx.runtime.errors import RequestError
    from vtx.runtime.policies.spec import parse
    from vtx.runtime.vision.image import load_image
    from vtx.runtime.vision.video import as_video, video

    frames = settings.frames
    if settings.reduce != "default":
        parse(settings.reduce)
    pictures: list[Image | Video] = []
    for name in settings.images:
        if as_video(name):
            pictures.append(video(name, frames=frames))
        else:
            pictures.append(load_image(sys.stdin.buffer if name == "-" else name, settings.loading.image_formats))
    pictures += [video(name, frames=frames) for name in settings.videos]
    if frames is not None and not any(as_video(picture) for picture in pictures):
        raise RequestError(f"--frames {frames} has no effect: there is no video; leave it out")
    return pictures


def _show(stream: AnswerStream, or_more_context: str, *, before: str) -> None:
    """Print an answer as it comes; `before` is noted with its first piece, so that an error is shown alone."""
    print_answer(stream, before)
    for line in stream.answer.stats.reduced.notes if stream.answer.stats.reduced else ():
        note(line)
    if stream.answer.choices is not None:
        odds = sorted(stream.answer.choices.items(), key=lambda choice: -choice[1])
        mass = (
            "" if stream.answer.choices_mass is None else f" (all choices together: {stream.answer.choices_mass:.1%})"
        )
        note(", ".join(f"{choice} {probability:.1%}" for choice, probability in odds) + mass)
    for line in stream.answer.warnings:
        note(line)
    for box in stream.answer.boxes or ():
        note(f"{box.label}: {box.left:.0f}, {box.top:.0f}, {box.right:.0f}, {box.bottom:.0f}")
    for name, field in (stream.answer.fields or {}).items():
        note(f"{name}: {field.probability:.1%}")
    if stream.answer.stopped == "context":
        note(f"the answer ends here because the context is full; shorten the question for more{or_more_context}")
