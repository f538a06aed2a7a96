from itertools import pairwise
from typing import Any

from pack.preview.choose import MOST, choose, kinds_of


def row(**more: Any) -> dict[str, Any]:
    plain = {"source": "a", "flags": [], "num_videos": 1, "num_audios": 0, "num_images": 0, "audio_s": 2.0}
    return plain | more


def chosen_of(rows: list[dict[str, Any]], wanted: int) -> list[int]:
    return choose(enumerate(kinds_of(r) for r in rows), len(rows), wanted)


def test_kinds_are_source_flags_and_media() -> None:
    found = kinds_of(row(flags=["vfr", "hdr"], num_images=2, audio_s=0.0))
    media = {("media", "videos"), ("media", "images"), ("media", "silent video")}
    assert found == {("source", "a"), ("flag", "vfr"), ("flag", "hdr"), *media}
    assert ("media", "text only") in kinds_of(row(num_videos=0, audio_s=0.0))


def test_an_even_spread_that_has_both_ends_when_all_are_alike() -> None:
    chosen = chosen_of([row()] * 1000, 5)
    assert len(chosen) == 5 and chosen[0] == 0 and chosen == sorted(set(chosen))
    assert max(b - a for a, b in pairwise(chosen)) <= 300


def test_every_flag_and_source_is_there_however_rare() -> None:
    rows = [row() for _ in range(500)]
    rows[137] = row(flags=["vfr"])
    rows[138] = row(flags=["vfr", "hdr"])
    rows[311] = row(source="b")
    chosen = chosen_of(rows, 3)
    # 138 shows both flags, so that 137 is not needed
    assert {138, 311} <= set(chosen) and 137 not in chosen and len(chosen) == 3


def test_more_than_wanted_only_when_the_kinds_need_it() -> None:
    chosen = chosen_of([row(source=str(i)) for i in range(50)], 4)
    assert chosen == list(range(50))
    assert len(chosen_of([row(source=str(i)) for i in range(1000)], 4)) == MOST


def test_few_samples_none_at_all_and_always_the_same() -> None:
    assert chosen_of([], 24) == []
    assert chosen_of([row(), row()], 24) == [0, 1]
    rows = [row(source=str(i % 7), flags=["vfr"] if i % 11 == 0 else []) for i in range(300)]
    assert chosen_of(rows, 24) == chosen_of(rows, 24)
    assert len(chosen_of(rows, 24)) == 24


def test_samples_that_were_not_looked_at_may_fill_the_page() -> None:
    seen = [(position, kinds_of(row())) for position in range(40, 50)]
    assert choose(seen, 100, 3) == [0, 40, 50]
