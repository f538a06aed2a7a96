"""What a user wants to know of the lengths of a source, as numbers and as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from train.data.lengths import Lengths

PERCENTILES = (1, 10, 50, 90, 99)
SHOWN_FAULTS = 5


def lengths_report(lengths: Lengths, max_seq_len: int | None) -> dict[str, Any]:
    """Counts of rows, sums of tokens by modality, percentiles of the length; everything JSON can hold."""
    total = lengths.total[lengths.total > 0]
    modalities = {name: int(getattr(lengths, name).sum(dtype=np.int64)) for name in ("text", "video", "audio", "image")}
    report: dict[str, Any] = {
        "rows": len(lengths),
        "unusable": len(lengths.faults),
        "without_labels": lengths.without_labels,
        "tokens": {"total": sum(modalities.values()), **modalities},
        "label_tokens": int(lengths.labels.sum(dtype=np.int64)),
        "length": {},
        "faults": [{"row": row, "reason": why} for row, why in lengths.faults],
    }
    if len(total):
        values = np.percentile(total, PERCENTILES)
        report["length"] = {
            "min": int(total.min()),
            **{f"p{p}": round(float(value)) for p, value in zip(PERCENTILES, values, strict=True)},
            "max": int(total.max()),
            "mean": round(float(total.mean()), 1),
        }
    if max_seq_len is not None:
        report["over_max_seq_len"] = int((total > max_seq_len).sum())
    return report


def report_lines(report: dict[str, Any], max_seq_len: int | None) -> list[str]:
    """The report for people."""
    tokens = report["tokens"]
    whole = max(tokens["total"], 1)
    shares = ", ".join(
        f"{name} {tokens[name]:,} ({tokens[name] / whole:.0%})"
        for name in ("text", "video", "audio", "image")
        if tokens[name]
    )
    lines = [
        f"rows      {report['rows']:,}, {report['unusable']:,} unusable, {report['without_labels']:,} without a label",
        f"tokens    {tokens['total']:,}: {shares}",
        f"labels    {report['label_tokens']:,} tokens ({report['label_tokens'] / whole:.0%})",
    ]
    if report["length"]:
        lines.append("length    " + ", ".join(f"{name} {value:,}" for name, value in report["length"].items()))
    if max_seq_len is not None:
        lines.append(
            f"too long  {report['over_max_seq_len']:,} rows over {max_seq_len:,} tokens; training leaves them out"
        )
    lines += [f"unusable  row {fault['row']}: {fault['reason']}" for fault in report["faults"][:SHOWN_FAULTS]]
    if (more := report["unusable"] - SHOWN_FAULTS) > 0:
        lines.append(f"unusable  {more:,} more; --json lists all")
    return lines
