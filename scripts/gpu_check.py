"""Check the kernels on this machine's GPU and time them; resumable, part by part.

    python scripts/gpu_check.py [--call NAME] [--part NAME] [--again] [--budget SECONDS]
                                [--out FOLDER] [--device cpu] [--tiny]

Six calls of ten minutes at most: correctness, llama, others, kernels, profile, long; all in turn if
none is named. Writes gpu-<device>.json after every part. `--device cpu --tiny` tries the check
itself on a machine without a GPU and writes check-cpu-tiny-sizes.json. Exit status: 0 if all that
was run passed, 1 if something failed, 2 without a GPU or with a wrong option. Needs torch, triton,
numpy and transformers, and nothing else. The parts are in `benchmarks/gpu/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.check import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], (__doc__ or "").splitlines()[0]))
