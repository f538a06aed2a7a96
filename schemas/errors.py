"""Every error a user can meet, and the exit code it ends a command with.

One base class, a named subclass per kind. A message says what, where (file, line, key, row), the numbers involved and
what to do. `RowError` is the one kind that does not end a job: it rejects one manifest row, under a reason from
`REJECT_REASONS`.
"""

from __future__ import annotations

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "failed",
    2: "usage or configuration",
    3: "data over the error threshold",
    4: "verification failed",
    5: "stopped, but can be resumed",
    6: "unsafe input refused",
    7: "unsupported layout or feature",
    8: "incomplete source",
}

REJECT_REASONS: dict[str, str] = {
    "bad_row": "the manifest row cannot be parsed or has a key of the wrong type",
    "duplicate_id": "another row before it has the same id",
    "preprocessor_failed": "the preprocessor raised",
    "marker_mismatch": "the conversation has another number of media markers than the row has media",
    "empty_conversation": "the conversation has no turn with content",
    "missing_file": "the file does not exist",
    "permission_denied": "the file may not be read",
    "unsafe_path": "the path leaves the folders that the configuration allows",
    "fetch_failed": "the object store did not deliver the file",
    "empty_file": "the file has zero bytes",
    "unreadable_container": "no demuxer can read the file",
    "unsupported_codec": "no decoder for the stream",
    "no_video": "a video was asked for and the file has no video stream",
    "no_audio": "sound was asked for and the file has no audio stream",
    "empty_video": "not one picture decodes",
    "empty_audio": "not one sound sample decodes",
    "empty_span": "the asked span holds nothing of the file",
    "bad_image": "the image cannot be decoded",
    "aspect_ratio": "the picture's sides differ by more than the model allows",
    "truncated": "the file ends before its header says, and rows.truncated is reject",
    "too_large": "the encoded sample does not fit a shard",
    "over_budget": "the clip cannot be brought under video.max_tokens",
    "filtered_type": "the preprocessor's arguments ask for other types of row",
    "filtered_source": "the preprocessor's arguments ask for other sources",
    "filtered_media": "the row lacks a kind of media that the preprocessor's arguments ask for",
    "crashed": "the row killed its worker twice",
    "timeout": "the row took longer than rows.timeout_s",
    "oom": "the row took more memory than rows.max_memory_gb",
    "unexpected": "a fault of omniloom itself; the detail has the exception",
}

# left out because the configuration says so: no fault of the row
FILTER_REASONS = frozenset({"filtered_type", "filtered_source", "filtered_media"})


class OmniloomError(Exception):
    """Base of all; ends a command with exit code 1."""

    exit_code = 1


class ConfigError(OmniloomError):
    """A wrong configuration, command line or missing input file."""

    exit_code = 2


class ManifestError(ConfigError):
    """A manifest that cannot be read as a whole."""


class RegistryError(ConfigError):
    """An unknown or doubly registered name."""


class DataThresholdError(OmniloomError):
    """The job finished, but more rows were rejected than `rows.max_bad_ratio` allows."""

    exit_code = 3


class VerificationError(OmniloomError):
    """What is on disk is not what was written."""

    exit_code = 4


class ResumableError(OmniloomError):
    """Stopped before the end; the same command goes on where it stopped."""

    exit_code = 5


class StoppedError(ResumableError):
    """Stopped as it was asked to, with everything saved: no fault."""


class UnsafeInputError(OmniloomError):
    """Input that would execute code or leave its folder."""

    exit_code = 6


class UnsupportedError(OmniloomError):
    """A layout, version or feature that is known but not handled."""

    exit_code = 7


class IncompleteSourceError(OmniloomError):
    """Part of the source is missing: partitions, tensors, files."""

    exit_code = 8


class SchemaError(OmniloomError):
    """A sample, table or file that does not have the declared fields."""

    exit_code = 4


class RowError(OmniloomError):
    """Rejects one row.

    reason: a key of `REJECT_REASONS`; stage: row | preprocess | fetch | video | audio | image | encode | isolate;
    detail: one line for the user, with the file and the numbers.
    """

    def __init__(self, reason: str, detail: str, stage: str = "row") -> None:
        if reason not in REJECT_REASONS:
            raise ValueError(f"unknown reject reason {reason!r}; known: {', '.join(REJECT_REASONS)}")
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.stage = reason, detail, stage

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str, str]]:
        return (RowError, (self.reason, self.detail, self.stage))
