"""What can change the stored bytes; part of the plan's fingerprint and of every sample's provenance.

A module of its own so that planning need not import torch, which takes seconds.
"""

from __future__ import annotations

from importlib.metadata import version

import av

VERSIONS: dict[str, str] = {
    "omniloom": version("omniloom"),
    "av": av.__version__,
    "libavcodec": ".".join(map(str, av.library_versions["libavcodec"])),
    **{name: version(name) for name in ("numpy", "pillow", "simplejpeg", "soundfile", "soxr")},
    "torch": version("torch").split("+")[0],
}
