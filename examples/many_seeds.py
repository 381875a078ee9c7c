"""Many seeds of one caption with continuous batching: the next starts when one has finished.

python examples/many_seeds.py [MODEL] [FOLDER]
"""

import sys
from pathlib import Path

import mmaccel

pipe = mmaccel.TextToImage.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "scenes")
folder = Path(sys.argv[2] if len(sys.argv) > 2 else "seeds")
folder.mkdir(parents=True, exist_ok=True)
caption = pipe.image_model.examples[0]


def save(output):
    """Called with every image as soon as it is finished."""
    output.image.save(folder / f"{output.request.seed}.png")


requests = [mmaccel.Request(caption, seed) for seed in range(8)]
print(pipe.serve(requests, pipe.image_model.params, rows=4, deliver=save).summary)
