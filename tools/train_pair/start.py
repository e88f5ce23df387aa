"""Unpack the bundled pair, so that training goes on from where it stands.

python -m tools.train_pair.start --folder build/pair

The target comes out bit for bit; the draft's weights lie on its 4-bit grid. Distil on with
``distill --more``; never train the target on, or every text that was recorded of it changes.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tools.train_pair.bundle import BUNDLED, TOKENIZER_FILES

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")


def unpack(bundled: Path, folder: Path) -> None:
    """Raises ``FileExistsError`` rather than write over a draft that is being trained."""
    if (folder / "draft").exists():
        raise FileExistsError(f"{folder / 'draft'} is there already: distill on, or remove it")
    for role in ("target", "draft"):
        (folder / role).mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            shutil.copyfile(bundled / role / name, folder / role / name)
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(bundled / "target" / name, folder / "tokenizer" / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/pair"))
    parser.add_argument("--bundled", type=Path, default=BUNDLED)
    args = parser.parse_args()
    unpack(args.bundled, args.folder)
    print(f"{args.folder}: target, draft and tokenizer of {args.bundled}")


if __name__ == "__main__":
    main()
