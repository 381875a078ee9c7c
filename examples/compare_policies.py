"""Which policy is fastest here? All that are exact, on the same captions, in one run.

python examples/compare_policies.py [MODEL]
"""

import sys

import mmaccel

pipe = mmaccel.TextToImage.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "scenes")
captions = [pipe.image_model.examples[0]] * 2  # two images of it
for policy in (
    {"name": "autoregressive"},
    {"name": "jacobi", "window": 8},
    {"name": "jacobi", "window": 32},
    {"name": "mc-sjd", "window": 16},
):
    stats = pipe(captions, policy=policy, seed=0, output_type="tokens").stats
    print(f"{str(policy):45} {stats.exactness:13} {stats.summary}")
