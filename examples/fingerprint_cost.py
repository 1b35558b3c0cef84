"""How long it takes to tell one model from another: 50 GB in 10 sparse files, made for this.

python examples/fingerprint_cost.py
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path

from ds4cli.models import identity, shards

FILES, FILE_BYTES, TENSORS, RUNS = 10, 5 << 30, 150, 5


def make(folder: Path) -> None:
    """Weight files that are as large as a model's and take no room."""
    size = FILE_BYTES // TENSORS
    for number in range(FILES):
        entries = {
            f"model.layers.{number}.{i}.weight": {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [i * size, (i + 1) * size],
            }
            for i in range(TENSORS)
        }
        header = json.dumps(entries).encode()
        with (folder / f"model-{number:05}-of-{FILES:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + TENSORS * size)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for _ in range(RUNS):
            begin = time.perf_counter()
            found = shards.find(Path(folder), "sparse")
            identity.fingerprint(Path(folder), found.files)
            print(f"{time.perf_counter() - begin:.3f} s")


if __name__ == "__main__":
    main()
