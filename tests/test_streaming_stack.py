"""mosaicml-streaming 0.13 declares transformers<5 and is installed with --no-deps beside transformers 5.

This holds the pair to what we use: writing MDS with our columns, StreamingDataset by iteration, by index and through a
DataLoader worker, and resuming in the middle of an epoch; in a process of its own, because streaming keeps shared
memory.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from schemas.sample import COLUMNS

SCRIPT = """
import json, sys
import torch
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

folder, columns = sys.argv[1], json.loads(sys.argv[2])

def sample(i):
    media = bytes([i]) * (1000 + 37 * i)
    return {"id": f"row{i}", "source": "made", "media": media, "meta": {"n": i, "list": [i / 3], "text": "\\u00fc"}}

with MDSWriter(out=folder, columns=columns, hashes=["xxh3_64"], size_limit=20_000) as writer:
    for i in range(40):
        writer.write(sample(i))

def opened():
    return StreamingDataset(local=folder, batch_size=4, shuffle=True, shuffle_seed=1, num_canonical_nodes=1)

clean_stale_shared_memory()
dataset = opened()
by_index = [dataset[i] for i in range(40)]
# workers before the dataset is iterated here: its locks must not be inherited by a fork
loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=list)
loaded = sorted(row["id"] for batch in loader for row in batch)

dataset = opened()
state_after, seen = None, []
for i, found in enumerate(dataset):
    seen.append(found["id"])
    if i == 15:
        state_after = dataset.state_dict(16, from_beginning=False)
dataset = opened()  # a state is only taken up by a dataset that has not begun
dataset.load_state_dict(state_after)
rest = [found["id"] for found in dataset]
print(json.dumps({
    "equal": all(by_index[i] == sample(i) for i in range(40)), "samples": dataset.num_samples,
    "seen": seen, "loaded": loaded, "rest": rest,
}))
"""


def test_mds_and_streaming_dataset_work_with_the_installed_transformers(tmp_path: Path) -> None:
    assert int(version("transformers").split(".")[0]) >= 5
    assert version("mosaicml-streaming") == "0.13.0"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "mds"), json.dumps(COLUMNS)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    names = sorted(f"row{i}" for i in range(40))
    assert found["equal"] and found["samples"] == 40
    assert len(list((tmp_path / "mds").glob("*.mds"))) > 2
    assert sorted(found["seen"]) == names == found["loaded"]
    assert found["seen"] != [f"row{i}" for i in range(40)]
    assert found["rest"] == found["seen"][16:]
