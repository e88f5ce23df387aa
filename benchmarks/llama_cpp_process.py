"""llama.cpp for ``llama_cpp_peer.py``, in an interpreter of its own that has nothing of ours.

    python llama_cpp_process.py check
    python llama_cpp_process.py write FOLDER FILE     writes FILE, a GGUF of the tensors in FOLDER
    python llama_cpp_process.py serve FILE THREADS    feeds tokens: one JSON line each way

Wants numpy, ``gguf``, and llama.cpp's library, which lies in ``xllamacpp`` or ``llama-cpp-python``.
The C interface is called by ctypes. Parameters are passed on as the library's own defaults made
them, in blocks larger than they are, so that no version's layout has to be known; of a batch only
the fields are touched that it has had since 2023, and they are looked at before.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import sys
import time
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = {"xllamacpp": "xllamacpp", "llama_cpp": "llama-cpp-python"}
_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class _Parameters(ctypes.Structure):
    _fields_ = (("content", c_uint64 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", c_int32),
        ("tokens", POINTER(c_int32)),
        ("embeddings", c_void_p),
        ("positions", c_void_p),
        ("sequence_counts", c_void_p),
        ("sequences", c_void_p),
        ("wanted", POINTER(c_int8)),
        ("rest", c_uint64 * 32),
    )


def library() -> tuple[str, Path]:
    """(package and version, where its shared object lies). Raises ``SystemExit`` without one."""
    for module, package in PACKAGES.items():
        spec = importlib.util.find_spec(module)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for pattern in ("lib/libllama.so", "lib/libllama.dylib", "xllamacpp*.so"):
                for path in sorted(Path(folder).glob(pattern)):
                    return f"{package} {importlib.metadata.version(package)}", path
    raise SystemExit(f"none of the packages {sorted(PACKAGES.values())} is installed")


def write(folder: Path, target: Path) -> None:
    """``model.json`` in ``folder`` names the architecture, its keys and the tensors, which lie
    beside it: uint8 [N, bytes of a row] is Q4_0, everything else is as it is."""
    import gguf

    model = json.loads((folder / "model.json").read_text())
    writer = gguf.GGUFWriter(target, model["architecture"])
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in model["keys"].items():
        adders[type(value)](key, value)
    for name in model["tensors"]:
        data = np.load(folder / f"{name}.npy", mmap_mode="r")
        kind = gguf.GGMLQuantizationType.Q4_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A context of 512 tokens on the processor, with the library's defaults otherwise."""

    def __init__(self, path: Path, threads: int) -> None:
        self.package, shared_object = library()
        self._lib = lib = ctypes.CDLL(str(shared_object))
        self._declare(lib)
        self.log: list[str] = []
        self._hear = _LOG(lambda level, text, data: self.log.append(text.decode(errors="replace")))
        lib.llama_log_set(self._hear, None)
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}: {''.join(self.log[-8:])}")
        self._context = lib.llama_init_from_model(self._model, lib.llama_context_default_params())
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context: {''.join(self.log[-8:])}")
        lib.llama_set_n_threads(self._context, threads, threads)
        self._memory = lib.llama_get_memory(self._context)
        self.size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def feed(self, keep: int, tokens: list[int], every: bool) -> np.ndarray[Any, Any]:
        """Forget what is behind ``keep`` tokens, append ``tokens``, and give the last row of
        logits, [V]; with ``every`` all rows are computed."""
        lib, count = self._lib, len(tokens)
        if not lib.llama_memory_seq_rm(self._memory, 0, keep, -1):
            raise SystemExit(f"llama.cpp cannot go back to {keep} tokens")
        values = (c_int32 * count)(*tokens)
        batch = lib.llama_batch_get_one(values, count)
        if batch.count != count or ctypes.addressof(batch.tokens.contents) != (
            ctypes.addressof(values)
        ):
            raise SystemExit("this llama.cpp has batches of another layout")
        if every:
            wanted = (c_int8 * count)(*([1] * count))
            batch.wanted = ctypes.cast(wanted, POINTER(c_int8))
        if status := lib.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode of {count} tokens behind {keep} returned {status}")
        row = lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, (self.size,))

    def describe(self) -> dict[str, Any]:
        """What it is and what it does with the weights."""
        log = "".join(self.log).splitlines()
        return {
            "package": self.package,
            "features": self._lib.llama_print_system_info().decode(),
            "context": self._lib.llama_n_ctx(self._context),
            "buffers": [line.strip() for line in log if "buffer size" in line],
        }

    def _declare(self, lib: Any) -> None:
        types: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "llama_log_set": (None, (_LOG, c_void_p)),
            "llama_backend_init": (None, ()),
            "llama_model_default_params": (_Parameters, ()),
            "llama_context_default_params": (_Parameters, ()),
            "llama_model_load_from_file": (c_void_p, (c_char_p, _Parameters)),
            "llama_init_from_model": (c_void_p, (c_void_p, _Parameters)),
            "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
            "llama_get_memory": (c_void_p, (c_void_p,)),
            "llama_memory_seq_rm": (ctypes.c_bool, (c_void_p, c_int32, c_int32, c_int32)),
            "llama_model_get_vocab": (c_void_p, (c_void_p,)),
            "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
            "llama_batch_get_one": (_Batch, (POINTER(c_int32), c_int32)),
            "llama_decode": (c_int32, (c_void_p, _Batch)),
            "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
            "llama_print_system_info": (c_char_p, ()),
            "llama_n_ctx": (ctypes.c_uint32, (c_void_p,)),
        }
        for name, (result, arguments) in types.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments


def serve(path: Path, threads: int) -> None:
    """Answer requests ``{"keep", "tokens", "every", "save"}`` with seconds, until there are none;
    ``save`` names a file for the last row of logits."""
    llama = Llama(path, threads)
    print(json.dumps(llama.describe()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        clock, cpu = time.perf_counter(), time.process_time()
        logits = llama.feed(request["keep"], request["tokens"], request["every"])
        times = {"clock_s": time.perf_counter() - clock, "cpu_s": time.process_time() - cpu}
        if request["save"]:
            np.save(request["save"], logits)
        print(json.dumps(times), flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["check"]:
            if importlib.util.find_spec("gguf") is None:
                raise SystemExit("the package gguf is not installed")
            print(library()[0])
        case ["write", folder, target]:
            write(Path(folder), Path(target))
        case ["serve", path, threads]:
            serve(Path(path), int(threads))
        case other:
            raise SystemExit(f"{other}: {__doc__}")


if __name__ == "__main__":
    main()
