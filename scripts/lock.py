"""Write ci.lock: every package that `make setup` installs beside PyTorch, with the hashes of its files.

    python scripts/lock.py cpu,openvino,rtx,export,tune,video,guided,mqtt,dev

One file serves every supported Python, by markers. Versions are those of constraints.txt, and what the resolver finds
for the rest. PyTorch and the CUDA packages that its usual build brings are left out: `make setup` installs PyTorch
first, in the build that TORCH names. `make audit` looks at that version beside the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.10"  # the oldest supported; markers tell later ones apart
WITH_TORCH = re.compile(r"(torch|triton|cuda-toolkit|nvidia-[\w-]+)==")


def main() -> None:
    """Resolve with uv, leave out what comes with PyTorch, and write the file."""
    extras = [word for extra in sys.argv[1].split(",") for word in ("--extra", extra)]
    command = ["uv", "pip", "compile", "pyproject.toml", *extras, "--universal", "--python-version", PYTHON]
    command += ["--constraints", "constraints.txt", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    blocks = re.split(r"\n(?=\S)", done.stdout.strip())
    kept = [block for block in blocks if not WITH_TORCH.match(block)]
    (ROOT / "ci.lock").write_text("\n".join(kept) + "\n", encoding="utf-8")
    print(f"ci.lock: {len(kept)} packages for Python {PYTHON} and newer")


if __name__ == "__main__":
    main()
