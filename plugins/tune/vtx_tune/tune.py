"""A tuning from end to end: data, the teacher's answers, training, the merged checkpoint, and its judgement."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import init_device_mesh

from vtx.exporter.bundling.predict import check_disk
from vtx.exporter.bundling.staging import make_folder
from vtx.exporter.calibration.source import OpenedModel, open_source
from vtx.exporter.checkpoint.spec import model_size
from vtx.runtime.bundle.files import replacing
from vtx.runtime.errors import DeviceError, ExportError, RequestError
from vtx.runtime.installing import install, pip_install
from vtx.runtime.strict import json_value
from vtx.runtime.units import Progress, size
from vtx.tools.common.files import write_json
from vtx.tools.common.memory import peak
from vtx.tools.data.items import SCENES, Data, Item, check_skipped, image_key, read_data, split_items
from vtx.tools.data.journal import ResultJournal
from vtx.tools.estimate.sizes import ModelSize
from vtx_tune import gates, write
from vtx_tune.decoder import WithdrawingDecoder, load_text_model
from vtx_tune.judge import Judging, judge
from vtx_tune.options import TuneOptions, check_tunable
from vtx_tune.packing import Ids, Row, TuningQuestion, pack, read_questions
from vtx_tune.state import StateFile, seconds_of_steps
from vtx_tune.train import ImageEncoder, Trainer
from vtx_tune.write import Changed, model_card

MERGED = "merged"
ADAPTER = "adapter"
JUDGED = "judged"
REPORT = "report.json"
ANSWERS = "answers.jsonl"
BASE = 1 << 30  # bytes: Python, PyTorch, transformers and peft, before any weight
ADAM_BYTES = 16  # of a trained weight: itself, its gradient and two moments in float32
IN_4_BITS = 0.5 + 4 / 64  # bytes of a weight, a scale of float32 for 64 of them
SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # by which accelerate's launcher divides a model
KEPT = 8  # hidden-sized and a few FFN-sized tensors that one layer keeps for its backward pass
LOGITS = 4  # float32 tensors of the vocabulary's width in the loss, each with a gradient


@dataclass(frozen=True, slots=True)
class Workspace:
    """The opened model, its questions, and accelerate's view of processes and device.

    `mesh`: the processes that share every layer's weights (FSDP), None if each holds all of them.
    """

    source: OpenedModel
    questions: list[TuningQuestion]
    held_out: list[Item]
    skipped: tuple[str, ...]
    data: str
    accelerator: Any
    dtype: torch.dtype
    mesh: Any


def run(
    work: Workspace, options: TuneOptions, out: Path, report: Progress, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tune a checkpoint into the directory `out` and return the report, which is also written there.

    `out` gets `merged` (a checkpoint), `adapter` (unless whole layers are trained), `gates.safetensors` (with `gates`),
    `log.csv`, `report.json`, and the state that an interrupted run resumes from. `report` gets (phase, done, total) and
    `say` a line, both on the main process only. Raises RequestError, CheckpointError, ExportError, DeviceError.
    """
    text = load_text_model(work.source, work.dtype, work.accelerator.device, options.learning, work.mesh)
    seed = options.schedule.seed
    again = options.checkpointing
    decoder = WithdrawingDecoder(work.source.config.text, text, options.learning, seed=seed, checkpointing=again)
    encoder = ImageEncoder(work.source, work.accelerator.device, options.entry(work.source.config))
    answers = _teacher_answers(work, decoder, encoder, options, out, report)
    rows = pack(work.questions, answers, work.source.config.image_token_id, options.packing, work.source.context)
    trainer = Trainer(decoder, encoder, rows, options, work.accelerator, work.dtype)
    if work.accelerator.is_main_process:
        model = model_size(work.source.config, work.source.name)
        holders = 1 if work.mesh is None else work.accelerator.num_processes
        memory = predict_memory(model, rows, options, 2 if work.dtype == torch.bfloat16 else 4, holders)
        say(
            f"{work.source.name}: {len(work.questions)} questions in {len(rows)} rows of "
            f"{sum(map(len, rows)) // len(rows)} tokens, {trainer.order.steps} steps on "
            f"{work.accelerator.num_processes} x {work.accelerator.device.type}; {learning_weights(model, options):,} "
            f"weights to train; predicted, roughly: at least {size(memory)} of memory a process"
        )
    state = StateFile(out, _identity(work, rows, options))
    half = (trainer.order.steps + 1) // 2
    if state.step() < trainer.order.steps and work.accelerator.is_main_process:
        _clear(out, halfway=state.step() < half)
    work.accelerator.wait_for_everyone()

    def trained(done: int, total: int) -> None:
        report("training", done, total)

    if options.gates and options.full_share < 1:  # the control follows none
        trainer.run(state, out, trained, half)
        if work.accelerator.is_main_process and not (out / gates.HALFWAY / gates.CHOSEN).exists():
            if state.step() > half:
                raise RequestError(f"{out} lacks what its gates chose halfway; remove it to begin again")
            items = [question.item for question in work.questions]
            gates.choose(work.source, Changed.of(decoder, work.source), items, options, out, report)
        work.accelerator.wait_for_everyone()
        trainer.follow(gates.chosen(out, len(work.questions)))
    trainer.run(state, out, trained)
    main = work.accelerator.is_main_process
    record = {"items": len(work.questions), "rows": len(rows), "data": work.data, "steps": trainer.order.steps}
    work.accelerator.end_training()
    return _finish(options, work, decoder, record, out, report) if main else {}


