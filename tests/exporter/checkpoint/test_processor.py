import json
import os

import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from vtx.exporter.checkpoint.processor import image_settings, read_image_processor
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.strict import json_value

CLASSES = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
}
# LLaVA 1.5 as first published on the hub, with what its authors' tools left in it
OLD = {
    "crop_size": 336,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 336,
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
def test_missing_keys_take_the_defaults_of_the_hf_class(kind, suffix):
    bare = image_settings({"image_processor_type": kind + suffix})
    assert bare == image_settings(CLASSES[kind]().to_dict())
    assert bare.size == (224, 224)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "options",
    [
        {"size": 30, "crop_size": 20},
        {"size": [30, 40], "crop_size": [20, 10], "do_center_crop": True},
        {"size": {"height": 30, "width": 40}, "do_center_crop": False, "resample": 2},
        {"size": 30, "default_to_square": True, "do_center_crop": False},
        {"size": None, "image_mean": None, "do_rescale": None},
        {"do_rescale": False, "image_mean": [0.1, 0.2, 0.3]},
        {"do_normalize": False, "rescale_factor": 1 / 127.5},
        {"do_resize": False, "do_center_crop": True, "crop_size": 50},
        {"image_mean": 0.5, "image_std": 0.25},
    ],
    ids=str,
)
def test_old_and_new_forms_mean_what_they_mean_to_hf(kind, options):
    config = {"image_processor_type": kind, **options}
    try:
        wanted = image_settings(CLASSES[kind](**options).to_dict())
    except UnsupportedModelError:
        with pytest.raises(UnsupportedModelError, match="several sizes"):
            image_settings(config)
    else:
        assert image_settings(config) == wanted


def test_an_old_configuration_is_read():
    settings = image_settings(OLD)
    assert json_value(settings) == {
        "pad": None,
        "resize": 336,
        "resample": "bicubic",
        "crop": [336, 336],
        "rescale": 1 / 255,
        "mean": OLD["image_mean"],
        "std": OLD["image_std"],
    }


def test_padding_is_llavas_alone():
    assert image_settings({"image_processor_type": "LlavaImageProcessor", "do_pad": True}).pad == (122, 116, 104)
    assert image_settings({"image_processor_type": "CLIPImageProcessor", "do_pad": True}).pad is None
    with pytest.raises(UnsupportedModelError, match="pad_size"):
        image_settings({"image_processor_type": "CLIPImageProcessor", "do_pad": True, "pad_size": 400})


def test_without_a_name_it_is_llavas_processor_as_for_transformers():
    assert image_settings({"do_pad": True}).pad == (122, 116, 104)


@pytest.mark.parametrize(
    "kind", ["Qwen2VLImageProcessor", "LlavaNextImageProcessor", "CLIPImageProcessorX", "PixtralImageProcessorFast"]
)
def test_other_processors_are_refused_by_name(kind):
    with pytest.raises(UnsupportedModelError, match=f"image processor '{kind}' is not supported; supported: CLIP"):
        image_settings({"image_processor_type": kind})


@pytest.mark.parametrize(
    "options",
    [
        {"size": {"longest_edge": 336}},
        {"size": {"shortest_edge": 336, "longest_edge": 500}},
        {"size": {}},
        {"crop_size": {"shortest_edge": 336}},
        {"do_center_crop": False},
        {"use_square_size": True},
    ],
    ids=str,
)
def test_other_options_are_refused_by_name(options):
    with pytest.raises(UnsupportedModelError):
        image_settings({"image_processor_type": "CLIPImageProcessor", **options})


@pytest.mark.parametrize(
    "options",
    [
        {"size": -1},
        {"size": 0},
        {"size": True},
        {"size": "336"},
        {"size": 336.5},
        {"size": [336]},
        {"size": {"shortest_edge": 10**12}},
        {"size": {"shortest_edge": "336"}},
        {"crop_size": -5},
        {"crop_size": "big"},
        {"resample": 9},
        {"resample": True},
        {"resample": "bicubic"},
        {"rescale_factor": 0},
        {"rescale_factor": "1/255"},
        {"rescale_factor": float("nan")},
        {"image_std": [0.5, 0.5, 0]},
        {"image_std": [0.5, 0.5]},
        {"image_std": "half"},
        {"image_std": [0.5, 0.5, True]},
        {"image_mean": [0.5, 0.5, float("inf")]},
        {"image_mean": [0.5, 0.5, None]},
        {"image_mean": [1.5, 0.5, 0.5], "do_pad": True},
        {"do_resize": "yes"},
        {"do_center_crop": 1},
        {"image_processor_type": ["LlavaImageProcessor"]},
        {"size": "x" * 100_000},
    ],
    ids=lambda options: str(options)[:60],
)
def test_nonsense_is_a_checkpoint_error_in_one_short_line(options):
    with pytest.raises(CheckpointError) as caught:
        image_settings({"image_processor_type": "LlavaImageProcessor", **options})
    assert not isinstance(caught.value, UnsupportedModelError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def test_the_nested_configuration_comes_before_the_file_of_its_own(tmp_path):
    write(tmp_path / "preprocessor_config.json", OLD)
    assert image_settings(read_image_processor(tmp_path)).size[0] == 336
    write(tmp_path / "processor_config.json", {"processor_class": "LlavaProcessor"})
    assert image_settings(read_image_processor(tmp_path)).size[0] == 336
    write(tmp_path / "processor_config.json", {"image_processor": {**OLD, "crop_size": 30}})
    assert image_settings(read_image_processor(tmp_path)).size[0] == 30


def test_what_transformers_saves_is_read(tmp_path):
    processor = SiglipImageProcessorPil(size={"height": 30, "width": 40})
    processor.save_pretrained(tmp_path)
    assert image_settings(read_image_processor(tmp_path)) == image_settings(processor.to_dict())


def test_without_either_file_the_error_names_what_to_download(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        image_settings(read_image_processor(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "\ud800",
        "[" * 100_000,
        '{"size": ' + "9" * 5000 + "}",
        '{"a": "' + "x" * (1 << 20) + '"}',
    ],
    ids=range(9),
)
@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json"])
def test_files_that_are_no_configuration_are_checkpoint_errors(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError) as caught:
        image_settings(read_image_processor(tmp_path))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inner", [3, [], "CLIPImageProcessor"])
def test_a_nested_configuration_that_is_no_object_is_refused(tmp_path, inner):
    write(tmp_path / "processor_config.json", {"image_processor": inner})
    with pytest.raises(CheckpointError, match="not a JSON object"):
        image_settings(read_image_processor(tmp_path))


def test_a_directory_or_fifo_in_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").mkdir()
    with pytest.raises(CheckpointError, match="is a directory, a regular file is needed"):
        image_settings(read_image_processor(tmp_path))
    os.mkfifo(tmp_path / "processor_config.json")
    with pytest.raises(CheckpointError, match="is a device or a pipe, a regular file is needed"):
        image_settings(read_image_processor(tmp_path))
