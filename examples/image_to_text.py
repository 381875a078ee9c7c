"""A question about an image, answered with all visual tokens and with a fifth of them.

python examples/image_to_text.py [MODEL] [IMAGE] [QUESTION]
"""

import sys
from pathlib import Path

import mmaccel

given = dict(enumerate(sys.argv))
image = given.get(2, Path(__file__).parents[1] / "docs" / "images" / "busy-scene.png")
question = given.get(3, "which object is above the orange star?")

whole = mmaccel.ImageToText.from_pretrained(given.get(1, "scenes-vqa"))
fewer = mmaccel.ImageToText(
    whole.model, whole.processor, visual_tokens=mmaccel.HiRED(keep=0.22)
)  # the same weights
for pipe in (whole, fewer):
    out = pipe(image, question, max_new_tokens=8)
    print(f"{out[0].n_kept} of {out[0].n_visual} visual tokens: {out[0].text}")
out[0].draw_kept().save("kept.png")
