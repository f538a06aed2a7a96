"""Which base adapters belong to: a checkpoint of adapters is worth nothing on another one."""

from __future__ import annotations

from pathlib import Path

import xxhash

SAMPLE_BYTES = 1 << 16  # of each file, from its middle and its end


def base_digest(weights: Path | None, seed: int) -> str:
    """Tells bases apart without reading them: names, sizes, headers and samples of the weights' files, wherever they
    lie; of random weights the seed that they come from."""
    if weights is None:
        return f"random weights of seed {seed}"
    digest = xxhash.xxh3_128()
    for path in sorted(weights.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            for start in (size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
