"""A next-scale model: one slot a pass, and a whole scale, which is the model's own loop.

python examples/next_scale.py [MODEL]
"""

import sys

import mmaccel

pipe = mmaccel.TextToImage.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "scenes-var")
caption = pipe.image_model.examples[0]
slots = pipe(caption, policy=mmaccel.Stepwise(), seed=0)
scales = pipe(caption, seed=0)  # by default NextScale()
print("one slot a pass:", slots.stats.summary)
print("scale by scale: ", scales.stats.summary)
print("the same tokens:", bool((slots.tokens == scales.tokens).all()))
scales.images[0].save("scales.png")
