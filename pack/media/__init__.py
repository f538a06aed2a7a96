"""One clip -> timed frames and sound, on one clock. The public functions are those of `pack.media.load`."""