def _clear(out: Path, *, halfway: bool) -> None:
    """Remove what an earlier tuning wrote: measurements of the untuned model stay, and unless `halfway` its gates."""
    try:
        for folder in (out / MERGED, out / ADAPTER, out / JUDGED / "after", *[out / gates.HALFWAY] * halfway):
            if folder.exists():
                shutil.rmtree(folder)
    except OSError as e:
        raise ExportError(f"cannot clear {out} ({e.strerror}); name another --out") from e


def open_workspace(options: TuneOptions, out: Path, say: Callable[[str], None]) -> Workspace:
    """Check all that can be checked before weights are read; raises as `run` does."""
    try:
        import peft  # noqa: F401 - fails before anything costs time
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as e:
        raise DeviceError(f"tuning needs {e.name}; {install('tune')}") from e
    # The other processes wait while the first one makes answers.
    wait = InitProcessGroupKwargs(timeout=timedelta(days=7))
    if options.learning.qlora and find_spec("bitsandbytes") is None:
        raise DeviceError(f"--qlora needs bitsandbytes; {pip_install()} bitsandbytes, or leave --qlora out")
    shared = _shares(options)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[wait])
    source = open_source(options.model)
    _check_source(source, options)
    data = read_data(options.data, options.images, options.items + options.held_out, options.schedule.seed)
    learn = list(data.items)
    held_out = list[Item]()
    if options.held_out:
        seed = options.schedule.seed
        shuffle = options.data != SCENES
        learn, held_out = split_items(data.items, options.items, options.held_out, seed, shuffle=shuffle)
    questions, skipped = read_questions(source, learn, options.packing)
    _check_answers(options, questions, shared=shared)
    check_skipped(data.source, len(questions), skipped, "items", "")
    make_folder(out)
    all_skipped = (*data.skipped, *skipped)
    if accelerator.is_main_process:
        disk = sum(info.nbytes for info in source.checkpoint.tensors.values())
        disk += 12 * learning_weights(model_size(source.config, source.name), options)
        check_disk(out, disk, purpose="the tuned checkpoint", fix="or name another --out")
        for line in all_skipped:
            say(f"skipped {line}")
    device = accelerator.device.type
    bf16 = options.dtype == "bf16" or (options.dtype == "auto" and device == "cuda")
    dtype = torch.bfloat16 if bf16 else torch.float32
    mesh = init_device_mesh(device, (accelerator.num_processes,)) if shared else None
    return Workspace(source, questions, held_out, all_skipped, data.source, accelerator, dtype, mesh)


def _check_source(source: OpenedModel, options: TuneOptions) -> None:
    """Raise VtxError for a checkpoint that is not tuned, or not with these options."""
    check_tunable(source.config, source.name, original=source.checkpoint.original is not None)
    if any(info.source for info in source.checkpoint.tensors.values()):
        raise RequestError(f"{source.name} is quantised, and vtx-tune trains floats; name the unquantised checkpoint")
    options.entry(source.config)
    options.depths.within(source.config.text.layers)
    options.learning.chosen(source.config.text.layers)


