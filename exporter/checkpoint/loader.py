"""Opening a Hugging Face checkpoint: a directory or a hub id, checked before any weight is read.

Nothing in a checkpoint is executed or unpickled; tensors in pickled files are read where the user allows it. Tensors go
by one canonical name each, whichever release of transformers wrote them: `vision.`, `projector.`, `text.` and `head.`
followed by the name inside that part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.families.registry import FAMILIES, find_family
from vtx.exporter.checkpoint.original.parts import OriginalParts
from vtx.exporter.checkpoint.original.pickled import PICKLE, PICKLE_INDEX, pickled_tensors
from vtx.runtime.bundle.files import Folder, read_named, reason
from vtx.runtime.bundle.safetensors import TensorInfo, header_of, open_data, parse_json, shown
from vtx.runtime.errors import CheckpointError, DeviceError, UnsupportedModelError, VtxError

MAX_CONFIG = 2**20
MAX_INDEX = 8 * 2**20  # a 13B LLaVA's index is 80 kB

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
ADAPTER = "adapter_config.json"  # of peft
PARTS = {"vision": "vision tower", "projector": "projector", "text": "decoder", "video": "video tower"}

_SETTINGS_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_WEIGHT_FILES = ["model*.safetensors"]
_PICKLED_FILES = ["pytorch_model*.bin"]
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

# First what families name in ways of their own, then what they share. From old to new: transformers 4.3x put the
# language model's head inside it, 4.5x moved all but the head under `model.`, 5 took `vision_model.` away. The first
# rule that fits decides.
_CANONICAL = [
    *((re.compile(pattern), part) for family in FAMILIES for pattern, part in family.tensors),
    (re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?"), "vision."),
    (re.compile(r"^(model\.)?multi_modal_projector\."), "projector."),
    (re.compile(r"^((model\.)?language_model\.)?lm_head\."), "head."),
    (re.compile(r"^(model\.)?language_model\.(model\.)?"), "text."),
]
# Exponent bits all ones is infinity or NaN, in the integers that share the floats' bits.
_EXPONENT = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "uint16": (np.uint16, 0x7F80)}
_CHUNK = 2**18


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A sound checkpoint of which only headers have been read; `tensors` goes by canonical name.

    `revision` is the hub's commit where it is known. Tensors that no graph needs (rotary buffers, position ids,
    SigLIP's pooling head) are kept, and so are names of unknown parts, as they stand. `original` is what a checkpoint
    in its authors' layout does not say in Hugging Face's files; `notes` are for the user.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    revision: str | None
    original: OriginalParts | None = None
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Return a sha256 over the config and every tensor's name, dtype, shape and a few bytes from its middle.

        So it tells a retrained model from the one before, and stays the same however the shards are cut.
        Raises `CheckpointError` when a shard cannot be read.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            digest.update(_middle(info))
        return digest.hexdigest()

    def require(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the tensor of canonical `name`, known to have `shape` and to be F32, F16 or BF16.

        Raises `CheckpointError` when it is missing or has another shape, `UnsupportedModelError` when it is quantised.
        """
        info = self.tensors.get(name)
        if info is None:
            self._refuse_packed(name)
            self._refuse_part(name)
            raise CheckpointError(f"tensor {name} is missing; the config promises {self._promise(name, shape)}")
        if info.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"tensor {name} is stored as {info.dtype}, vtx exports {', '.join(FLOATS)}; "
                + ("save the checkpoint as float32" if info.dtype == "F64" else "take the unquantised checkpoint")
            )
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {info.file.name} has shape {list(info.shape)}, the config promises {list(shape)}"
            )
        return info

    def _refuse_packed(self, name: str) -> None:
        packed, base = (f"{name.removesuffix('.weight')}.{kind}" for kind in ("qweight", "base_layer.weight"))
        if base in self.tensors:
            raise UnsupportedModelError(
                f"tensor {name} is {base} with an adapter beside it; merge the adapter (peft's merge_and_unload) and "
                "save the model again"
            )
        if packed in self.tensors:
            raise UnsupportedModelError(
                f"tensor {name} is packed as {packed} (GPTQ or AWQ); take the unquantised checkpoint"
            )

    def _refuse_part(self, name: str) -> None:
        part = name.partition(".")[0]
        if part in PARTS and not any(held.startswith(f"{part}.") for held in self.tensors):
            raise CheckpointError(
                f"the checkpoint holds no weights of the {PARTS[part]}; take the whole model, not an adapter or a part"
            )

    def _promise(self, name: str, shape: tuple[int, ...]) -> str:
        part = self.config.get(
            {"text": "text_config", "vision": "vision_config", "video": "vision_config"}.get(name.partition(".")[0], "")
        )
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        return f"{layers} layers" if layers and ".layers." in name else f"it with shape {list(shape)}"


