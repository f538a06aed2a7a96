"""One conversion as the command does it, for `jobs.bench.convert` to run in a process of its own."""

from __future__ import annotations

from pathlib import Path

from convert.job import Options, run
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.verify import verify_conversion


def main(checkpoint: str, base: str, output: str, verify: bool) -> None:
    """Prints the bytes that were read of the source."""
    conversion = megatron_to_hf_conversion(Path(checkpoint), Path(base))
    result = run(conversion, Path(output), Options(), lambda count: None, verify_conversion if verify else None)
    print(result.bytes_read)
