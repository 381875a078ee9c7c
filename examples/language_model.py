"""A policy attached to a language model of transformers: the same call, fewer forward passes.

python examples/language_model.py MODEL [PROMPT]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import mmaccel

if len(sys.argv) < 2:
    sys.exit("usage: python examples/language_model.py MODEL [PROMPT]   (folder or hub id)")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = sys.argv[2] if len(sys.argv) > 2 else "The list of prime numbers: 2, 3, 5, 7,"
inputs = tokenizer(prompt, return_tensors="pt")

before = model.generate(**inputs, max_new_tokens=32, do_sample=False)
with mmaccel.attach(model, mmaccel.Speculative()) as run:  # prompt lookup: no draft model needed
    after = model.generate(**inputs, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(after[0]))
print(run.stats.summary)
print("the same tokens:", after.equal(before))