def _middle(info: TensorInfo) -> bytes:
    try:
        with open_data(info) as file:
            file.seek(info.offset + max(0, info.nbytes // 2 - 32))
            return file.read(min(64, info.nbytes))
    except OSError as cause:
        raise CheckpointError(f"cannot read {info.file} ({reason(cause)}); check the disk") from cause


def open_model(
    model: str,
    judge: Callable[[Mapping[str, Any]], None],
    rename: Callable[[str], str],
    *,
    parts: Callable[[Mapping[str, Any]], Collection[str]] = lambda _: (),
    weights: bool = True,
    allow_pickle: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open the checkpoint in directory `model`, else download the hub model of that id; `progress` gets a line a step.

    `judge` accepts its config, or raises, before weights are downloaded; `rename` says how its tensors are called.
    `parts` are the folders that hold them, if they are not beside the config; their names then begin with it. Without
    `weights` only settings are read, and downloaded. With `allow_pickle` the tensors in files of `torch.save` count,
    where there are none in safetensors.

    Raises:
        CheckpointError: what is damaged, hostile, incomplete or out of reach.
        DeviceError: huggingface_hub is not installed.

    """
    if os.path.isdir(model):
        folder = Path(model).resolve()
        config = _config(folder, judge)
    else:
        report = progress or (lambda line: None)
        folder, config = _download(model, judge, report, parts, weights=weights, allow_pickle=allow_pickle)
    if not weights:
        return Checkpoint(folder, config, {}, _revision(folder))
    tensors, notes = _source_tensors(folder, allow_pickle=allow_pickle) if not parts(config) else ({}, ())
    for part in parts(config):
        found, more = _source_tensors(_part(folder, part), allow_pickle=allow_pickle)
        tensors |= {f"{part}.{name}": info for name, info in found.items()}
        notes += more
    return Checkpoint(folder, config, _canonical(tensors, rename), _revision(folder), notes=notes)


def canonical_name(name: str) -> str:
    """Return the name vtx uses for a checkpoint's tensor; a name of no known part is returned as it is."""
    for pattern, part in _CANONICAL:
        renamed, found = pattern.subn(part, name)
        if found:
            return renamed
    return name


def read_json_object(path: Path, limit: int, *, error: type[VtxError] = CheckpointError) -> dict[str, Any]:
    """Read a JSON object from a file, named by the user, of at most `limit` bytes; raises `error` for anything else."""
    return json_object(read_named(path, limit, error=error), path.name, error=error)


def json_object(content: bytes, name: str, *, error: type[VtxError] = CheckpointError) -> dict[str, Any]:
    """Parse the JSON object that the file `name` holds; raises `error` for anything else."""
    value = parse_json(content, name, error=error)
    if not isinstance(value, dict):
        raise error(f"{name} is a JSON {type(value).__name__}, not an object")
    return value


def checkpoint_files(folder: Path) -> Folder:
    """The one way to open files of the checkpoint in `folder`; links may lead into the hub cache it belongs to."""
    cure = "download it again, or put the file itself there"
    return Folder(folder, "checkpoint", CheckpointError, cure, _stores(folder))


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint, empty where there is no such file. Raises `CheckpointError`."""
    files = checkpoint_files(folder)
    return json_object(files.read(name, MAX_CONFIG), name) if files.exists(name) else {}


def check_finite(array: NDArray[Any], name: str) -> None:
    """Raise `CheckpointError` when a weight of any shape holds NaN or infinity: float32, float16, or uint16 for BF16.

    Takes the stored bits as `read_bits` gives them, a megabyte at a time.
    """
    integer, exponent = _EXPONENT[array.dtype.name]
    bits = array.reshape(-1).view(integer)
    bad = 0
    for start in range(0, bits.size, _CHUNK):
        bad += int(np.count_nonzero((bits[start : start + _CHUNK] & exponent) == exponent))
    if bad:
        raise CheckpointError(
            f"tensor {name} holds NaN or infinity in {bad:,} of {bits.size:,} places; download the checkpoint again"
        )


def _config(folder: Path, judge: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    files = checkpoint_files(folder)
    if not files.exists("config.json"):
        _refuse_adapter(folder)
        raise CheckpointError(f"{folder} holds no config.json, so it is not a Hugging Face checkpoint")
    config = json_object(files.read("config.json", MAX_CONFIG), "config.json")
    judge(config)
    return config


def check_model(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model of another family, or a quantised one."""
    find_family(config)
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(part, dict) and part.get("quantization_config"):
            settings = part["quantization_config"]
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            raise UnsupportedModelError(
                f"the checkpoint is quantised ({shown(str(method or 'quantization_config'))[1:-1]}); "
                "take the unquantised checkpoint"
            )


def _canonical(sources: Mapping[str, TensorInfo], rename: Callable[[str], str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for source, info in sources.items():
        name = rename(source)
        if name in tensors:
            raise CheckpointError(
                f"tensors {shown(tensors[name].name)} and {shown(source)} are two names of one weight, {shown(name)}; "
                "keep one of them"
            )
        tensors[name] = info
    return tensors


def _part(folder: Path, name: str) -> Path:
    """A folder inside a checkpoint, by no link that leads out of it."""
    part = folder / name
    if not part.is_dir() or not Path(os.path.realpath(part)).is_relative_to(os.path.realpath(folder)):
        raise CheckpointError(f"{folder} has no folder {name} of its own, which holds a part of it; download it again")
    return part


def _source_tensors(folder: Path, *, allow_pickle: bool) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Every tensor of the checkpoint by the name its file gives it, and what the user should know of the files."""
    files = checkpoint_files(folder)
    if files.exists(SINGLE):
        return _tensors(files, SINGLE), ()
    if files.exists(INDEX):
        return _sharded_tensors(files, _weight_map(files, INDEX, ".safetensors"), INDEX), ()
    if allow_pickle and (files.exists(PICKLE_INDEX) or files.exists(PICKLE)):
        return _pickles(files)
    _refuse_adapter(folder)
    _refuse_pickles(folder)
    raise CheckpointError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; where its weights are {PICKLE} on the hub, use --allow-pickle, "
        "which reads the tensors alone out of it and runs nothing"
    )


def _refuse_adapter(folder: Path) -> None:
    """Say so where a folder without a model holds an adapter of peft's."""
    if not checkpoint_files(folder).exists(ADAPTER):
        return
    base = read_settings(folder, ADAPTER).get("base_model_name_or_path")
    raise UnsupportedModelError(
        f"{folder} is an adapter of {shown(str(base))}, not a model; merge it into that model (peft's "
        "merge_and_unload), save the result, and export that"
    )


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"the weights are a pickle ({shown(pickles[0])}), which is not opened; take a checkpoint in safetensors, "
            "or have the tensors alone read out of it, and nothing run, with --allow-pickle"
        )


def _pickles(files: Folder) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    whole = not files.exists(PICKLE_INDEX)
    placed = {} if whole else _weight_map(files, PICKLE_INDEX, ".bin")
    shards = [PICKLE] if whole else sorted(set(placed.values()))
    found = pickled_tensors(files, shards)
    note = (
        f"the weights are {len(shards)} pickled file{'s' * (len(shards) > 1)} in {files.path}; only their "
        "tensors are read, and nothing is unpickled"
    )
    return found[PICKLE] if whole else _sharded_tensors(files, placed, PICKLE_INDEX, found), (note,)


def _tensors(files: Folder, name: str) -> dict[str, TensorInfo]:
    with files.open(name) as file:
        return header_of(file, files.path / name).tensors


def _weight_map(files: Folder, index: str, suffix: str) -> dict[str, str]:
    entries = json_object(files.read(index, MAX_INDEX), index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for tensor, shard in entries.items():
        if not isinstance(shard, str) or not is_plain_path(shard):
            raise CheckpointError(
                f"{index} puts tensor {shown(tensor)} into {shown(str(shard))}, which is not a file name inside it"
            )
        if not shard.endswith(suffix):
            raise CheckpointError(f"{index} names {shown(shard)}; vtx reads {suffix} there and opens nothing else")
    return entries


def is_plain_path(name: str) -> bool:
    """Whether a checkpoint's own name for a file or folder leads downwards only."""
    parts = name.split("/")
    return name.isprintable() and not re.search(r"[\\:]", name) and not {"", ".", ".."} & set(parts)


def _sharded_tensors(
    files: Folder,
    weight_map: Mapping[str, str],
    index: str,
    found: Mapping[str, Mapping[str, TensorInfo]] | None = None,
) -> dict[str, TensorInfo]:
    """The tensors of all shards, which `found` has read already or are safetensors."""
    tensors: dict[str, TensorInfo] = {}
    shard_of: dict[str, str] = {}
    for shard, count in sorted(Counter(weight_map.values()).items()):
        if not files.exists(shard):
            raise CheckpointError(f"{shard} is missing, {index} puts {count} tensors there; download it again")
        for name, info in (found[shard] if found else _tensors(files, shard)).items():
            if name in tensors:
                raise CheckpointError(f"tensor {shown(name)} is both in {shard_of[name]} and in {shard}; keep one")
            tensors[name], shard_of[name] = info, shard
    for name, shard in weight_map.items():
        if shard_of.get(name) != shard:
            raise CheckpointError(f"tensor {shown(name)} is not in {shard}, where {index} puts it; download it again")
    return tensors


def _stores(folder: Path) -> tuple[Path, ...]:
    # hub cache: models--org--name/snapshots/<commit>; files are links into blobs/, which may lead on to the store that
    # all models of the cache share.
    root = folder if _repo_name(folder) else folder.parent  # of a part
    repo = root.parent.parent
    return (repo / "blobs", repo.parent / "blobs") if _repo_name(root) else ()


def _repo_name(folder: Path) -> str | None:
    repo = folder.parent.parent.name
    return repo if folder.parent.name == "snapshots" and repo.startswith("models--") else None


def _revision(folder: Path) -> str | None:
    return folder.name if _repo_name(folder) and _COMMIT.fullmatch(folder.name) else None


def _download(
    model: str,
    judge: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
    parts: Callable[[Mapping[str, Any]], Collection[str]],
    *,
    weights: bool,
    allow_pickle: bool,
) -> tuple[Path, dict[str, Any]]:
    """Fetch settings, judge the config, then fetch the weights of the same commit: pickles only for want of others."""
    if os.path.exists(model):
        raise CheckpointError(f"{model} is a file; name the directory that holds config.json")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{shown(model)}: no such directory, and not a hub id (org/name)")
    progress(f"fetching the settings of {model} from the hub")
    folder = _snapshot(model, None, _SETTINGS_FILES)
    config = _config(folder, judge)
    folders = [f"{part}/" for part in parts(config)] or [""]
    nested = folders != [""]
    if nested:
        folder = _snapshot(model, folder.name, _below(folders, _SETTINGS_FILES), nested=True)
    if weights:
        progress(f"fetching the weights of {model}, commit {folder.name[:12]}")
        folder = _snapshot(model, folder.name, _below(folders, _WEIGHT_FILES), nested=nested)
        lacking = [part for part in folders if not any((folder / part).glob(_WEIGHT_FILES[0]))]
        if lacking and allow_pickle:
            folder = _snapshot(model, folder.name, _below(lacking, _PICKLED_FILES), nested=nested)
    return folder, config


def _below(folders: list[str], patterns: list[str]) -> list[str]:
    return [folder + pattern for folder in folders for pattern in patterns]


def _snapshot(model: str, revision: str | None, patterns: list[str], *, nested: bool = False) -> Path:
    try:
        import huggingface_hub
    except ImportError as cause:
        raise DeviceError(
            f"{model} is not a directory, and fetching it from the hub needs huggingface_hub; "
            'run: pip install "vtx-edge[export]"'
        ) from cause
    try:
        found = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=None if nested else ["*/*"]
        )
    except Exception as cause:  # the hub's errors, its HTTP library's, the disk's: one line each
        raise CheckpointError(_hub_reason(model, cause)) from cause
    return Path(found).resolve()


def _hub_reason(model: str, cause: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(cause, errors.GatedRepoError):
        return f"{model} is gated; ask for access on its page on the hub, then run: hf auth login"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"{model} is neither a directory here nor a model on the hub; if it is private, run: hf auth login"
    if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return f"{model} is not in the local cache and the hub is out of reach; go online, or name a local directory"
    first = (str(cause).strip().splitlines() or [""])[0]
    return f"{model} could not be fetched from the hub: {type(cause).__name__}: {first[:300]}"
