"""The cases of tests with a model that `make test` leaves to `make test-all`.

A case with a model takes ten to a hundred times as long as one without. Most faults that show with a value of a
parameter show with any values of the others: `make test` runs a case for each value, not for each combination. What a
family has in common with others it asks of LLaVA, LFM2-VL, Qwen-VL, pi0, tiles and videos; of the rest it runs one test
each. In the contract of families those are marked `representative`. Tests whose marks say which cases count are left as
they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pytest

from tests.support.covering import covering

# Fixtures that make a model or are one.
MODELS = {"tiny_checkpoint", "models", "model", "folder", "towers", "openvla", "pi0_bundle", "lasting"}
MARKED = ("slow", "sampled")
# Files of single families, in both runtimes, and the test with a model that `make test` runs of each.
FAMILIES = {
    "cpp/test_contract": "test_pixels_and_answers_are_those_of_python",
    "cpp/test_gemma": "test_traces_are_met",
    "cpp/test_joined": "test_pixels_and_answers_are_those_of_python",
    "cpp/test_native": "test_fewer_pixels_and_what_does_not_fit_are_as_in_python",
    "cpp/test_token_acting": "test_ids_and_actions_are_those_of_python",
    "cpp/test_videos": "test_what_reductions_leave_of_a_video_is_answered_as_in_python",
    "session/test_contract": "test_answers_are_those_of_transformers_and_at_k_of_the_statement",
    "session/test_eagle": "test_pixels_features_ids_and_logits_are_those_of_the_statement",
    "session/test_gemma": "test_a_smaller_budget_of_tokens_is_chosen_at_run_time",
    "session/test_gemma3": "test_tokens_that_a_reduction_keeps_still_see_each_other",
    "session/test_internvl_chat": "test_a_bundle_answers_as_transformers_and_at_k_as_the_statement",
    "session/test_minicpm": "test_pixels_are_those_of_transformers_processor_on_pillow",
    "session/test_minicpm_videos": "test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement",
    "session/test_openvla": "test_ids_logits_and_actions_are_those_of_the_statement",
    "session/test_paligemma": "test_a_further_question_runs_the_image_through_the_decoder_again",
    "session/test_qwen3": "test_text_sees_a_map_from_the_second_layer_behind_its_own_on",
    "session/test_qwen3_5": "test_any_number_of_tokens_in_one_run_is_as_one_token_after_the_other",
    "session/test_qwen_videos": "test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement",
    "session/test_smolvlm_videos": "test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement",
    "session/test_vila": "test_an_image_and_a_video_are_asked_about_together_and_later_questions_equal_fresh_runs",
}


def values(case: pytest.Function) -> dict[str, Hashable]:
    """The values of a case by its parameters; those that one mark gives together are one."""
    parameters = dict(case.callspec.params)
    together = [marker.args[0] for marker in case.iter_markers("parametrize")]
    groups = [[name.strip() for name in names.split(",")] if isinstance(names, str) else names for names in together]
    groups += [[name] for name in parameters if not any(name in group for group in groups)]
    # a value is one object in all cases that have it
    return {",".join(group): tuple(id(parameters[name]) for name in group) for group in groups}


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those cases of unmarked tests that repeat values, or what a representative shows."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and MODELS & set(item.fixturenames):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    cases = list[pytest.Item]()
    for name, of_test in tests.items():
        file, _, test = name.partition("::")
        headline = FAMILIES.get(file.removeprefix("tests/runtime/").removesuffix(".py"), test)
        if test != headline:
            cases += [case for case in of_test if not case.get_closest_marker("representative")]
        else:
            cases += _repeated([case for case in of_test if not any(map(case.get_closest_marker, MARKED))])
    return cases


def _repeated(cases: list[pytest.Function]) -> list[pytest.Item]:
    """The cases without which every value of a parameter still occurs."""
    if len(cases) < 2 or not all(hasattr(case, "callspec") for case in cases):
        return []
    needed = set(covering([values(case) for case in cases], 1))
    return [case for number, case in enumerate(cases) if number not in needed]
