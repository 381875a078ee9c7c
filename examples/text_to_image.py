"""Images from a caption: the plain loop and Jacobi decoding, the same images from fewer passes.

python examples/text_to_image.py [MODEL] [CAPTION]
"""

import sys

import mmaccel

model = sys.argv[1] if len(sys.argv) > 1 else "scenes"
pipe = mmaccel.TextToImage.from_pretrained(model)
caption = sys.argv[2] if len(sys.argv) > 2 else pipe.image_model.examples[0]

plain = pipe(caption, policy="autoregressive", seed=0)
fast = pipe(caption, policy=mmaccel.Jacobi(window=32), seed=0)
print("plain: ", plain.stats.summary)
print("Jacobi:", fast.stats.summary)
print("the same tokens:", bool((plain.tokens == fast.tokens).all()))
fast.images[0].save("image.png")
