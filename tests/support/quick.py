"""The cases of tests with a model that no run needs, and those that `make test` leaves to `make test-all`.

A case with a model takes ten to a hundred times as long as one without. Most faults that show with a value of a
parameter show with any values of the others: a case is run for each value, not for each combination, unless a test's
mark says which count. In the rooms that compute the most `make test` runs one test with a model of each file, which is
the first one or named here, and whatever is marked `representative`; of a file whose truth another one shows of a
representative, none. Files in which `make planted` looks for its faults are left as they are. What is asked on every
engine is asked on onnxruntime; on OpenVINO are the files about engines, and the contract of families.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable
from functools import cache
from itertools import filterfalse
from pathlib import Path

import pytest

from tests.support.covering import covering

# Fixtures that make a model or are one.
MODELS = {"tiny_checkpoint", "models", "model", "folder", "towers", "openvla", "pi0_bundle", "lasting"}
MARKED = ("covering", "gpu")  # of tests whose cases are all wanted, or chosen by the mark
ROOMS = tuple(
    f"tests/{room}/"
    for room in (
        "exporter/bundling", "exporter/calibration", "exporter/gates", "exporter/graphs", "exporter/weights",
        "plugins/tune", "runtime/backends", "runtime/cpp", "runtime/report", "runtime/session", "tools/bench",
        "tools/evaluation", "tools/fit",
    )
)  # fmt: skip
# Files of which cases on OpenVINO are run, too: those about engines, and those that show faults in what it alone has.
ENGINES = (
    "tests/runtime/backends/",
    "tests/runtime/cpp/test_gemma.py",
    "tests/runtime/cpp/test_openvino.py",
    "tests/runtime/cpp/test_states.py",
    "tests/runtime/session/test_contract.py",
)
# Files in `ROOMS`, and the test with a model that `make test` runs of each, where that is not the first.
HEADLINES = {
    "exporter/bundling/test_export": "test_an_exported_bundle_stands_alone",
    "plugins/tune/test_tune": "test_training_brings_the_student_at_k_nearer_to_the_teacher",
    "runtime/backends/test_openvino": "test_the_token_ids_are_those_of_onnxruntime",
    "runtime/cpp/test_contract": "test_pixels_and_answers_are_those_of_python",
    "runtime/cpp/test_gemma": "test_traces_are_met",
    "runtime/cpp/test_native": "test_fewer_pixels_and_what_does_not_fit_are_as_in_python",
    "runtime/cpp/test_openvino": "test_questions_at_one_k_after_another_reuse_and_answer_as_in_python",
    "runtime/cpp/test_token_acting": "test_ids_and_actions_are_those_of_python",
    "runtime/cpp/test_videos": "test_what_reductions_leave_of_a_video_is_answered_as_in_python",
    "runtime/session/test_contract": "test_answers_are_those_of_transformers_and_at_k_of_the_statement",
    "runtime/session/test_openvla": "test_ids_logits_and_actions_are_those_of_the_statement",
    "runtime/session/test_qwen3_5": "test_any_number_of_tokens_in_one_run_is_as_one_token_after_the_other",
    "runtime/session/test_qwen_videos": "test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement",
    "runtime/session/test_sequences": "test_any_sequence_equals_fresh_answers",
    "tools/evaluation/test_fresh_answers": "test_an_evaluation_asks_again_about_an_image_that_was_replaced",
}

# Files of which `make test` runs no test with a model, and the file that shows their truth of a representative there.
SHOWN_ELSEWHERE = {
    **dict.fromkeys(
        (
            "eagle", "gemma", "gemma3", "image_tokens", "internvl_chat", "minicpm", "original", "paligemma",
            "qwen3", "random_methods", "tiles", "token_inputs", "vila",
        ),
        "runtime/session/test_contract",
    ),
    **dict.fromkeys(("minicpm_videos", "smolvlm_videos"), "runtime/session/test_qwen_videos"),
    "reduce_session": "runtime/session/test_sequences",
    "rest_precisions": "runtime/session/test_rest",
}  # fmt: skip
SHOWN_ELSEWHERE = {f"runtime/session/test_{name}": shown for name, shown in SHOWN_ELSEWHERE.items()}
SHOWN_ELSEWHERE |= {
    "exporter/calibration/test_commands": "exporter/calibration/test_calibrate",
    "exporter/calibration/test_fresh_answers": "exporter/calibration/test_calibrate",
    "exporter/calibration/test_rests": "exporter/calibration/test_calibrate",
    "runtime/backends/test_device_history": "runtime/backends/test_tensorrt",
    "runtime/backends/test_shared_blocks": "runtime/backends/test_batches",
    "runtime/backends/test_tensorrt_videos": "runtime/backends/test_tensorrt",
    "runtime/backends/test_tensorrt_windows": "runtime/backends/test_tensorrt",
    "runtime/cpp/test_accepting": "runtime/cpp/test_card",
    "runtime/cpp/test_budgets": "runtime/cpp/test_selection",
    "runtime/cpp/test_joined": "runtime/cpp/test_contract",
    "runtime/cpp/test_slices": "runtime/cpp/test_contract",
    "runtime/cpp/test_token_inputs": "runtime/cpp/test_contract",
    "runtime/cpp/test_traces": "runtime/cpp/test_contract",
    "runtime/report/test_traces": "runtime/cpp/test_contract",
    "runtime/session/test_lfm3_videos": "runtime/session/test_qwen_videos",
    "runtime/session/test_lisa": "runtime/session/test_contract",
    "runtime/session/test_reduce_parity": "runtime/session/test_contract",
    "runtime/session/test_selection_parity": "runtime/session/test_contract",
    "runtime/session/test_text_tower_parity": "runtime/session/test_contract",
    "tools/fit/test_fit": "tools/fit/test_retain",
}


def values(case: pytest.Function) -> dict[str, Hashable]:
    """The values of a case by its parameters; those that one mark gives together are one."""
    parameters = dict(case.callspec.params)
    together = [marker.args[0] for marker in case.iter_markers("parametrize")]
    groups = [[name.strip() for name in names.split(",")] if isinstance(names, str) else names for names in together]
    groups += [[name] for name in parameters if not any(name in group for group in groups)]
    # a value is one object in all cases that have it
    return {",".join(group): tuple(id(parameters[name]) for name in group) for group in groups}


@cache
def planted() -> frozenset[str]:
    """The files whose tests must find the faults of `make planted`."""
    text = (Path(__file__).parents[2] / "scripts/planted.toml").read_text(encoding="utf-8")
    return frozenset(re.findall(r'"(tests/[^":]+)', text))


def repeated(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those cases of unmarked tests, among slow ones and among others, without which every value still occurs."""
    if "VTX_SEQUENCES" in os.environ:
        return []
    cases = list[pytest.Item]()
    for of_test in with_models(items).values():
        if not any(map(of_test[0].get_closest_marker, MARKED)):
            cases += _beyond_values(list(filter(is_slow, of_test)))
            if not of_test[0].get_closest_marker("sampled"):
                cases += _beyond_values(list(filterfalse(is_slow, of_test)))
    return cases


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those cases that show what a representative shows, and pairs of values that a test's mark asks for."""
    lesser = "VTX_CPUID_HIDDEN" in os.environ  # as on a lesser processor all tests of arithmetic count
    cases, headlines = list[pytest.Item](), dict[str, str]()
    for name, of_test in with_models(items).items():
        file, _, test = name.partition("::")
        if not lesser and file.startswith(ROOMS) and file not in planted() and not all(map(is_slow, of_test)):
            short = file.removeprefix("tests/").removesuffix(".py")
            named = "" if short in SHOWN_ELSEWHERE else HEADLINES.get(short, test)
            if headlines.setdefault(file, named) != test:
                cases += [case for case in of_test if not case.get_closest_marker("representative")]
                continue
        quick = list(filterfalse(is_slow, of_test))
        on_openvino = [] if lesser or file.startswith(ENGINES) else list(filter(_on_openvino, quick))
        if len(on_openvino) < len(quick):
            cases += on_openvino
            quick = [case for case in quick if case not in on_openvino]
        if any(map(of_test[0].get_closest_marker, MARKED)):
            cases += _beyond_values(quick)
    return cases


def _on_openvino(case: pytest.Function) -> bool:
    return hasattr(case, "callspec") and "openvino" in case.callspec.params.values()


def _beyond_values(cases: list[pytest.Function]) -> list[pytest.Function]:
    """The cases without which every value of a parameter still occurs."""
    if len(cases) < 2:
        return []
    needed = set(covering([values(case) for case in cases], 1))
    return [case for number, case in enumerate(cases) if number not in needed]


def with_models(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Function]]:
    """The cases of each test with a model."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and MODELS & set(item.fixturenames):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def is_slow(case: pytest.Function) -> bool:
    return case.get_closest_marker("slow") is not None
