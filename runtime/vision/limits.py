"""Limits of pictures and videos. Each is checked before the work that it bounds, or during it."""

from __future__ import annotations

MAX_FILE_BYTES = 64 << 20
MAX_SIDE = 16_384
MAX_PIXELS = 64 << 20  # photos of 61-megapixel sensors pass; 256 MiB decoded
MAX_RESIZED_SIDE = 32_768  # before the crop: at 336 pixels an aspect ratio of 97:1
MAX_RESIZED_PIXELS = 32 << 20
MAX_PARTS = 32_768  # JPEG segments, PNG and WebP chunks; libpng's 8 KiB chunks fill 64 MiB with 8,192
MAX_GIF_BLOCKS = 1 << 19  # of at most 255 bytes each; half of them fill 64 MiB
MAX_SCANS = 100  # of a JPEG; progressive photos have about 10
MAX_SCAN_BLOCKS = 32 << 20  # 8x8 blocks times the scans that visit them: about 2 s; 61 megapixels need half of it
MAX_DECODE_SECONDS = 10.0  # CPU time of the thread that decodes

DEFAULT_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
KNOWN_FORMATS = (*DEFAULT_FORMATS, "PPM")

MAX_VIDEO_BYTES = 1 << 30
MAX_VIDEO_SECONDS = 1200  # that the file declares
MAX_VIDEO_FRAMES = 72_000  # 20 minutes of 60 a second
MAX_FRAME_PIXELS = 16 << 20  # 4K has 8.8 million
MAX_VIDEO_DECODE_SECONDS = 120.0  # of the process that decodes, from its start on
MAX_VIDEO_MEMORY = 1536 << 20  # of its address space; H.264 and HEVC of 16 million pixels take up to 1 GB
MAX_SAMPLED_FRAMES = 64  # of a video, whose tokens are in memory together
MAX_CHOSEN_FRAMES = 256  # of a longer one, from which a method chooses window by window
MAX_HELD_FRAMES = 16  # of a video, prepared, in memory; those of a longer one wait in a file
