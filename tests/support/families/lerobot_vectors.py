"""Write lerobot.json: files that LeRobot's own code saves of tiny policies, and the actions it computes with them.

Needs lerobot 0.6.1 and what its policies import, `python -m tests.support.families.lerobot_vectors`. Only sizes are
changed: those of PaliGemma and its expert, which its code states, and the processor of pictures of SmolVLM2, which the
policy does not use, is left out where torchvision is not installed.

The file here was written on Python 3.11 with transformers 5.23: stubs stood in for torchvision, gymnasium, cv2, which
no policy calls, Python 3.12's syntax was rewritten, and two calls fitted to that transformers (`DynamicCache.crop`,
`create_causal_mask`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature, RTCAttentionSchedule
from lerobot.policies import pi_gemma
from lerobot.policies.pi0 import modeling_pi0, processor_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05, processor_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.smolvla import modeling_smolvla, processor_smolvla, smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from safetensors import safe_open
from transformers import AutoTokenizer

from tests.support.families.lerobot import EXPERT, POLICIES, TINY, WORDS, make_base, weight
from tests.support.tiny import Tiny, random_image

NAMES = {"smolvla": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "pi05": "google/paligemma-3b-pt-224"}
NAMES["pi0"] = NAMES["pi05"]
IMAGES = "observation.images."
PREVIOUS = 6  # actions of the last chunk that are left
STATISTICS = {
    "mean": ([0.5, -1.0, 2.0, 0.0], [1.0, 0.0, -2.0]), "std": ([1.0, 0.5, 2.0, 0.25], [0.5, 3.0, 1.0]),
    "q01": ([-1.0, -2.0, -1.0, 0.25], [-2.0, 0.0, 1.0]), "q99": ([1.0, 2.0, 4.0, 0.5], [2.0, 3.0, 1.0]),
}  # fmt: skip


@dataclass(frozen=True)
class Robot:
    """A tiny policy beside its robot: sizes of both, statistics of state and actions, and settings of the policy."""

    policy: str
    tiny: Tiny
    expert: Mapping[str, int] = field(default_factory=lambda: EXPERT)
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"top": (80, 60), "wrist": (40, 90)})
    state: Sequence[float] = (0.4, -1.25, 2.5, 0.125)
    width: int = 3  # of an action
    widths: tuple[int, int] = (6, 5)  # of the policy's states and actions, the robot's among them
    horizon: int = 7
    steps: int = 5
    statistics: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=lambda: STATISTICS)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def stats(self) -> dict[str, dict[str, torch.Tensor]]:
        """The statistics as LeRobot's processors take them."""
        pairs = {key: (torch.tensor(state), torch.tensor(action)) for key, (state, action) in self.statistics.items()}
        return {
            "observation.state": {key: state for key, (state, _) in pairs.items()},
            "action": {key: action for key, (_, action) in pairs.items()},
        }

    def noise(self) -> np.ndarray:
        return np.random.default_rng(5).standard_normal((self.horizon, self.widths[1]), np.float32)


ROBOTS = {
    policy: Robot(
        policy, TINY[policy], settings={"num_vlm_layers": 4, "empty_cameras": 1} if policy == "smolvla" else {}
    )
    for policy in POLICIES
}


def features(robot: Robot) -> dict[str, Any]:
    pictures = {
        IMAGES + name: PolicyFeature(FeatureType.VISUAL, (3, height, width))
        for name, (width, height) in robot.cameras.items()
    }
    states, actions = robot.widths
    return {
        "input_features": {"observation.state": PolicyFeature(FeatureType.STATE, (len(robot.state),)), **pictures},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (robot.width,))},
        "chunk_size": robot.horizon, "n_action_steps": robot.horizon, "max_state_dim": states,
        "max_action_dim": actions, "device": "cpu", **robot.settings,
    }  # fmt: skip


