"""The memory of device processes beside their plan, for SmolLM2's 4-bit export and the bundled
draft.

Oracle: the kernel's record of the most memory that a process had resident (``VmHWM``), and for a
child process of the device the same. The verifier's text is scripted, so that nothing of it depends
on the drafts, which fill their windows.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import psutil
import pytest

from edgespec.core.device.memory import MIB
from edgespec.models.model_source import Purpose, resolve_source
from edgespec_sim.token_sources.source import Script, ScriptedTarget
from tests.kit.live_verifier import child_environment, serve_toy
from tests.kit.real_models import convert, report
from tests.present import require

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/PID/status"),
]

CONTEXT: Final = 4096
DRAFTING: Final = (
    *("--set", "policy.name=fixed", "--set", "policy.gamma=1"),
    *("--set", "policy.run_ahead=never"),
)
# A full window gives up an eighth of its tokens. The output fills it again.
OUTPUT: Final = 180
# It shows what the process had at its most before it ends.
GENERATE: Final = """
import atexit, sys
from pathlib import Path
atexit.register(lambda: print(Path("/proc/self/status").read_text(), file=sys.stderr))
from edgespec.__main__ import main
main()
"""


@pytest.fixture(scope="module", params=["bundled", "SmolLM2"])
def draft(request: pytest.FixtureRequest, made: Path) -> str:
    """Return the name of an exported draft."""
    if request.param == "bundled":
        return "bundled"
    from edgespec.device.export.export import export_to_cache
    from edgespec.models.folders import check_checkpoint

    path: Path = request.getfixturevalue("smollm2_path")
    folder = convert(path, made)
    check_checkpoint(folder)
    return str(export_to_cache(folder, 4, lambda line: None))


@asynccontextmanager
async def scripted(draft: str) -> AsyncIterator[str]:
    """Serve texts of the draft's vocabulary that the draft does not expect; yield the address."""
    info = replace(resolve_source(draft, Purpose.DRAFT).info, context_length=CONTEXT)

    def write(prompt: Sequence[int], count: int) -> Script:
        places = range(len(prompt), len(prompt) + count)
        return Script([1000 + at * 7919 % 3000 for at in places], ())

    async with serve_toy(ScriptedTarget(info, write)) as (address, _):
        yield address


async def run(*command: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env=child_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, said = await process.communicate()
    return require(process.returncode), out.decode(), said.decode()


def peak_bytes(status: str) -> int:
    """Return the largest resident memory in a status file of the kernel."""
    return 1024 * int(require(re.search(r"VmHWM:\s+(\d+) kB", status))[1])


def read_status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")


def text_of(window: int, number: int) -> str:
    """Return a text of more tokens than ``window``, which differs by ``number``."""
    return " ".join(f"{number} word{at}" for at in range(window // 3))


async def measure_generate(address: str, draft: str, budget: str, window: int) -> int:
    code, _, said = await run(
        *("-c", GENERATE, "generate", text_of(window, 0), "--max-tokens", str(OUTPUT)),
        *("--draft", draft, "--verifier", address, "--memory-budget", budget, *DRAFTING),
    )
    assert code == 0, said
    return peak_bytes(said)


async def measure_serve(
    address: str, draft: str, budget: str, window: int, chats: int
) -> tuple[int, int]:
    """Let ``serve`` answer ``chats`` requests at the same time. Return the sum of the largest
    resident memory of its processes, and their proportional share of it now."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edgespec", "serve", "--port", "0", "--draft", draft),
        *("--verifier", address, "--memory-budget", budget, *DRAFTING),
        env=child_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        line = (await require(process.stdout).readline()).decode()
        url = require(re.search(r"ready on (\S+)", line))[1]
        asking = (
            asyncio.to_thread(ask, f"{url}/chat/completions", text_of(window, number))
            for number in range(chats)
        )
        for usage in await asyncio.gather(*asking):
            assert usage["completion_tokens"] == OUTPUT
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children()]
        most = sum(peak_bytes(read_status(one.pid)) for one in family)
        return most, sum(one.memory_full_info().pss for one in family)
    finally:
        process.terminate()
        await process.wait()


def ask(url: str, text: str) -> Any:
    message = {"role": "user", "content": text}
    body = {"messages": [message], "max_tokens": OUTPUT, "ignore_eos": True}
    header = {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), header), timeout=600) as answer:
        return json.load(answer)["usage"]


async def test_the_peak_of_a_device_is_the_planned_one(draft: str) -> None:
    code, out, said = await run(
        *("-m", "edgespec", "plan", "memory", draft, "--memory-budget", "2GiB", "--json")
    )
    assert code == 0, said
    plan = json.loads(out)
    planned, window, caches = plan["peak_bytes"], plan["window"], plan["caches"]
    async with scripted(draft) as address:
        one = await measure_generate(address, draft, "2GiB", window)
        several, share = await measure_serve(address, draft, "2GiB", window, caches)
    report(f"\n{plan['draft']}:")
    for name, expected, found in (
        ("generate", planned["generate"], one),
        (f"serve, {caches} chats", planned["serve"], several),
    ):
        error = expected / found - 1.0
        report(f"  {name}: planned {expected / MIB:.1f} MiB, peak {found / MIB:.1f} ({error:+.1%})")
        assert abs(error) <= 0.05
    report(f"  serve, proportional share: {share / MIB:.1f} MiB")
    assert share <= several <= plan["predicted_bytes"]


async def test_a_device_stays_below_the_smallest_budget(draft: str) -> None:
    code, _, said = await run(
        *("-m", "edgespec", "plan", "memory", draft, "--memory-budget", "50MiB")
    )
    assert code == 1
    smallest = float(require(re.search(r"needs at least (\d+\.\d) MiB", said))[1])
    budget = f"{smallest + 0.1:.1f}MiB"
    async with scripted(draft) as address:
        one = await measure_generate(address, draft, budget, 1024)
        several, _ = await measure_serve(address, draft, budget, 1024, 3)
    report(f"\nbudget {budget}: generate {one / MIB:.1f} MiB, serve {several / MIB:.1f} MiB")
    assert max(one, several) <= (smallest + 0.1) * MIB
