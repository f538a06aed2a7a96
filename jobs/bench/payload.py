"""What it costs to hand a clip to an inference server or to another process: bytes, time to write and read them, time
over HTTP, by the form that the clip travels in.

    python -m jobs.bench.payload [--quick] [--json FILE] [--plot FILE]

Forms, all of the same real pictures of 672x384 pixels: float32 and bfloat16 patches as a processor makes them, uint8
frames, the JPEG files that a packed sample holds, and these as base64 in JSON, which is how chat APIs take them.
Tensors travel as safetensors, JPEG files framed as in a shard. Ready is when the receiver has the float32 patches that
the vision tower takes; the server is a process of its own on this machine, and answers when it has them. What the
sender does before (decoding, for patches and frames) is not counted, which favours them.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import av
import numpy as np
import simplejpeg
import torch
from safetensors.torch import load, save

from jobs.bench.claims import Claim, at_least, at_most, report
from schemas.sample import frame_blobs, unframe_blobs
from train.data.features import frames_to_patches
from train.data.processor import VisionSpec
from train.data.transform import decode_pictures

HEIGHT, WIDTH, QUALITY = 384, 672, 95
COUNTS, QUICK_COUNTS = (8, 16, 32, 64), (8, 32)
REPEATS, QUICK_REPEATS = 7, 3
SPEC = VisionSpec(16, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # of the released Qwen3-Omni
GOAL_SIZE, GOAL_UINT8, GOAL_HTTP = 20.0, 3.9, 1.0
LONG = 32  # frames from which the time has a goal: of fewer, it is about that of a request


@dataclass(frozen=True)
class Form:
    """write: uint8 frames [N, H, W, 3], their JPEG files and their float32 patches -> bytes; read: bytes -> what was
    written; ready: that -> float32 patches."""

    write: Callable[[np.ndarray, list[bytes], torch.Tensor], bytes]
    read: Callable[[bytes], Any]
    ready: Callable[[Any], torch.Tensor]


def patches_of(frames: np.ndarray) -> torch.Tensor:
    return frames_to_patches(torch.from_numpy(frames), frames.shape[1:3], SPEC)


def _json_urls(_frames: np.ndarray, jpegs: list[bytes], _patches: torch.Tensor) -> bytes:
    return json.dumps({"frames": [base64.b64encode(jpeg).decode() for jpeg in jpegs]}).encode()


FORMS: dict[str, Form] = {
    "fp32 patches": Form(lambda f, j, p: save({"x": p}), lambda b: load(b)["x"], lambda x: x),
    "bf16 patches": Form(lambda f, j, p: save({"x": p.bfloat16()}), lambda b: load(b)["x"], lambda x: x.float()),
    "uint8 frames": Form(
        lambda f, j, p: save({"x": torch.from_numpy(f)}), lambda b: load(b)["x"], lambda x: patches_of(x.numpy())
    ),
    "JPEG": Form(lambda f, j, p: frame_blobs(j), unframe_blobs, lambda x: patches_of(decode_pictures(x))),
    "JPEG base64": Form(
        _json_urls,
        lambda b: [base64.b64decode(text) for text in json.loads(b)["frames"]],
        lambda x: patches_of(decode_pictures(x)),
    ),
}


@dataclass(frozen=True)
class Cost:
    """Of one clip in one form; times are medians in s. http: from the first byte sent until the server has answered
    that the patches are ready."""

    size: int
    write: float
    read: float
    ready: float
    http: float

    @property
    def total(self) -> float:
        return self.write + self.http


def real_frames(count: int) -> np.ndarray:
    """uint8 [count, HEIGHT, WIDTH, 3] of the demo's film, from all over it."""
    with av.open(str(files("jobs") / "assets" / "bunny.mp4")) as container:
        pictures = [f.to_ndarray(format="rgb24", width=WIDTH, height=HEIGHT) for f in container.decode(video=0)]
    return np.stack([pictures[i] for i in np.linspace(0, len(pictures) - 1, count).round().astype(int)])