def config_of(robot: Robot, base: Path, rtc: RTCConfig | None) -> Any:
    side = (robot.tiny.image, robot.tiny.image)
    if robot.policy == "smolvla":
        return SmolVLAConfig(
            **features(robot), vlm_model_name=str(base), resize_imgs_with_padding=side, num_steps=robot.steps,
            rtc_config=rtc, load_vlm_weights=False,
        )  # fmt: skip
    kind = PI05Config if robot.policy == "pi05" else PI0Config
    return kind(
        **features(robot), image_resolution=side, num_inference_steps=robot.steps, rtc_config=rtc, dtype="float32"
    )


def shrunk(tiny: Tiny) -> Any:
    """PaliGemma's class with the tiny sizes in place of those that LeRobot's code states."""
    real = pi_gemma.PaliGemmaForConditionalGenerationWithPiGemma

    def made(config: Any) -> Any:
        config.text_config.vocab_size = tiny.vocab - 1
        config.image_token_index = tiny.vocab - 1
        config.text_config.pad_token_id = None
        vision = {
            "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn, "projection_dim": tiny.hidden,
            "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads,
            "patch_size": tiny.patch, "vision_use_head": False,
        }  # fmt: skip
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        config.projection_dim = tiny.hidden
        return real(config)

    return made


def decoder_sizes(robot: Robot) -> Any:
    tiny = robot.tiny

    def sizes(variant: str) -> Any:
        expert = variant == "gemma_300m"
        return SimpleNamespace(
            width=robot.expert["hidden_size"] if expert else tiny.hidden,
            mlp_dim=robot.expert["intermediate_size"] if expert else tiny.ffn,
            depth=tiny.layers, num_heads=tiny.heads, num_kv_heads=tiny.kv_heads, head_dim=tiny.head_dim,
        )  # fmt: skip

    return sizes


def make(robot: Robot, config: Any, base: Path) -> Any:
    """LeRobot's policy with the tiny checkpoint's weights."""
    if robot.policy == "smolvla":
        ids = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
        processors = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(tokenizer=ids))
        with mock.patch.object(smolvlm_with_expert, "AutoProcessor", processors):
            made = modeling_smolvla.SmolVLAPolicy(config)
    else:
        module = modeling_pi05 if robot.policy == "pi05" else modeling_pi0
        kind = module.PI05Policy if robot.policy == "pi05" else module.PI0Policy
        with (
            mock.patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", shrunk(robot.tiny)),
            mock.patch.object(module, "get_gemma_config", decoder_sizes(robot)),
        ):
            made = kind(config)
    state = {name: torch.from_numpy(weight(name, list(t.shape))) for name, t in made.state_dict().items()}
    made.load_state_dict(state, strict=True)
    return made.float().eval()


def processors(robot: Robot, config: Any, base: Path) -> Any:
    module, name = {
        "smolvla": (processor_smolvla, "make_smolvla_pre_post_processors"),
        "pi05": (processor_pi05, "make_pi05_pre_post_processors"),
        "pi0": (processor_pi0, "make_pi0_pre_post_processors"),
    }[robot.policy]
    tokenizer = AutoTokenizer.from_pretrained(base)
    with mock.patch("lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained", return_value=tokenizer):
        return getattr(module, name)(config, robot.stats())


def hide_images(policy: str, made: Any, k: int, count: int) -> list[Any]:
    """Let no token see the first `count` ones, which are pictures', in the layers from `k` on."""
    handles = []
    if policy == "smolvla":
        model = made.model.vlm_with_expert
        for name in ("forward_attn_layer", "forward_cross_attn_layer"):
            original = getattr(model, name)

            def changed(layers: Any, embeds: Any, layer: int, positions: Any, mask: Any, *rest: Any, f: Any = original,
                        **more: Any) -> Any:  # fmt: skip
                if layer >= k - 1:
                    mask = mask.clone()
                    mask[..., :count] = False
                return f(layers, embeds, layer, positions, mask, *rest, **more)

            patch = mock.patch.object(model, name, changed)
            patch.start()
            handles.append(patch.stop)
        return handles
    parts = made.model.paligemma_with_expert

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., :count] = torch.finfo(torch.float32).min
        return args, {**kwargs, "attention_mask": mask}

    for layers in (parts.paligemma.model.language_model.layers, parts.gemma_expert.model.layers):
        handles += [layer.register_forward_pre_hook(hook, with_kwargs=True).remove for layer in layers[k - 1 :]]
    return handles


