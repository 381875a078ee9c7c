"""A smaller cache and fewer keys a pass, for a long prompt: what stays is said beside the text.

python examples/long_context.py MODEL [TEXT FILE]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import mmaccel

if len(sys.argv) < 2:
    sys.exit("usage: python examples/long_context.py MODEL [TEXT FILE]   (folder or hub id)")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else "1 2 3 4 5 " * 12
inputs = tokenizer(text, return_tensors="pt")

with mmaccel.attach(
    model,
    mmaccel.Jacobi(window=16),
    kv_cache=mmaccel.SnapKV(budget=40, window=16),  # 1024 or more for a real document
    attention=mmaccel.Quest(budget=0.25, first_layer=1),  # 2, the default, for deep models
) as run:
    made = model.generate(**inputs, max_new_tokens=16, do_sample=False)
print(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :]))
print(run.stats.summary)
print("exact with respect to", run.stats.reference)
