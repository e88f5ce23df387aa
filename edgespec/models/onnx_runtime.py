"""The only module that imports onnxruntime, with its telemetry off. The import raises
``SetupError`` for an installation that cannot be loaded.

Official builds from 1.29 on report to their maker: a persistent device id, the processor, the names
of graphs and how often they run. ``edgespec.TELEMETRY_OFF`` prevents the part that reports. If a
program imported onnxruntime before edgespec, that variable comes too late; then the call below
stops all later events.
"""

from __future__ import annotations

import logging

from edgespec.core.protocol.errors import SetupError
from edgespec.models.onnx_packages import describe_conflict, describe_failed_import, find_installed

try:
    import onnxruntime as ort
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
        raise  # it is not installed, which the importer's ``require_library`` explains
    raise SetupError(describe_failed_import(error)) from error

__all__ = ["ort"]

ort.disable_telemetry_events()
if conflict := describe_conflict(find_installed()):
    # One of them was installed last and may work, so this is no error.
    logging.getLogger(__name__).warning("%s", conflict)
