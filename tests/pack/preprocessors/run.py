"""A row through parse_row, a preprocessor and the checks of the packer."""

import random

import pytest

from schemas.conversation import check_media_counts, check_turns
from schemas.errors import RowError
from schemas.manifest import parse_row
from schemas.registry import conv_preprocess, load_preprocessors

load_preprocessors()


def preprocess(source_name, raw, **arguments):
    """(turns, metadata) as the packer makes them, counts checked."""
    row = parse_row(raw, base="/data", location=("m", 0), occurrence=0)
    metadata = {}
    counts = {"num_videos": len(row.videos), "num_audios": len(row.audios), "num_images": len(row.images)}
    turns = conv_preprocess(
        source_name,
        row.conversations,
        rng=random.Random(f"0:{row.id}"),
        metadata=metadata,
        row=row.fields,
        **counts,
        **arguments,
    )
    check_media_counts(turns, *counts.values())
    check_turns(turns, *counts.values())
    return turns, metadata


def rejected(source_name, raw, **arguments):
    with pytest.raises(RowError) as error:
        preprocess(source_name, raw, **arguments)
    return error.value
