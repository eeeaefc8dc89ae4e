"""Chat templates of original LLaVA and InternVL-Chat, with the system texts that are published with the models."""

from __future__ import annotations

from collections.abc import Mapping

_VICUNA = (
    "A chat between a curious {0} and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the {0}'s questions."
)
_LLAMA_2 = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
_TEXTS = "{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
_IMAGES = "{% for part in m['content'] if part['type'] != 'text' %}{{ image_token }}\n{% endfor %}"
_NO_SYSTEM = "{% if messages[0]['role'] != 'system' %}"
_END = "{% endif %}"


def _template(opening: str, system: str, user: str, assistant: str, reply: str) -> str:
    """`opening` comes first without a system text; then a text per role, and `reply` begins an answer."""
    return (
        f"{_NO_SYSTEM}{opening}{_END}{{% for m in messages %}}"
        f"{{% if m['role'] == 'system' %}}{system}{{% elif m['role'] == 'user' %}}{user}{{% else %}}{assistant}{_END}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{reply}{_END}"
    )


def _speakers(system: str) -> str:
    """USER: and ASSISTANT: in turn; the end token ends an answer."""
    user = f"USER: {_IMAGES}{_TEXTS} "
    assistant = f"ASSISTANT: {_TEXTS}{{{{ eos_token }}}}"
    return _template(f"{system} ", f"{_TEXTS} ", user, assistant, "ASSISTANT:")


def _instructions(system: str, between: str) -> str:
    """Questions in [INST], the system text inside the first; `between` precedes the others."""
    block = "[INST] <<SYS>>\n{}\n<</SYS>>\n\n"
    following = (
        "{% if not loop.first and messages[loop.index0 - 1]['role'] == 'assistant' %}" + between + "[INST] " + _END
    )
    user = f"{following}{_IMAGES}{_TEXTS} [/INST]"
    assistant = f" {_TEXTS} {{{{ eos_token }}}}"
    return _template(block.format(system) if system else "[INST] ", block.format(_TEXTS), user, assistant, "")


def _chatml(system: str, after: str) -> str:
    """InternVL-Chat's: `after` follows each message, and each image is in tokens of its own."""
    begin = "<|im_start|>{}\n"
    end = f"<|im_end|>{after}"
    images = _IMAGES.replace("{{ image_token }}", "<img>{{ image_token }}</img>")
    opening, system_text = (begin.format("system") + text + end for text in (system, _TEXTS))
    user = begin.format("user") + images + _TEXTS + end
    reply = begin.format("assistant")
    return _template(opening, system_text, user, reply + _TEXTS + end, reply)


INTERNVL_SYSTEMS: Mapping[str, str] = {
    "internlm2-chat": (
        "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "  # noqa: RUF001
        "是一个有用无害的人工智能助手。"
    ),
    "internvl2_5": (
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、"  # noqa: RUF001
        "清华大学及多家合作单位联合开发的多模态大语言模型。"
    ),
}
TEMPLATES: Mapping[str, str] = {
    "vicuna_v1": _speakers(_VICUNA.format("user")), "llava_v1": _speakers(_VICUNA.format("human")),
    "llava_llama_2": _instructions(_LLAMA_2, "{{ bos_token }}"), "mistral_instruct": _instructions("", ""),
    "internlm2-chat": _chatml(INTERNVL_SYSTEMS["internlm2-chat"], ""),
    "internvl2_5": _chatml(INTERNVL_SYSTEMS["internvl2_5"], "\n"),
}  # fmt: skip
