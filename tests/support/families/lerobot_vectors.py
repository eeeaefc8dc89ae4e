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
from tests.support.tiny import random_image

CAMERAS = {"observation.images.top": (80, 60), "observation.images.wrist": (40, 90)}
NAMES = {"smolvla": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "pi05": "google/paligemma-3b-pt-224"}
NAMES["pi0"] = NAMES["pi05"]
STATE = [0.4, -1.25, 2.5, 0.125]
WIDTH = 3  # of an action
HORIZON = 7
STEPS = 5
KS = (2, 4)
PREVIOUS = 6  # actions of the last chunk that are left


def statistics() -> dict[str, dict[str, torch.Tensor]]:
    rows = {
        "mean": ([0.5, -1.0, 2.0, 0.0], [1.0, 0.0, -2.0]), "std": ([1.0, 0.5, 2.0, 0.25], [0.5, 3.0, 1.0]),
        "q01": ([-1.0, -2.0, -1.0, 0.25], [-2.0, 0.0, 1.0]), "q99": ([1.0, 2.0, 4.0, 0.5], [2.0, 3.0, 1.0]),
    }  # fmt: skip
    pairs = {key: (torch.tensor(state), torch.tensor(action)) for key, (state, action) in rows.items()}
    return {
        "observation.state": {key: state for key, (state, _) in pairs.items()},
        "action": {key: action for key, (_, action) in pairs.items()},
    }


def features() -> dict[str, Any]:
    pictures = {
        name: PolicyFeature(FeatureType.VISUAL, (3, height, width)) for name, (width, height) in CAMERAS.items()
    }
    return {
        "input_features": {"observation.state": PolicyFeature(FeatureType.STATE, (len(STATE),)), **pictures},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (WIDTH,))},
        "chunk_size": HORIZON, "n_action_steps": HORIZON, "max_state_dim": 6, "max_action_dim": 5, "device": "cpu",
    }  # fmt: skip


def config_of(policy: str, base: Path, rtc: RTCConfig | None) -> Any:
    tiny = TINY[policy]
    if policy == "smolvla":
        return SmolVLAConfig(
            **features(), vlm_model_name=str(base), num_vlm_layers=4, resize_imgs_with_padding=(tiny.image, tiny.image),
            num_steps=STEPS, rtc_config=rtc, load_vlm_weights=False, empty_cameras=1,
        )  # fmt: skip
    kind = PI05Config if policy == "pi05" else PI0Config
    side = (tiny.image, tiny.image)
    return kind(**features(), image_resolution=side, num_inference_steps=STEPS, rtc_config=rtc, dtype="float32")


def shrunk(policy: str) -> Any:
    """PaliGemma's class with the tiny sizes in place of those that LeRobot's code states."""
    tiny = TINY[policy]
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


def decoder_sizes(policy: str) -> Any:
    tiny = TINY[policy]

    def sizes(variant: str) -> Any:
        expert = variant == "gemma_300m"
        return SimpleNamespace(
            width=EXPERT["hidden_size"] if expert else tiny.hidden,
            mlp_dim=EXPERT["intermediate_size"] if expert else tiny.ffn,
            depth=tiny.layers, num_heads=tiny.heads, num_kv_heads=tiny.kv_heads, head_dim=tiny.head_dim,
        )  # fmt: skip

    return sizes


def make(policy: str, config: Any, base: Path) -> Any:
    """LeRobot's policy with the tiny checkpoint's weights."""
    if policy == "smolvla":
        ids = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
        processors = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(tokenizer=ids))
        with mock.patch.object(smolvlm_with_expert, "AutoProcessor", processors):
            made = modeling_smolvla.SmolVLAPolicy(config)
    else:
        module = modeling_pi05 if policy == "pi05" else modeling_pi0
        kind = module.PI05Policy if policy == "pi05" else module.PI0Policy
        with (
            mock.patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", shrunk(policy)),
            mock.patch.object(module, "get_gemma_config", decoder_sizes(policy)),
        ):
            made = kind(config)
    state = {name: torch.from_numpy(weight(name, list(t.shape))) for name, t in made.state_dict().items()}
    made.load_state_dict(state, strict=True)
    return made.float().eval()


def processors(policy: str, config: Any, base: Path) -> Any:
    module, name = {
        "smolvla": (processor_smolvla, "make_smolvla_pre_post_processors"),
        "pi05": (processor_pi05, "make_pi05_pre_post_processors"),
        "pi0": (processor_pi0, "make_pi0_pre_post_processors"),
    }[policy]
    tokenizer = AutoTokenizer.from_pretrained(base)
    with mock.patch("lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained", return_value=tokenizer):
        return getattr(module, name)(config, statistics())


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


def act(policy: str, config: Any, base: Path, made: Any, cameras: list[str], k: int | None, **more: Any) -> list[Any]:
    """The actions in the robot's units."""
    before, after = processors(policy, config, base)
    pictures = {
        name: torch.from_numpy(np.asarray(random_image(number, size), np.float32) / 255).permute(2, 0, 1)
        for number, (name, size) in enumerate(CAMERAS.items())
        if name in cameras
    }
    batch = before({"observation.state": torch.tensor(STATE), "task": WORDS, **pictures})
    noise = np.random.default_rng(5).standard_normal((HORIZON, 5), np.float32)
    tokens = TINY[policy].vision_tokens * len(cameras)
    handles = [] if k is None else hide_images(policy, made, k, tokens)
    actions = made.predict_action_chunk(batch, noise=torch.from_numpy(noise)[None], **more)
    for remove in handles:
        remove()
    return after(actions)[0].tolist()


def record(policy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base", policy)
        saved = Path(folder) / "saved"
        config = config_of(policy, base, None)
        made = make(policy, config, base)
        made.save_pretrained(saved)
        for part in processors(policy, config, base):
            part.save_pretrained(saved)
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
        both = list(CAMERAS)
        actions = {
            "none": act(policy, config, base, made, both, None),
            "wrist": act(policy, config, base, made, both[1:], None),
            **{str(k): act(policy, config, base, made, both, k) for k in KS},
        }
        chunk = torch.from_numpy(np.random.default_rng(6).standard_normal((PREVIOUS, WIDTH), np.float32))
        chunk[:, 2] = -1  # the one number that is left of it in the units of a robot whose range is 0
        chunks = {}
        for schedule in RTCAttentionSchedule:
            rtc = RTCConfig(enabled=True, prefix_attention_schedule=schedule, execution_horizon=5)
            guided = config_of(policy, base, rtc)
            other = make(policy, guided, base)
            chunks[schedule.value] = act(
                policy, guided, base, other, both, None, inference_delay=2, prev_chunk_left_over=chunk
            )
        return {
            "base": NAMES[policy].split("/")[-1], "settings": settings, "statistics": stats, "tensors": tensors,
            "state": STATE, "steps": STEPS, "actions": actions, "previous": chunk.tolist(), "chunks": chunks,
        }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    written = {policy: record(policy) for policy in POLICIES}
    path = Path(__file__).with_name("lerobot.json")
    path.write_text(json.dumps(written, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