def _check_answers(options: TuneOptions, questions: Sequence[TuningQuestion], *, shared: bool) -> None:
    """Raise RequestError for questions that teach nothing, or whose answers no process could write."""
    bare = sum(question.answer is None for question in questions)
    if options.full_share == 1 and (not options.weights.ce or bare == len(questions)):
        raise RequestError(
            "--full-share 1 trains without withdrawal, where only the data's answers teach anything; give data with "
            "answers and a --ce-weight above 0"
        )
    if shared and bare:
        raise RequestError(
            f"{bare} of {len(questions)} questions have no answer, which one process alone would have to write, and "
            "under FSDP it holds no whole model; give data with answers, or launch it without --use_fsdp"
        )


def _shares(options: TuneOptions) -> bool:
    """Return True if processes share the weights (FSDP). Raises DeviceError for a launch that does not fit."""
    launched = {name: os.environ.pop(f"ACCELERATE_USE_{name}", "false").lower() for name in SHARDING}
    [shared, *flags] = [kind not in ("", "0", "false") for kind in launched.values()]
    if any(flags):
        raise DeviceError(
            f"accelerate was configured for {' and '.join(SHARDING[1:])}, by which vtx-tune does not share a model "
            "among processes; launch it with --use_fsdp"
        )
    if shared and (options.learning.full or options.learning.qlora):
        raise DeviceError(
            "accelerate was configured for FSDP, and processes of vtx-tune share only weights that do not learn and "
            "are not in 4 bits; leave out --full and --qlora, or launch it without --use_fsdp"
        )
    return shared


def _teacher_answers(
    work: Workspace,
    decoder: WithdrawingDecoder,
    encoder: ImageEncoder,
    options: TuneOptions,
    out: Path,
    report: Progress,
) -> dict[int, Ids]:
    """The untuned model's greedy answer to every question without one, kept in `out` as they are made."""
    missing = [n for n, question in enumerate(work.questions) if question.answer is None]
    if not missing:
        return {}
    identity = {"model": [work.source.fingerprint, str(work.dtype)], "length": options.packing.max_new_tokens}
    digests = {n: work.questions[n].item.digest() for n in missing}
    if work.accelerator.is_main_process:
        device = decoder.device
        ends = work.source.text.settings.end_ids
        done = 0
        groups: dict[tuple[Any, ...], list[int]] = {}  # questions that share a prefix, and so its computation
        with ResultJournal(out / ANSWERS, identity) as journal:
            for n, digest in digests.items():
                if digest not in journal.results:
                    question = work.questions[n]
                    key = (*map(image_key, question.item.images), question.prefix.tobytes())
                    groups.setdefault(key, []).append(n)
            for numbers in groups.values():
                first = work.questions[numbers[0]]
                prefix = torch.from_numpy(first.prefix).to(device)
                suffixes = [torch.from_numpy(work.questions[n].suffix).to(device) for n in numbers]
                image = prefix == work.source.config.image_token_id
                with torch.autocast(device.type, torch.bfloat16, enabled=work.dtype == torch.bfloat16):
                    encoded = encoder(first.item.images)
                    made = decoder.greedy(prefix, image, encoded, suffixes, ends, options.packing.max_new_tokens)
                journal.add({digests[n]: {"ids": ids} for n, ids in zip(numbers, made, strict=True)})
                done += len(numbers)
                report("answers", done, sum(map(len, groups.values())))
    work.accelerator.wait_for_everyone()
    lines = (out / ANSWERS).read_text(encoding="utf-8").splitlines()[1:]
    answers = {line["item"]: np.array(line["ids"], np.int64) for line in map(json.loads, lines)}
    return {n: answers[digest] for n, digest in digests.items()}


