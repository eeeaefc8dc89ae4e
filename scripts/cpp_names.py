"""Write runtime/cpp/src/bundle/names.hpp: names, limits and constants of the Python runtime for the C++ runtime.

`tests/runtime/cpp/test_names.py` fails if the file differs from this output.
"""

from __future__ import annotations

from pathlib import Path

from vtx.runtime import checks
from vtx.runtime.api import accepting, answer
from vtx.runtime.backends import memory, slots
from vtx.runtime.backends.engines import INSTRUCTIONS
from vtx.runtime.backends.openvino import cache, integers, paged
from vtx.runtime.backends.ort import cache as ort_cache
from vtx.runtime.backends.ort import library
from vtx.runtime.backends.tensorrt.backend import ACTIONS, NO_FRAMES, NOT_BUILT
from vtx.runtime.bundle import card, tensors
from vtx.runtime.bundle.bundle import QUICK_BYTES
from vtx.runtime.bundle.spec import action_spec, image_settings, manifest, model_spec, names, text_settings
from vtx.runtime.policies.make import NOT_RENUMBERED
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.prompt import guiding, messages, template, text
from vtx.runtime.session import prefix_file, sampling
from vtx.runtime.vision import limits, tokens, video, video_child
from vtx.runtime.vision.layouts import anyres, budget, crops, frames, marked, native

FILE = Path(__file__).parents[1] / "runtime/cpp/src/bundle/names.hpp"
HEAD = """\
// Names, limits and constants that the Python runtime declares. Written by scripts/cpp_names.py; do not edit.
#pragma once

#include <cstdint>

namespace vtxcore::names {

"""
TENSORS = (
    "IDS", "HIDDEN", "HIDDEN_OUT", "PIXELS", "FEATURES", "POSITIONS", "COS", "SIN", "LAST_SLOT", "TOTAL_SLOTS",
    "LOGITS", "BEST", "ODDS", "QUERY", "KEY", "KEY_SCALE", "ATTENTION_SUM", "ATTENTION_MAX", "TAU", "PATCH_INDEX",
    "MERGED", "SIMILARITY", "CLS_ATTENTION", "CLS_ATTENTION_LAST", "CLIP_PATCHES", "TEXT_EMBEDDING", "RECEIVED",
    "TOWER_TOKENS", "TOWER_STATES", "SEEN_SLOTS", "GROUP", "ROBOT_STATE", "ACTIONS", "TIME", "CHANGE", "SLOTTED",
    "UNCACHED", "STATEFUL", "STATE", "STATE_ENDS", "STATE_OUT", "SLIDING_COS", "SLIDING_SIN", "FIRST_SLOT",
)  # fmt: skip
FILES = ("TOKENIZER", "TEMPLATE", "ROPE", "FINAL_NORM", "NEWLINE", "STATE", "KV_SCALES")
WIDTH = 125  # of a line, in .clang-format
LIMITS = ("MAX_FILE_BYTES", "MAX_SIDE", "MAX_PIXELS", "MAX_RESIZED_SIDE", "MAX_RESIZED_PIXELS", "MAX_PARTS",
          "MAX_SCANS", "MAX_SCAN_BLOCKS", "MAX_FRAME_PIXELS", "MAX_SAMPLED_FRAMES")  # fmt: skip


