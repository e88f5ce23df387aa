"""Put a trained pair where the package ships it: target in bf16, draft in float32 and as int4 ONNX.

python -m tools.train_pair.bundle --folder build/pair
python -m tools.train_pair.bundle --draft-only          # after ``start`` and ``distill --more``
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info, trained_length

BUNDLED = Path(__file__).parents[2] / "edgespec" / "models" / "bundled"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def save(source: Path, tokenizer: Path, out: Path, dtype: torch.dtype) -> None:
    shutil.rmtree(out, ignore_errors=True)
    LlamaForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(out)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/pair"))
    parser.add_argument("--out", type=Path, default=BUNDLED)
    parser.add_argument("--draft-only", action="store_true", help="leave the target's files alone")
    folder, out = (args := parser.parse_args()).folder, args.out
    if not args.draft_only:
        save(folder / "target", folder / "tokenizer", out / "target", torch.bfloat16)
    checkpoint = folder / "edgespec-draft"
    save(folder / "draft", folder / "tokenizer", checkpoint, torch.float32)
    length = trained_length(checkpoint)
    export_draft(checkpoint, out / "draft", model_info(checkpoint), bits=4, trained_length=length)
    shutil.copyfile(checkpoint / "model.safetensors", out / "draft" / "model.safetensors")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {total / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