def _identity(work: Workspace, rows: Sequence[Row], options: TuneOptions) -> str:
    """A digest of all that the trained weights depend on, except the learning rate, which a resumed run may lower."""
    schedule = {key: value for key, value in asdict(options.schedule).items() if key not in ("lr", "save_every")}
    contents = hashlib.sha256()
    for row in rows:
        contents.update(row.ids.numpy().tobytes() + row.targets.numpy().tobytes())
    for question in work.questions:
        contents.update(question.item.digest().encode())
    parts = [
        work.source.fingerprint,
        contents.hexdigest(),
        asdict(options.depths),
        asdict(options.weights),
        asdict(options.learning),
        schedule,
        options.full_share,
        str(work.dtype),
        options.reduce,
        options.gates,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def predict_memory(model: ModelSize, rows: Sequence[Row], options: TuneOptions, element: int, holders: int = 1) -> int:
    """Estimated bytes of memory of one process of a training; `element` is the bytes of a base weight.

    `holders` processes share the layers' weights, but for those of the layer that runs.
    """
    d = model.decoder
    learns = len(options.learning.chosen(model.decoder.layers))
    longest = max(map(len, rows))
    answer = max(len(row.at) for row in rows)
    nbytes = longest * (KEPT * d.hidden + 3 * d.ffn)
    hidden = longest * d.hidden * d.layers + nbytes if options.checkpointing else nbytes * d.layers
    base = element * d.parameters
    if options.learning.qlora:
        base -= int((element - IN_4_BITS) * d.macs_of(d.every))
    base -= int(element * (d.macs_of(d.every) - d.layer_macs) * (1 - 1 / holders))
    memory = BASE + base + 4 * (model.vision.parameters if model.vision else 0)
    memory += ADAM_BYTES * learning_weights(model, options) + element * hidden + 4 * LOGITS * answer * d.vocab
    return memory + options.learning.full * element * learns * d.layer_macs  # the teacher's copy of these layers


def learning_weights(model: ModelSize, options: TuneOptions) -> int:
    d = model.decoder
    layers = len(options.learning.chosen(model.decoder.layers))
    if options.learning.full:
        return layers * (d.layer_macs + d.small_parameters // d.layers)
    q = d.heads * d.head_dim
    kv = d.kv_heads * d.head_dim
    sides = 2 * (d.hidden + q) + 2 * (d.hidden + kv) + 3 * (d.hidden + d.ffn)
    return layers * options.learning.rank * sides


def _finish(
    options: TuneOptions,
    work: Workspace,
    decoder: WithdrawingDecoder,
    record: Mapping[str, Any],
    out: Path,
    report: Progress,
) -> dict[str, Any]:
    """Write adapters and checkpoint, judge the checkpoint, and write the results into its card and the report."""
    changed = Changed.of(decoder, work.source)
    if not options.learning.full:
        write.write_adapters(work.source, decoder, options.learning, out / ADAPTER)
    if not (out / MERGED).exists():  # an interrupted judgement keeps it and its measurements
        write.write_merged(work.source, changed, out / MERGED, model_card(work.source.name, options, record, None))
    judged = None
    if work.held_out:
        card = out / MERGED / write.CARD
        learn = Data(work.data, tuple(question.item for question in work.questions))
        gating = gates.TunedGates(options, learn, out, report).train if options.gates else None
        judging = Judging(options.packing.max_new_tokens, options.judged, gating)
        judged = judge(work.source, out / MERGED, work.held_out, judging, out / JUDGED, report)
        try:
            with replacing(card) as partial:
                partial.write_text(model_card(work.source.name, options, record, judged), encoding="utf-8")
        except OSError as e:
            raise ExportError(f"cannot write {card} ({e.strerror}); free some space and run again") from e
    device = work.accelerator.device
    on_gpu = {"peak_gpu_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    result = {
        "model": {"name": work.source.name, "fingerprint": work.source.fingerprint},
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "training": record,
        "cost": {
            "steps": record["steps"],
            "seconds": seconds_of_steps(out),
            "peak_memory_bytes": peak() or 0,
            **on_gpu,
        },
        "changed_layers": {str(layer): share for layer, share in write.changes(changed).items()},
        "skipped": list(work.skipped),
        "versions": write.versions(),
        "judged": json_value(judged),
    }
    write_json(out / REPORT, result)
    return result


def is_main_process() -> bool:
    """Return True if this is the first of the processes that accelerate's launcher started."""
    return os.environ.get("RANK", "0") == "0"