def header() -> str:
    """The text of names.hpp."""
    words = {name: getattr(names, name) for name in TENSORS}
    words |= {f"FILE_{name}": getattr(manifest, name) for name in FILES} | {
        "WEIGHT": tensors.WEIGHT,
        "BIAS": tensors.BIAS,
        "TOKEN_INPUT": names.TOKEN_INPUT,
        "NEWLINE_TENSOR": tensors.NEWLINE_TENSOR,
    }
    words |= {f"PAGED_{name}": getattr(paged, name) for name in ("PAST", "BEGINS", "BLOCKS", "BLOCK_BEGINS", "FILLED")}
    words |= {"PAGED_SLIDING": paged.SLIDING, "PAGED_WINDOW": paged.WINDOW, "PAGED_IMAGES": paged.IMAGES}
    words |= {"PAGED_ROWS": paged.OUTPUTS, "ORT_SILENCE": library.SILENCE}
    words |= {"NO_FRAMES": NO_FRAMES, "NOT_BUILT": NOT_BUILT}
    words |= {"NOT_RENUMBERED": NOT_RENUMBERED, "PREFIX_FORMAT": prefix_file.FORMAT, "NOT_FINITE": sampling.NOT_FINITE}
    words["PAIRS"] = manifest.PAIRS
    words["NO_ACTIONS"] = ACTIONS
    words |= {name: getattr(card, name) for name in ("YES_NO", "CHOICE", "NUMBER", "TEXT")}
    prefixes = {
        "PAST_KEY": names.past_key(""),
        "PAST_VALUE": names.past_value(""),
        "PRESENT_KEY": names.present_key(""),
        "PRESENT_VALUE": names.present_value(""),
        "KEY_SCALE_OF": names.key_scale(""),
        "VALUE_SCALE_OF": names.value_scale(""),
        "SOURCE_SLOT": names.source_slot(""),
    }
    numbers = {name: getattr(limits, name) for name in LIMITS}
    numbers |= {
        "FORMAT": manifest.FORMAT,
        "MAX_MANIFEST": manifest.MAX_BYTES,
        "MAX_TOKENIZER": text.MAX_TOKENIZER_BYTES,
        "MAX_TEMPLATE_BYTES": text.MAX_TEMPLATE_BYTES,
        "MAX_TEMPLATE": template.MAX_SOURCE,
        "MAX_PRINTED": template.MAX_OUTPUT,
        "MAX_TEXT": messages.MAX_TEXT,
        "MOST_WHOLE": checks.MOST,
        "MOST_THREADS": checks.MOST_THREADS,
        "MAX_STEPS": action_spec.MAX_STEPS,
        "MAX_BINS": action_spec.MAX_BINS,
        "MAX_NUMBERS": action_spec.MAX_NUMBERS,
        "MAX_LAYERS": model_spec.MAX_LAYERS,
        "MAX_SIZE": model_spec.MAX_SIZE,
        "MAX_SEGMENT": model_spec.MAX_SEGMENT,
        "MAX_TAPS": model_spec.MAX_TAPS,
        "RECENT": slots.RECENT,
        "TRIED": slots.TRIED,
        "STATE_BYTES": slots.STATE_BYTES,
        "MAX_ID": text_settings.MAX_ID,
        "MAX_PATTERN": text_settings.MAX_PATTERN,
        "COORDINATES": text_settings.COORDINATES,
        "MAX_INPUT_SIDE": image_settings.MAX_INPUT_SIDE,
        "QUICK_BYTES": QUICK_BYTES,
        "MAX_RESOLUTIONS": anyres.MAX_RESOLUTIONS,
        "MAX_TILES": anyres.MAX_TILES,
        "MAX_MARKED_SIDE": marked.MAX_SIDE,
        "MAX_RATIO": native.MAX_RATIO,
        "MAX_CROPS": crops.MAX_CROPS,
        "MASKED": ort_cache.MASKED,
        "NEWLINE": tokens.NEWLINE,
        "CLASS_TOKEN": names.CLASS_TOKEN,
        "GONE": names.GONE,
        "PATCH": names.PATCH,
        "WINDOW": names.WINDOW,
        "ODDS_WITHDRAW": names.ODDS_ORDER.index("withdraw"),
        "PAGED_BLOCK": paged.BLOCK,
        "ROW_SCALE_BYTES": cache.ROW_SCALE_BYTES,
        "QUESTION_ROWS": memory.QUESTION_ROWS,
        "FEW_TOKENS": cache.FEW,
        "LARGEST_INTEGER": integers.LARGEST,
        "MAX_SCHEMA": guiding.MAX_SCHEMA,
        "MAX_REGEX": guiding.MAX_REGEX,
        "MAX_GRAMMAR": guiding.MAX_GRAMMAR,
        "MAX_CHOICES": guiding.MAX_CHOICES,
        "MAX_SCORED": accepting.MAX_SCORED,
        "KEPT_GRAMMARS": guiding.KEPT,
        "MAX_COMBINED": guiding.MAX_COMBINED,
        "MAX_MULTIPLE": guiding.MAX_MULTIPLE,
        "MAX_OPERATORS": guiding.MAX_OPERATORS,
        "MAX_FRAME_TOKENS": frames.MAX_FRAME_TOKENS,
        "MAX_BETWEEN": frames.MAX_BETWEEN,
        "MAX_LONGER": frames.MAX_LONGER,
        "MAX_RATE": video.MAX_RATE,
        "GROWTH": slots.GROWTH,
    }
    numbers |= {name.upper(): limit for name, limit in guiding.LIMITS.items()}
    quantised = [row for row in PRECISIONS.values() if row.openvino_group]
    numbers |= {f"QUANTISED_ROWS_{row.name.upper()}": row.openvino_group for row in quantised}
    numbers |= {f"WIDE_{row.name.upper()}": row.openvino_hidden for row in PRECISIONS.values()}
    lines = [f'inline constexpr char {_camel(name)}[] = "{word}";' for name, word in (words | prefixes).items()]
    lines = [line if len(line) <= WIDTH else line.replace(" = ", " =\n    ", 1) for line in lines]
    lines += [f"inline constexpr int64_t {_camel(name)} = {number};" for name, number in numbers.items()]
    lines += ["struct RowsOfARun {", "  const char *weights, *compute;", "  int64_t rows;", "};"]
    runs = [
        f'{{"{row.name}", "{compute}", {count}}}'
        for row in PRECISIONS.values()
        for compute, count in row.openvino_tokens.items()
    ]
    lines.append(f"inline constexpr RowsOfARun kRowsOfARun[] = {{{', '.join(runs)}}};")
    lines += [
        "struct Instructions {",
        "  const char *compute, *flag;",
        "};",
        "// clang-format off",
        "inline constexpr Instructions kInstructions[] = {",
    ]
    lines += [f'    {{"{compute}", "{flag}"}},' for compute, flags in INSTRUCTIONS.items() for flag in flags]
    lines += ["};", "// clang-format on"]
    lines.append(f"inline constexpr int64_t kBudgets[] = {{{', '.join(map(str, budget.BUDGETS))}}};")
    positions = ", ".join(f'"{kind}"' for kind in model_spec.POSITIONS)
    lines.append(f"inline constexpr const char* kTowerPositions[] = {{{positions}}};")
    lines.append(f"inline constexpr float kTauDefault = {names.VISION_DEFAULTS[names.TAU]}f;")
    lines.append(f"inline constexpr double kUsualRate = {video_child.USUAL_RATE};")
    lines.append(f"inline constexpr double kLeastPenalty = {sampling.LEAST_PENALTY};")
    lines.append(f"inline constexpr double kUnlikely = {answer.UNLIKELY};")
    lines.append(f"inline constexpr double kWidest = {action_spec.WIDEST};")
    return HEAD + "\n".join(lines) + "\n\n}  // namespace vtxcore::names\n"


def _camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


if __name__ == "__main__":
    FILE.write_text(header(), encoding="utf-8")
