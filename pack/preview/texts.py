"""Numbers, flags and origins in words."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.sample import FLAGS, Origin


def clock(time_s: float) -> str:
    """2.5 s, 1:30, 1:01:00."""
    if time_s < 60:
        return f"{time_s:g} s"
    minutes, rest = divmod(round(time_s), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def seconds(duration_s: float) -> str:
    return f"{duration_s:.3f} s" if duration_s < 60 else f"{clock(duration_s)} ({duration_s:,.1f} s)"


def length(total_s: float) -> str:
    """12.3 s, 4.5 min, 1,234.5 h."""
    if total_s < 120:
        return f"{total_s:.1f} s"
    return f"{total_s / 60:.1f} min" if total_s < 7200 else f"{total_s / 3600:,.1f} h"


def size(num_bytes: int) -> str:
    """In decimal units, as disks are sold: 8.21 MB."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


def damaged(count: int) -> str:
    return f", {count:,} damaged packet{'s' * (count != 1)}" if count else ""


def flag_texts(flags: Iterable[str]) -> list[tuple[str, str]]:
    return [(flag, FLAGS[flag]) for flag in flags]


def origin_facts(origin: Origin) -> list[tuple[str, str]]:
    """What is known of a source, each with its unit."""
    size = f"{origin.width} x {origin.height}" if origin.width and origin.height else None
    sound_rate = f"{origin.sample_rate:,} Hz" if origin.sample_rate else None
    channels = origin.layout or (str(origin.channels) if origin.channels else None)
    asked = f"{origin.span_s[0]:.3f} to {origin.span_s[1]:.3f} s of the file" if origin.span_s else None
    turned = f"{origin.rotation} degrees counter-clockwise" if origin.rotation else None
    rows = [
        ("file", origin.uri),
        ("container", origin.container),
        ("stream", None if origin.stream_index is None else str(origin.stream_index)),
        ("codec", origin.codec),
        ("asked for", asked),
        ("t = 0 is", f"{origin.clock_zero_s:.6g} s in the container's time" if origin.clock_zero_s else None),
        ("declared length", None if origin.declared_s is None else seconds(origin.declared_s)),
        ("source size", size),
        ("source rate", None if origin.fps is None else f"{origin.fps:.6g} fps"),
        ("pixel format", origin.pixel_format),
        ("rotated by", turned),
        ("mirrored", "yes" if origin.mirrored else None),
        ("sample aspect ratio", f"{origin.sar:g}" if origin.sar != 1 else None),
        ("colour", origin.color),
        ("source sample rate", sound_rate),
        ("channels", channels),
    ]
    return [(name, value) for name, value in rows if value]
