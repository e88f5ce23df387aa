"""The relay below TCP: its arithmetic, what it carries between descriptors, and real kernels on it.

Namespaces and TUN devices want root; where they cannot be made, those tests skip and say why.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("packet_relay")


def tcp_packet(payload: int, options: int = 12) -> bytes:
    """IPv4 and TCP headers as RFC 791 and 9293 have them, and so many bytes."""
    total = 20 + 20 + options + payload
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, total, 0, 0, 64, 6, 0, b"\0" * 4, b"\0" * 4)
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 3, 4, (20 + options) // 4 << 4, 0x10, 99, 0, 0)
    return ip + tcp + bytes(options + payload)


def test_a_payload_is_what_is_behind_the_headers(relays: Any) -> None:
    assert relays.payload_bytes(tcp_packet(0)) == 0
    assert relays.payload_bytes(tcp_packet(77)) == 77
    assert relays.payload_bytes(tcp_packet(77, options=0)) == 77
    for other in (b"", b"\x60" + bytes(60), tcp_packet(5)[:30], bytes([0x45]) + bytes(39)):
        assert relays.payload_bytes(other) == 0


def test_a_packet_is_serialised_and_then_propagates(relays: Any) -> None:
    """100 bytes at 80 kbit/s take 10 ms, one behind the other."""
    line = relays.Direction(relays.LineSettings(one_way_s=0.05, bits_per_s=8e4))
    assert line.arrival(1.0, bytes(100)) == pytest.approx(1.06)
    assert line.arrival(1.0, bytes(100)) == pytest.approx(1.07)
    assert line.arrival(1.5, bytes(100)) == pytest.approx(1.56)


def test_a_full_queue_drops_what_comes(relays: Any) -> None:
    line = relays.Direction(relays.LineSettings(bits_per_s=8e4, queue_packets=2))
    found = [line.arrival(0.0, bytes(100)) for _ in range(3)]
    assert found[2] is None
    assert line.counts.overflowed == 1
    assert line.arrival(0.011, bytes(100)) is not None  # the first has left


def test_losses_are_as_many_as_asked_for_and_the_same_each_time(relays: Any) -> None:
    def lost(seed: int) -> list[int]:
        line = relays.Direction(relays.LineSettings(loss=0.1, seed=seed))
        packet = tcp_packet(10)
        found = [n for n in range(5000) if line.arrival(float(n), packet) is None]
        assert line.counts.dropped == line.counts.dropped_data == len(found)
        return found

    assert lost(1) == lost(1) != lost(2)
    assert len(lost(1)) == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"one_way_s": -1.0}, "one_way_s is -1.0"),
        ({"loss": 1.0}, r"loss is 1.0, but must be in \[0, 1\)"),
        ({"bits_per_s": 0.0}, "bits_per_s is 0.0"),
        ({"queue_packets": 0}, "queue_packets is 0"),
    ],
)
def test_a_setting_out_of_range_is_named(relays: Any, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(relays.LineSettings(), **change)


def test_packets_pass_both_ways_in_order_and_another_link_takes_over(relays: Any) -> None:
    """Descriptors of datagram sockets behave as those of TUN devices."""
    with ExitStack() as stack:
        ends = [stack.enter_context(one) for _ in range(2) for one in _pair()]
        near, near_relay, far, far_relay = ends
        settings = relays.LineSettings(one_way_s=0.001)
        relay = stack.enter_context(
            relays.PacketRelay(near_relay.fileno(), far_relay.fileno(), settings, settings)
        )
        for number in range(5):
            near.send(bytes([number]))
        assert [far.recv(100) for _ in range(5)] == [bytes([number]) for number in range(5)]
        far.send(b"back")
        assert near.recv(100) == b"back"
        assert relay.there.counts.packets == 5
        relay.become(settings, settings)
        near.send(b"more")
        assert far.recv(100) == b"more"
        assert relay.there.counts.packets == 1


def test_what_ends_the_relay_is_told(relays: Any) -> None:
    with ExitStack() as stack:
        near, near_relay = (stack.enter_context(one) for one in _pair())
        nothing = relays.LineSettings()
        read, write = os.pipe()  # what comes for the reading end cannot be written
        stack.callback(os.close, read)
        stack.callback(os.close, write)
        relay = relays.PacketRelay(near_relay.fileno(), read, nothing, nothing)
        relay.__enter__()
        near.send(b"x")
        relay._thread.join()
        with pytest.raises(RuntimeError, match="the packet relay failed"):
            relay.__exit__(None, None, None)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for one in pair:
        one.settimeout(60.0)
    return pair


def namespaces() -> Any:
    """The module, if they can be made here."""
    module = importlib.import_module("namespaces")
    try:
        with module.Namespace(module.DEVICE_ADDRESS, module.VERIFIER_ADDRESS):
            return module
    except module.NoNamespaces as why:
        pytest.skip(str(why))


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def test_a_kernels_tcp_repairs_what_the_relay_drops(relays: Any) -> None:
    module, before = namespaces(), interfaces()
    lines = [relays.LineSettings(one_way_s=0.002, loss=0.1, seed=seed) for seed in (1, 2)]
    sent = os.urandom(400_000)
    with module.linked_namespaces(*lines) as (device, verifier, relay), ExitStack() as stack:
        door = stack.enter_context(verifier.run(socket.socket))
        door.bind((module.VERIFIER_ADDRESS, 0))
        door.listen()
        address = door.getsockname()
        client = stack.enter_context(device.run(lambda: socket.create_connection(address, 60.0)))
        server = stack.enter_context(door.accept()[0])
        assert interfaces() == before  # nothing of it is the host's
        writing = threading.Thread(target=client.sendall, args=(sent,))
        writing.start()
        stack.callback(writing.join)
        received = b""
        while len(received) < len(sent):
            received += server.recv(1 << 16)
        assert received == sent
        assert relay.there.counts.dropped_data > 0
        counters = device.counters()
        assert counters["TCPOrigDataSent"] >= len(sent) // 1448
        assert sum(counters.get(name, 0) for name in ("TCPSackRecovery", "TCPTimeouts")) > 0
    assert interfaces() == before


def test_an_exception_leaves_no_process_behind(relays: Any) -> None:
    module = namespaces()
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    started: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with module.Namespace(module.DEVICE_ADDRESS, module.VERIFIER_ADDRESS) as namespace:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            started.append(namespace.start((sys.executable, "-c", script), **pipes))
            assert started[0].stdout is not None
            assert started[0].stdout.readline() == b"up\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (process,) = started
    # Its starter's thread has ended, so the kernel has killed it.
    assert process.wait(60.0) < 0
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.slow  # two processes that import the product: some ten seconds
def test_the_product_runs_over_the_kernel_and_not_faster_than_light(relays: Any) -> None:
    namespaces()
    bench = importlib.import_module("kernel_bench")
    device = importlib.import_module("kernel_device")
    cell = bench.Cell(bench.Arm.EDGESPEC, 2, 30.0, 0.02)
    load = device.Load(arm="edgespec", sessions=2, requests=2, tokens=8, pass_ms=20.0)
    with bench.Bench(20.0) as running:
        rows, counted = running.play(cell, load)
    assert len(rows) == 4
    assert all(ttft_s >= 0.030 + 0.020 and tpot_s > 0.0 for ttft_s, tpot_s in rows)
    assert "verifier's kernel" in counted