class _Handler(BaseHTTPRequestHandler):
    """Reads a body in the form that the path names, makes patches, and says how many and their sum."""

    protocol_version = "HTTP/1.1"  # connections stay

    def do_POST(self) -> None:  # the name that http.server calls
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = FORMS[self.path.removeprefix("/").replace("_", " ")]
        patches = form.ready(form.read(body))
        said = json.dumps({"patches": len(patches), "mean": float(patches[:: len(patches) // 8].mean())}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()


@contextmanager
def server_process() -> Iterator[int]:
    """The port of a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def post(connection: http.client.HTTPConnection, name: str, payload: bytes) -> dict[str, Any]:
    connection.request("POST", "/" + name.replace(" ", "_"), payload)
    answer = connection.getresponse()
    found: dict[str, Any] = json.loads(answer.read())
    return found


def measure(count: int, repeats: int, connection: http.client.HTTPConnection) -> dict[str, Cost]:
    """All forms in turn, `repeats` times. Checks that what arrives is what was sent."""
    frames = real_frames(count)
    jpegs = [simplejpeg.encode_jpeg(frame, QUALITY, colorsubsampling="420") for frame in frames]
    patches = patches_of(frames)
    times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in FORMS}
    sizes: dict[str, int] = {}
    for _ in range(repeats + 1):  # the first warms up
        for name, form in FORMS.items():
            started = time.perf_counter()
            payload = form.write(frames, jpegs, patches)
            written = time.perf_counter()
            arrived = form.read(payload)
            read = time.perf_counter()
            made = form.ready(arrived)
            ready = time.perf_counter()
            said = post(connection, name, payload)
            answered = time.perf_counter()
            _check(name, made, said, patches)
            sizes[name] = len(payload)
            times[name].append((written - started, read - written, ready - read, answered - ready))
    return {
        name: Cost(sizes[name], *(statistics.median(values) for values in zip(*found[1:], strict=True)))
        for name, found in times.items()
    }


def _check(name: str, made: torch.Tensor, said: dict[str, Any], patches: torch.Tensor) -> None:
    """JPEG and 16 bits lose a little; an AssertionError for more than that."""
    assert made.shape == patches.shape and said["patches"] == len(patches), name
    lost = float((made - patches).abs().mean())
    assert lost <= {"fp32 patches": 0.0, "uint8 frames": 0.0, "bf16 patches": 2e-3}.get(name, 0.05), (name, lost)


def claims_of(count: int, costs: dict[str, Cost]) -> Iterator[Claim]:
    """Ratios against float32 patches, and the plain figures."""
    base = costs["fp32 patches"]
    where = f"{count} frames of {WIDTH}x{HEIGHT}, JPEG q{QUALITY}, server on this machine"
    for name, cost in costs.items():
        told = (
            f"{cost.write * 1e3:.1f} ms to write, {cost.read * 1e3:.1f} to read, {cost.ready * 1e3:.1f} to patches, "
            f"{cost.http * 1e3:.1f} over HTTP; {where}"
        )
        yield Claim(f"{name}, {count} frames", round(cost.size / 1e6, 3), "MB", "", None, told)
    jpeg, plain, half = costs["JPEG"], costs["uint8 frames"], costs["bf16 patches"]
    yield at_least(f"fp32 patches / JPEG, bytes, {count} frames", base.size / jpeg.size, GOAL_SIZE, "x", where)
    yield at_least(
        f"fp32 patches / uint8 frames, bytes, {count} frames", base.size / plain.size, GOAL_UINT8, "x", where
    )
    yield Claim(f"fp32 / bf16 patches, bytes, {count} frames", round(base.size / half.size, 3), "x", "", None, where)
    both = "written, sent and made to patches there"
    for name in ("bf16 patches", "uint8 frames", "JPEG", "JPEG base64"):
        claim, value = f"{name} / fp32 patches, {both}, {count} frames", costs[name].total / base.total
        if name == "JPEG" and count >= LONG:
            yield at_most(claim, value, GOAL_HTTP, "x", where)
        else:
            yield Claim(claim, round(value, 3), "x", "", None, where)


def draw(path: Path, found: dict[int, dict[str, Cost]]) -> None:
    """Bytes and time by the number of frames."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # seconds, and only for a picture

    figure = Figure((9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in FORMS:
        left.plot(list(found), [costs[name].size / 1e6 for costs in found.values()], "o-", label=name)
        right.plot(list(found), [costs[name].total * 1e3 for costs in found.values()], "o-", label=name)
    for axes, label in ((left, "MB"), (right, "ms until the server has patches")):
        axes.set(xlabel="frames", ylabel=label, xscale="log")
        axes.set_xticks(list(found), [str(count) for count in found])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    left.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and time of handing a clip to an inference server.")
    parser.add_argument("--quick", action="store_true", help="fewer lengths, under 45 s")
    parser.add_argument("--json", type=Path, help="write the claims there")
    parser.add_argument("--plot", type=Path, help="draw bytes and times there (png, svg)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[int, dict[str, Cost]] = {}
    with server_process() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for count in QUICK_COUNTS if given.quick else COUNTS:
            found[count] = measure(count, QUICK_REPEATS if given.quick else REPEATS, connection)
        connection.close()
    claims = [claim for count, costs in found.items() for claim in claims_of(count, costs)]
    if given.plot is not None:
        draw(given.plot, found)
    sys.exit(0 if report("payload", claims, given.json) else 1)


if __name__ == "__main__":
    main()
