"""A model that fills a canvas in any order: one slot a pass, and nested drafts in fewer passes.

python examples/masked_images.py [MODEL]
"""

import sys

import mmaccel

pipe = mmaccel.TextToImage.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "scenes-masked")
caption = pipe.image_model.examples[0]
plain = pipe(caption, policy=mmaccel.Stepwise(order="halton"), seed=0)
fast = pipe(caption, policy=mmaccel.LosslessUnmask(order="halton"), seed=0)
print("one slot a pass:", plain.stats.summary)
print("nested drafts:  ", fast.stats.summary)
print("the same tokens:", bool((plain.tokens == fast.tokens).all()))
fast.images[0].save("masked.png")
