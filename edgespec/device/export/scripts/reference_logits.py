"""What the source model itself computes, for an exported graph to be held against.

    python reference_logits.py SOURCE OUT.npy ID,ID,...

Runs in the exporter's environment (torch, transformers) and imports nothing of ours. Writes logits
behind every token, float32 [T, V].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(source: Path, out: Path, tokens: list[int]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    np.save(out, logits.float().numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(one) for one in sys.argv[3].split(",")])