def act(
    robot: Robot, config: Any, base: Path, made: Any, k: int | None, cameras: Sequence[str] = (), **more: Any
) -> list[Any]:
    """The actions in the robot's units, from pictures of some cameras or of all."""
    before, after = processors(robot, config, base)
    seen = cameras or [*robot.cameras]
    pictures = {
        IMAGES + name: torch.from_numpy(np.asarray(random_image(number, size), np.float32) / 255).permute(2, 0, 1)
        for number, (name, size) in enumerate(robot.cameras.items())
        if name in seen
    }
    batch = before({"observation.state": torch.tensor(robot.state), "task": WORDS, **pictures})
    tokens = robot.tiny.vision_tokens * len(seen)
    handles = [] if k is None else hide_images(robot.policy, made, k, tokens)
    actions = made.predict_action_chunk(batch, noise=torch.from_numpy(robot.noise())[None], **more)
    for remove in handles:
        remove()
    return after(actions)[0].tolist()


def save(robot: Robot, base: Path, folder: Path) -> Any:
    """Save the policy with its processors as LeRobot does, and return it."""
    config = config_of(robot, base, None)
    made = make(robot, config, base)
    made.save_pretrained(folder)
    for part in processors(robot, config, base):
        part.save_pretrained(folder)
    return made


def record(robot: Robot) -> dict[str, Any]:
    policy = robot.policy
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base", robot.tiny)
        saved = Path(folder) / "saved"
        made = save(robot, base, saved)
        config = made.config
        settings = {}
        for file in saved.glob("*.json"):
            text = file.read_text().replace(str(base), NAMES[policy])
            settings[file.name] = json.loads(text)
        stats, tensors = {}, {}
        for file in saved.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                if file.name == "model.safetensors":
                    for name in opened.keys():  # noqa: SIM118  not a mapping
                        value = opened.get_tensor(name)
                        assert np.array_equal(value.numpy(), weight(name, list(value.shape))), name
                        tensors[name] = list(value.shape)
                else:
                    stats[file.name] = {n: opened.get_tensor(n).tolist() for n in opened.keys()}  # noqa: SIM118
        actions = {
            "none": act(robot, config, base, made, None),
            "wrist": act(robot, config, base, made, None, ["wrist"]),
            **{str(k): act(robot, config, base, made, k) for k in (2, 4)},
        }
        chunk = torch.from_numpy(np.random.default_rng(6).standard_normal((PREVIOUS, robot.width), np.float32))
        chunk[:, 2] = -1  # the one number that is left of it in the units of a robot whose range is 0
        chunks = {}
        for schedule in RTCAttentionSchedule:
            rtc = RTCConfig(enabled=True, prefix_attention_schedule=schedule, execution_horizon=5)
            guided = config_of(robot, base, rtc)
            other = make(robot, guided, base)
            chunks[schedule.value] = act(
                robot, guided, base, other, None, inference_delay=2, prev_chunk_left_over=chunk
            )
        return {
            "base": NAMES[policy].split("/")[-1], "settings": settings, "statistics": stats, "tensors": tensors,
            "state": robot.state, "steps": robot.steps, "actions": actions, "previous": chunk.tolist(),
            "chunks": chunks,
        }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    written = {policy: record(robot) for policy, robot in ROBOTS.items()}
    path = Path(__file__).with_name("lerobot.json")
    path.write_text(json.dumps(written, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
