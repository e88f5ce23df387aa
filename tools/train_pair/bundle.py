"""From the package to a folder where its draft is trained on, and back: the draft in float32 and as
int4 ONNX.

python -m tools.train_pair.bundle unpack
python -m tools.train_pair.bundle pack          # after ``distill``
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from edgespec.device.export.export import export_draft
from edgespec.models.folders import BUNDLED_FOLDER, model_info, trained_length

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
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


def pack(folder: Path, bundled: Path) -> None:
    checkpoint = folder / "edgespec-draft"
    shutil.rmtree(checkpoint, ignore_errors=True)
    draft = LlamaForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    draft.save_pretrained(checkpoint)
    for name in TOKENIZER_FILES:
        shutil.copyfile(folder / "tokenizer" / name, checkpoint / name)
    out, length = bundled / "draft", trained_length(checkpoint)
    export_draft(checkpoint, out, model_info(checkpoint), bits=4, trained_length=length)
    shutil.copyfile(checkpoint / "model.safetensors", out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("unpack", "pack"))
    parser.add_argument("--folder", type=Path, default=Path("build/pair"))
    parser.add_argument("--bundled", type=Path, default=BUNDLED_FOLDER)
    args = parser.parse_args()
    if args.stage == "unpack":
        unpack(args.bundled, args.folder)
    else:
        pack(args.folder, args.bundled)


if __name__ == "__main__":
    main()
