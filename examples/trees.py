"""A tree of drafts beside the window: the same picture, fewer forward passes still.

python examples/trees.py
"""

import mmaccel

pipe = mmaccel.TextToImage.from_pretrained("scenes")
prompt = "a red circle above a small blue square on grass"

chain = pipe(prompt, policy=mmaccel.Jacobi(window=40), seed=7)
tree = pipe(
    prompt, policy=mmaccel.Jacobi(window=40, tree=mmaccel.Comb(branches=6, length=4)), seed=7
)
print(chain.stats.summary)
print(tree.stats.summary)
print("the same tokens:", chain.tokens.equal(tree.tokens))
