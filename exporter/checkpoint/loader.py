"""Opening a Hugging Face checkpoint: a directory or a hub id, checked before any weight is read.

Nothing in a checkpoint is executed; tensors in pickled files are read if the user allows it. Each tensor
has one canonical name, whichever release of transformers wrote it: `vision.`, `projector.`, `text.` or `head.`, then
the name inside that part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.families.registry import FAMILIES, find_family
from vtx.exporter.checkpoint.family import OriginalParts
from vtx.exporter.checkpoint.hub import check_blob, checkpoint_files, in_cache, revision_of, snapshot
from vtx.exporter.checkpoint.original.pickled import PICKLE, PICKLE_INDEX, pickled_tensors
from vtx.exporter.checkpoint.quantised.opening import GPTQ_FILE, stated_settings, with_matrices
from vtx.exporter.checkpoint.settings import MAX_CONFIG, read_settings
from vtx.runtime.bundle.files import Folder, reason
from vtx.runtime.bundle.safetensors import TensorInfo, header_of, open_data, shown
from vtx.runtime.errors import CheckpointError, UnsupportedModelError, VtxError
from vtx.runtime.units import counted
from vtx.tools.calibration.report import DOWNSAMPLED
from vtx.tools.common.files import json_object
from vtx.tools.common.hub import check_hub_id

MAX_INDEX = 8 * 2**20  # several times the largest that was published, OpenVLA 7B's of 94,764 bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
ADAPTER = "adapter_config.json"  # of peft
PARTS = {"vision": "vision tower", "projector": "projector", "text": "decoder", "video": "video tower"}

_STATISTICS = "policy_*processor_step_*.safetensors"  # of LeRobot's policies: small
_SETTINGS_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", _STATISTICS]
_WEIGHT_FILES = "model*.safetensors"
_PICKLED_FILES = "pytorch_model*.bin"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# The first pattern that matches decides: names of single families, then the shared ones. Transformers 4.3x put the
# language model's head inside it, 4.5x moved all but the head under `model.`, 5 removed `vision_model.`.
_CANONICAL = [
    *((re.compile(pattern), part) for family in FAMILIES for pattern, part in family.tensors),
    (re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?"), "vision."),
    (re.compile(r"^(model\.)?multi_modal_projector\."), "projector."),
    (re.compile(r"^((model\.)?language_model\.)?lm_head\."), "head."),
    (re.compile(r"^(model\.)?language_model\.(model\.)?"), "text."),
]
# What peft, DistributedDataParallel and torch.compile put before the names of a model that they wrap.
_WRAPPERS = re.compile(r"^((base_model\.model|module|_orig_mod)\.)+")
_COMPILED = "._orig_mod."  # between the names of a model of which a part is compiled
# Exponent bits all ones is infinity or NaN, in the integers that share the floats' bits.
_EXPONENT = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "uint16": (np.uint16, 0x7F80)}
_CHUNK = 2**18


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint of which only headers have been read; `tensors` are by canonical name.

    `revision` is the hub's commit if known. Tensors that no graph needs (rotary buffers, position ids, SigLIP's pooling
    head) are kept, and so are names of unknown parts, unchanged. `original` replaces the files of Hugging Face's layout
    that an original layout lacks; `notes` are for the user. `factors` and `shifts` are the decoder's (`TextConfig`).
    `downsample` is the number of patches in an image token, of families that leave a choice.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    revision: str | None
    original: OriginalParts | None = None
    notes: tuple[str, ...] = ()
    factors: tuple[tuple[str, float], ...] = ()
    shifts: tuple[tuple[str, float], ...] = ()
    downsample: str | None = None

    def factor(self, name: str) -> float:
        """The factor of the weight of canonical `name`, by which it is multiplied where it is read."""
        return next((factor for pattern, factor in self.factors if re.search(pattern, name)), 1.0)

    def shift(self, name: str) -> float:
        """The number that is added to the weight of canonical `name` where it is read."""
        return next((shift for pattern, shift in self.shifts if re.search(pattern, name)), 0.0)

    def fingerprint(self) -> str:
        """Return a sha256 over the config and every tensor's name, dtype, shape and a few bytes from its middle.

        It changes when a model is retrained, and does not depend on the division into shards. `downsample` follows it,
        since what is measured with one number of image tokens does not hold for another. Raises CheckpointError.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            for part in info.source.parts if info.source else (info,):
                try:
                    with open_data(part) as file:
                        file.seek(part.offset + max(0, part.nbytes // 2 - 32))
                        digest.update(file.read(min(64, part.nbytes)))
                except OSError as cause:
                    raise CheckpointError(f"cannot read {part.file} ({reason(cause)}); check the disk") from cause
        return digest.hexdigest() + (DOWNSAMPLED + self.downsample if self.downsample else "")

    def require(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the tensor of canonical `name`, which has `shape` and is F32, F16 or BF16."""
        info = self.tensors.get(name)
        if info is None:
            raise self._missing(name, shape)
        if info.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"tensor {name} is stored as {info.dtype}, vtx exports {', '.join(FLOATS)}; "
                + ("save the checkpoint as float32" if info.dtype == "F64" else "use the unquantised checkpoint")
            )
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {info.file.name} has shape {list(info.shape)}, config.json needs {list(shape)}"
            )
        return info

    def _missing(self, name: str, shape: tuple[int, ...]) -> VtxError:
        packed, base = (f"{name.removesuffix('.weight')}.{kind}" for kind in ("qweight", "base_layer.weight"))
        if base in self.tensors:
            return UnsupportedModelError(
                f"tensor {name} is {base} with an adapter; merge the adapter (peft's merge_and_unload) and save the "
                "model again"
            )
        if packed in self.tensors:
            return UnsupportedModelError(
                f"tensor {name} is packed as {packed} (GPTQ or AWQ); use the unquantised checkpoint"
            )
        part = name.partition(".")[0]
        if part in PARTS and not any(tensor.startswith(f"{part}.") for tensor in self.tensors):
            return CheckpointError(
                f"the checkpoint holds no weights of the {PARTS[part]}; use the whole model, not an adapter or a part"
            )
        settings = self.config.get("text_config" if part == "text" else "vision_config")
        layers = settings.get("num_hidden_layers") if isinstance(settings, dict) else None
        needs = f"{layers} layers" if layers and ".layers." in name else f"it with shape {list(shape)}"
        return CheckpointError(f"tensor {name} is missing; config.json needs {needs}")


@dataclass(frozen=True, slots=True)
class CheckpointKind:
    """A kind of checkpoint, and its reading. `check` raises for a config to refuse, before weights are downloaded.

    `rename` gives a tensor's canonical name. `parts` are the folders of the tensors if they are not in the config's;
    names then begin with the folder.
    """

    check: Callable[[Mapping[str, Any]], None]
    rename: Callable[[str], str]
    parts: Callable[[Mapping[str, Any]], Collection[str]] = lambda _: ()


def open_model(
    model: str,
    kind: CheckpointKind,
    *,
    weights: bool = True,
    allow_pickle: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open the checkpoint in directory `model`, else download the hub model of that id; `progress` gets a line a step.

    Without `weights` only settings are downloaded and read. With `allow_pickle` files of `torch.save` are read if there
    is no safetensors file. Raises CheckpointError, DeviceError.
    """
    if os.path.isdir(model):
        folder = Path(model).resolve()
        config = _config(folder, kind.check)
    else:
        if os.path.exists(model):
            _refuse_gguf(Path(model).absolute())
            raise CheckpointError(f"{model} is a file; name the directory that holds config.json")
        check_hub_id(model)
        report = progress or (lambda line: None)
        folder, config = _downloaded(model, kind, report, weights=weights, allow_pickle=allow_pickle)
    if not weights:
        return Checkpoint(folder, config, {}, revision_of(folder))
    sources, notes = _all_tensors(folder, kind.parts(config), allow_pickle=allow_pickle)
    return Checkpoint(folder, config, _canonical_tensors(sources, kind.rename), revision_of(folder), notes=notes)


def _downloaded(
    model: str,
    kind: CheckpointKind,
    report: Callable[[str], None],
    *,
    weights: bool,
    allow_pickle: bool,
) -> tuple[Path, dict[str, Any]]:
    """The directory of a hub model's snapshot and its configuration; arguments as of `open_model`."""
    report(f"fetching the settings of {model} from the hub")
    model, _, revision = model.partition("@")
    folder = snapshot(model, revision or None, _SETTINGS_FILES)
    config = _config(folder, kind.check)
    folders = [f"{part}/" for part in kind.parts(config)] or [""]
    nested = folders != [""]
    if nested:
        patterns = [part + pattern for part in folders for pattern in _SETTINGS_FILES]
        folder = snapshot(model, folder.name, patterns, nested=True)
    if not weights:
        return folder, config
    report(f"fetching the weights of {model}, commit {folder.name[:12]}")
    folder = snapshot(model, folder.name, [part + _WEIGHT_FILES for part in folders], nested=nested)
    pickled = [part + _PICKLED_FILES for part in folders if not any((folder / part).glob(_WEIGHT_FILES))]
    if pickled and allow_pickle:  # only if there are no others
        folder = snapshot(model, folder.name, pickled, nested=nested)
    for part in folders:
        for file in (*folder.glob(part + _WEIGHT_FILES), *folder.glob(part + _PICKLED_FILES)):
            check_blob(file, model)
    return folder, config


def _all_tensors(
    folder: Path, parts: Collection[str], *, allow_pickle: bool
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """The tensors of a checkpoint, or of its parts with the part's name before theirs, and notes about them."""
    if not parts:
        return _source_tensors(folder, allow_pickle=allow_pickle)
    sources = dict[str, TensorInfo]()
    notes = tuple[str, ...]()
    for name in parts:
        part = folder / name
        if not part.is_dir() or not Path(os.path.realpath(part)).is_relative_to(os.path.realpath(folder)):
            raise CheckpointError(
                f"{folder} has no folder {name} of its own, and this model's parts are in the folders "
                f"{', '.join(parts)}; download all of them"
            )
        tensors, further = _source_tensors(part, allow_pickle=allow_pickle)
        sources |= {f"{name}.{tensor}": info for tensor, info in tensors.items()}
        notes += further
    return sources, notes


def _canonical_tensors(sources: Mapping[str, TensorInfo], rename: Callable[[str], str]) -> dict[str, TensorInfo]:
    """Tensors by their canonical names, without what wraps all of them."""
    tensors: dict[str, TensorInfo] = {}
    wrappers = {name.removesuffix(_WRAPPERS.sub("", name)) for name in sources}
    wrapper = wrappers.pop() if len(wrappers) == 1 else ""
    for source, info in sources.items():
        name = rename(source.removeprefix(wrapper).replace(_COMPILED, "."))
        if name in tensors:
            raise CheckpointError(
                f"tensors {shown(tensors[name].name)} and {shown(source)} are two names of one weight, {shown(name)}; "
                "keep one of them"
            )
        tensors[name] = info
    return tensors


@lru_cache(1 << 14)  # a hundred patterns are tried for each of a model's names, each time that it is opened
def canonical_name(name: str) -> str:
    """The canonical name of a checkpoint's tensor; names of unknown parts stay unchanged."""
    for pattern, part in _CANONICAL:
        renamed, count = pattern.subn(part, name)
        if count:
            return renamed
    return name


def check_finite(array: NDArray[Any], name: str) -> None:
    """Raise `CheckpointError` when the stored bits of float32, float16 or BF16 (uint16) hold NaN or infinity."""
    integer, exponent = _EXPONENT[array.dtype.name]
    bits = array.reshape(-1).view(integer)
    bad = 0
    for start in range(0, bits.size, _CHUNK):
        bad += int(np.count_nonzero((bits[start : start + _CHUNK] & exponent) == exponent))
    if bad:
        raise CheckpointError(
            f"tensor {name} holds NaN or infinity in {bad:,} of {bits.size:,} values; download the checkpoint again"
        )


def _config(folder: Path, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    files = checkpoint_files(folder)
    _refuse_adapter(folder)
    if not files.exists("config.json"):
        _refuse_gguf(folder)
        raise CheckpointError(
            f"{folder} holds no config.json, so it is not a Hugging Face checkpoint; name the directory of one, or a "
            "hub id (org/name)"
        )
    config = json_object(files.read("config.json", MAX_CONFIG), "config.json")
    check(config)
    return config


def check_model(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model of another family, or one that is quantised in an unknown way."""
    find_family(config)
    stated_settings(config)


def _source_tensors(folder: Path, *, allow_pickle: bool) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Every tensor of the checkpoint by its name in the file, quantised matrices computed, and notes for the user."""
    tensors, notes = _stored_tensors(folder, allow_pickle=allow_pickle)
    settings = stated_settings(read_settings(folder, "config.json"), read_settings(folder, GPTQ_FILE))
    return tensors if settings is None else with_matrices(tensors, settings), notes


def _stored_tensors(folder: Path, *, allow_pickle: bool) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Every tensor that the checkpoint stores, and notes on the files for the user."""
    files = checkpoint_files(folder)
    if files.exists(SINGLE):
        return _tensors(files, SINGLE), ()
    if files.exists(INDEX):
        return _sharded_tensors(files, _weight_map(files, INDEX, ".safetensors"), INDEX), ()
    if allow_pickle and (files.exists(PICKLE_INDEX) or files.exists(PICKLE)):
        weight_map = _weight_map(files, PICKLE_INDEX, ".bin") if files.exists(PICKLE_INDEX) else {}
        shards = sorted(set(weight_map.values())) or [PICKLE]
        tensors = pickled_tensors(files, shards)
        note = (
            f"the weights are {counted(len(shards), 'pickled file')} in {files.path}; only their tensors are read, in "
            "a confined process"
        )
        return _sharded_tensors(files, weight_map, PICKLE_INDEX, tensors) if weight_map else tensors[PICKLE], (note,)
    _refuse_gguf(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"the weights are a pickle ({shown(pickles[0])}), which is not opened; use a checkpoint in safetensors, or "
            "--allow-pickle, which reads only the tensors and runs no code"
        )
    raise CheckpointError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; if its weights are {PICKLE} on the hub, use --allow-pickle, "
        "which reads only the tensors and runs no code"
    )


def _refuse_adapter(folder: Path) -> None:
    """Raise UnsupportedModelError if a folder holds a peft adapter, which transformers applies to another model."""
    if not checkpoint_files(folder).exists(ADAPTER):
        return
    base = read_settings(folder, ADAPTER).get("base_model_name_or_path")
    raise UnsupportedModelError(
        f"{folder} holds an adapter of {shown(str(base))} ({ADAPTER}), which vtx does not apply; merge it into that "
        f"model (peft's merge_and_unload), save the result, and export that, or remove {ADAPTER} if it is merged"
    )


def _refuse_gguf(path: Path) -> None:
    """Raise UnsupportedModelError for a GGUF file, a folder with one, and a hub's repository of them."""
    name = path.parent.parent.name if in_cache(path) else path.name
    if any(path.glob("*.gguf")) or "gguf" in name.lower():
        raise UnsupportedModelError(
            f"{path} is in GGUF, a format of llama.cpp that vtx does not read; use the Hugging Face checkpoint that it "
            "was made from"
        )


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
            raise CheckpointError(f"{index} names {shown(shard)}; vtx reads only {suffix} files there")
    return entries


def is_plain_path(name: str) -> bool:
    """Return True if a checkpoint's name of a file or folder leads to its own folder or below."""
    parts = name.split("/")
    return name.isprintable() and not re.search(r"[\\:]", name) and not {"", ".", ".."} & set(parts)


def _sharded_tensors(
    files: Folder,
    weight_map: Mapping[str, str],
    index: str,
    found: Mapping[str, Mapping[str, TensorInfo]] | None = None,
) -> dict[str, TensorInfo]:
    """The tensors of all shards: `found` if they have been read, else read from safetensors."""
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
