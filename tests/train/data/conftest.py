"""The local S3 server of the packing tests, for training from it."""

from __future__ import annotations

from tests.pack.conftest import s3

__all__ = ["s3"]
