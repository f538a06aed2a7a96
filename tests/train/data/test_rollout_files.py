"""Rollouts on disk: equal after a round trip, whole or refused."""

import dataclasses
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.errors import IncompleteSourceError, SchemaError
from schemas.rollouts import Response, RolloutAbout, RolloutRow
from train.data.rollout_files import GROUP_ROWS, commit_rollouts, read_part, read_rollouts, write_part, write_rollouts

ABOUT = RolloutAbout(
    dataset="packed", dataset_fingerprint="f", model="m", engine="transformers", scorer="exact", sampling={"top_p": 1.0}
)


def rows(count, references=False, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        responses = []
        for _ in range(int(random.integers(1, 4))):
            size = int(random.integers(1, 6))
            logprobs = (-random.random(size)).astype(np.float32).tolist()
            ids = random.integers(0, 1000, size).tolist()
            reward = float(np.float32(random.random()))
            finish = str(random.choice(["stop", "length"]))
            responses.append(Response(ids, logprobs, reward, f"é{number}", finish, logprobs if references else None))
        made.append(RolloutRow(f"id{number}", "s", int(random.integers(1, 9)), f"{number:016x}", responses))
    return made


def test_round_trip_by_id(tmp_path):
    made = rows(150)
    card = write_rollouts(tmp_path / "r", iter(made), ABOUT, part_rows=70)
    assert sorted(card.parts) == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert (card.rows, card.references, card.about) == (150, False, ABOUT)
    assert card.responses == sum(len(row.responses) for row in made)
    rewards = [reward for row in made for reward in row.rewards]
    assert card.mean_reward == pytest.approx(np.mean(rewards), abs=1e-12)
    found = pickle.loads(pickle.dumps(read_rollouts(tmp_path / "r")))
    assert (len(found), list(found), found.card) == (150, made, card)
    assert GROUP_ROWS < 70
    assert [found[f"id{n}"] for n in (149, 0, 69, 70)] == [made[n] for n in (149, 0, 69, 70)]
    assert "id3" in found and "id150" not in found
    with pytest.raises(SchemaError, match="r has no rollout of sample id150"):
        found["id150"]


def test_references_are_of_all_or_none(tmp_path):
    assert write_rollouts(tmp_path / "a", rows(3, references=True), ABOUT).references
    assert list(read_rollouts(tmp_path / "a")) == rows(3, references=True)
    mixed = [*rows(3, references=True), *(dataclasses.replace(row, id="x" + row.id) for row in rows(1))]
    assert not write_rollouts(tmp_path / "b", mixed, ABOUT).references


def test_parts_then_the_card(tmp_path):
    made = rows(4)
    write_part(tmp_path, 0, made[:2])
    with pytest.raises(IncompleteSourceError, match=r"has no rollouts\.json, which is written last"):
        read_rollouts(tmp_path)
    write_part(tmp_path, 2, made[2:])
    with pytest.raises(
        IncompleteSourceError, match=r"part-00001\.parquet is missing, but part-00002\.parquet is there"
    ):
        commit_rollouts(tmp_path, ABOUT)
    (tmp_path / "part-00002.parquet").rename(tmp_path / "part-00001.parquet")
    commit_rollouts(tmp_path, ABOUT)
    assert list(read_rollouts(tmp_path)) == made
    assert read_part(tmp_path / "part-00001.parquet") == made[2:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "part-00000.parquet", "part-00001.parquet", "rollouts.json"
    ]  # fmt: skip


def test_an_id_has_one_row(tmp_path):
    made = rows(2)
    with pytest.raises(SchemaError, match="rollout id0 is twice in part-00000"):
        write_part(tmp_path, 0, [made[0], made[0]])
    write_part(tmp_path, 0, made)
    write_part(tmp_path, 1, made[1:])
    with pytest.raises(SchemaError, match=r"rollout id1 is in part-00000\.parquet and in part-00001\.parquet"):
        commit_rollouts(tmp_path, ABOUT)


def test_a_part_of_the_same_size_with_other_rewards_is_refused(tmp_path):
    """What a training that goes on compares is the fingerprint of the card: the parts have to be the card's."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, reward in zip(folders, (0.25, 0.75), strict=True):
        write_rollouts(folder, [RolloutRow("id", "s", 3, "0" * 16, [Response([1], [-1.0], reward, "", "stop")])], ABOUT)
    parts = [folder / "part-00000.parquet" for folder in folders]
    assert parts[0].stat().st_size == parts[1].stat().st_size
    assert read_rollouts(folders[0]).fingerprint != read_rollouts(folders[1]).fingerprint
    parts[0].write_bytes(parts[1].read_bytes())
    with pytest.raises(SchemaError, match="has other bytes than when"):
        read_rollouts(folders[0])


def test_damaged_folders_are_refused(tmp_path):
    folder = tmp_path / "r"
    write_rollouts(folder, rows(3), ABOUT, part_rows=2)
    with pytest.raises(SchemaError, match="has rollouts already"):
        write_rollouts(folder, rows(3), ABOUT)
    part = folder / "part-00001.parquet"
    data = part.read_bytes()
    part.write_bytes(data + b" ")
    with pytest.raises(SchemaError, match=rf"has {len(data) + 1} bytes; rollouts\.json says {len(data)}"):
        read_rollouts(folder)
    other = bytearray(data)
    other[len(data) // 3] ^= 1
    part.write_bytes(other)
    with pytest.raises(
        SchemaError, match=r"part-00001\.parquet has other bytes than when .* says: xxh3_64 [0-9a-f]{16}, "
    ):
        read_rollouts(folder)
    part.unlink()
    with pytest.raises(IncompleteSourceError, match=r"part-00001\.parquet is missing; rollouts\.json lists it"):
        read_rollouts(folder)
    part.write_bytes(b"PAR1 and no more")
    with pytest.raises(SchemaError, match="is not a Parquet file"):
        read_part(part)
    pq.write_table(pa.table({"id": ["a"]}), part)
    with pytest.raises(SchemaError, match="has the columns id: string; rollouts have id: string, source"):
        read_part(part)
    with pytest.raises(IncompleteSourceError, match=r"has no part-00000\.parquet"):
        commit_rollouts(tmp_path / "none", ABOUT)
