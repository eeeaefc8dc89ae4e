"""A checkpoint as transformers 5 writes it again."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.published.judge import load_processor
from tests.support.published.places import read
from tests.support.tiny import write_json

PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def resave(checkpoint: Path, folder: Path) -> Path:
    """Load model and processor with transformers, and save them; the part for videos is copied."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="auto", local_files_only=True)
    model.save_pretrained(folder)
    processor = load_processor(checkpoint)
    tokenizer, images = processor.tokenizer, processor.image_processor
    tokenizer.save_pretrained(folder)
    settings = processor.to_dict()
    settings = {name: value for name, value in settings.items() if name not in ("tokenizer", "video_processor")}
    settings["image_processor"] = images.to_dict() if hasattr(images, "to_dict") else dict(vars(images))
    kind = str(settings["image_processor"].get("image_processor_type", ""))
    settings["image_processor"]["image_processor_type"] = kind.removesuffix("Pil")
    settings.pop("feature_extractor", None)
    if hasattr(getattr(processor, "video_processor", None), "to_dict"):
        kind = next(kind.__name__ for kind in type(processor.video_processor).__mro__ if kind.__name__ != "OnPillow")
        settings["video_processor"] = processor.video_processor.to_dict() | {"video_processor_type": kind}
    write_json(folder / "processor_config.json", settings)
    if processor.chat_template:
        (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")
    videos = checkpoint / "video_preprocessor_config.json"
    if videos.exists():
        shutil.copyfile(videos, folder / videos.name)
    assert read(folder / "config.json")["transformers_version"].startswith("5.")
    return folder
