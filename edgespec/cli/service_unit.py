"""The systemd user unit of a device's endpoint, as text: ``edgespec serve`` under the service
manager of the user who is logged in.

Without privileges systemd can make a mount namespace only inside of a user namespace, which some
systems forbid (Ubuntu from 23.10 on); a unit that asks for one does not start there. So what needs
a namespace is asked for by ``isolated`` alone. What is a filter of system calls or a limit always
works, and is always there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

UNIT_NAME: Final = "edgespec-serve.service"
_MIB: Final = 1 << 20
_LEAST_ABOVE: Final = 64 * _MIB
_STOP_S: Final = 15
_QUOTED: Final = frozenset(" \t'\";#&|<>(){}*?!~`")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What a unit runs, and within which bounds. ``program`` is an absolute path, ``arguments``
    what stands behind it. Raises ``ValueError``."""

    program: str
    arguments: tuple[str, ...] = ("serve",)
    memory_budget_bytes: int | None = None
    """``--memory-budget`` in bytes; None: none was given, and nothing is enforced."""
    environment_file: str = "%E/edgespec/serve.env"
    """Holds keys, as ``NAME=value`` lines; it may be missing. Empty: none."""
    isolated: bool = False
    """Sees a read-only system and its own folders alone; needs user namespaces."""
    working_directory: str = ""
    """Where relative paths among ``arguments`` begin; empty: at home."""
    notify: bool = False
    """The program tells when it is ready (``sd_notify``)."""

    def __post_init__(self) -> None:
        if not self.program.startswith("/"):
            raise ValueError(f"program is {self.program!r}, but must be an absolute path")
        budget = self.memory_budget_bytes
        if budget is not None and budget < _MIB:
            raise ValueError(f"memory_budget_bytes is {budget}, but must be at least {_MIB}")
        texts = (self.program, *self.arguments, self.environment_file, self.working_directory)
        for text in texts:
            if any(ord(letter) < 32 for letter in text):
                raise ValueError(f"{text!r} holds a control character, which no unit can")


def render_unit(settings: ServiceSettings) -> str:
    """The unit, for ``~/.config/systemd/user``."""
    parts = [_HEAD, *_service(settings), "", *_SANDBOX]
    if settings.isolated:
        parts += ["", *_ISOLATED]
    return "\n".join([*parts, "", "[Install]", "WantedBy=default.target", ""])


def memory_max_bytes(budget_bytes: int) -> int:
    """The limit that the system enforces, above what the plan keeps to.

    Formula: budget + max(budget / 10, 64 MiB), in whole MiB. The plan's own margin is below the
    budget; what is above it is for pages that the control group counts and the process does not
    (the kernel's, and files being read). 600 MiB give 664 MiB, 2 GiB give 2253 MiB."""
    limit = budget_bytes + max(budget_bytes // 10, _LEAST_ABOVE)
    return -(-limit // _MIB) * _MIB


def command_line(words: Sequence[str]) -> str:
    """``words`` as systemd reads them back: specifiers and variables are no more than letters."""
    return " ".join(_word(word) for word in words)


_HEAD: Final = """\
# The endpoint of a device under the service manager of its user (systemd 249 or newer):
# ~/.config/systemd/user/edgespec-serve.service. Made by edgespec; a change belongs into a drop-in
# (`systemctl --user edit edgespec-serve`).
[Unit]
Description=edgespec endpoint
# One that fails at each start is left alone after five attempts in five minutes.
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]"""


def _service(settings: ServiceSettings) -> list[str]:
    lines = [
        f"Type={'notify' if settings.notify else 'exec'}",
        f"ExecStart={command_line([settings.program, *settings.arguments])}",
        "Restart=on-failure",
        "RestartSec=2",
        "SuccessExitStatus=143",  # asked to stop while the draft was being loaded
        f"TimeoutStopSec={_STOP_S}",
        "KillMode=mixed",
        "UMask=0077",
        "LimitCORE=0",
        "TasksMax=256",
        "Environment=PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1",
        "# A draft that is behind others costs speed only: what the user works with comes first.",
        "Nice=5",
    ]
    if settings.working_directory:
        where = settings.working_directory.replace("%", "%%")
        lines.insert(2, f"WorkingDirectory={where}")
    if settings.environment_file:
        lines.insert(2, f"EnvironmentFile=-{settings.environment_file}")
    if settings.memory_budget_bytes is not None:
        limit = memory_max_bytes(settings.memory_budget_bytes)
        lines += [
            "# The plan keeps below its budget by itself; this is for when it is mistaken.",
            f"MemoryMax={limit // _MIB}M",
            "MemorySwapMax=0",
            "OOMPolicy=stop",
        ]
    return lines


_SANDBOX: Final = (
    "# Filters and limits: they need no privilege and no namespace.",
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged @keyring",
    "SystemCallErrorNumber=EPERM",
)
_ISOLATED: Final = (
    "# Needs user namespaces: leave it out where the unit fails with 226/NAMESPACE or 217/USER.",
    "PrivateUsers=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "CacheDirectory=edgespec",
    "StateDirectory=edgespec",
    "PrivateTmp=yes",
    "PrivateDevices=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelTunables=yes",
)


def _word(word: str) -> str:
    plain = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if word and not _QUOTED & set(word):
        return plain
    return '"' + plain.replace('"', '\\"') + '"'
