"""Put a trained draft into the package, or write a damaged copy of the bundled one to try training
on.

python -m tools.train_pair.bundle pack build/draft
python -m tools.train_pair.bundle cripple build/crippled --noise 0.3
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from edgespec.device.export.export import COPIED_FILES, export_draft
from edgespec.models.folders import BUNDLED_FOLDER

WEIGHTS = "model.safetensors"


def pack(checkpoint: Path, bundled: Path) -> None:
    """Make the output of ``edgespec distill`` the bundled draft: float32 and int4 ONNX."""
    out = bundled / "draft"
    export_draft(checkpoint, out, bits=4)
    shutil.copyfile(checkpoint / WEIGHTS, out / WEIGHTS)


def cripple(bundled: Path, out: Path, noise: float, seed: int) -> None:
    """Write the bundled draft with normal noise on each matrix, ``noise`` times as wide as the
    matrix's own numbers."""
    dice = np.random.default_rng(seed)
    out.mkdir(parents=True)
    for name in COPIED_FILES:
        if (bundled / "draft" / name).is_file():
            shutil.copyfile(bundled / "draft" / name, out / name)
    tensors = load_file(bundled / "draft" / WEIGHTS)
    for name, weight in sorted(tensors.items()):
        if weight.ndim == 2:
            drawn = dice.standard_normal(weight.shape).astype(np.float32)
            tensors[name] = weight + np.float32(noise * weight.std()) * drawn
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("pack", "cripple"))
    parser.add_argument("folder", type=Path, help="to read, to write")
    parser.add_argument("--bundled", type=Path, default=BUNDLED_FOLDER)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.stage == "pack":
        pack(args.folder, args.bundled)
    else:
        cripple(args.bundled, args.folder, args.noise, args.seed)


if __name__ == "__main__":
    main()
