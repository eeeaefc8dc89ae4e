"""Video-LLaVA and LLaVA-NeXT-Video, in Hugging Face's layout."""

from __future__ import annotations

from tests.support.tiny import Tiny

VIDEO_LLAVA = Tiny(family="video_llava", context=768)
NEXT_VIDEO = Tiny(family="llava_next_video", context=512)
