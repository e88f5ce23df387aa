"""Compare the 5G air of a link with recorded round trips, and print the quantiles of both.

    EDGESPEC_DATA=DIR PYTHONPATH=.:sim python benchmarks/recorded_5g.py [--json FILE]

``tests/sim/recorded_5g.py`` says what is compared and which number is fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.sim.recorded_5g import RECORDINGS, SHARES, compare, read_recording


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the comparison to this file as well")
    chosen = parser.parse_args()
    folder = Path(os.environ.get("EDGESPEC_DATA", "../shared/data")) / "traces" / "cicv5g"
    if not folder.is_dir():
        print(f"{folder}: no recordings; name the data's folder in EDGESPEC_DATA", file=sys.stderr)
        return 1
    found = [
        one for name in RECORDINGS for one in compare(name, read_recording(folder / f"{name}.txt"))
    ]
    head = " ".join(f"{100 * share:>6g}%" for share in SHARES)
    print(f"{'':26}{'':21}{'rest':>6} {head}  distance")
    for one in found:
        if one.model.startswith("radio"):
            cells = " ".join(f"{value:7.0f}" for value in one.recorded_ms)
            print(f"{one.recording:26}{'recorded':21}{'':>6} {cells}  ({one.messages} messages)")
        cells = " ".join(f"{value:7.0f}" for value in one.modelled_ms)
        print(f"{'':26}{one.model:21}{one.rest_ms:6.2f} {cells}  {one.distance:.3f}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
