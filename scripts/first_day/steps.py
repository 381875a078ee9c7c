"""The first day: tasks and mistakes, in the order in which people meet them."""

from __future__ import annotations

from scripts.first_day.step import Step, python, shell

_DRAW = "from PIL import Image; Image.new('RGB', (320, 240), 'white').save('street.png')"
_LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmaccel

torch.manual_seed(0)
config = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
config.num_attention_heads = config.num_key_value_heads = 4
config.eos_token_id = None
model = LlamaForCausalLM(config).eval()  # in place of AutoModelForCausalLM.from_pretrained(...)
inputs = torch.tensor([[1, 2, 3]])
"""
_ATTACH = """
with mmaccel.attach(model, "jacobi") as run:
    model.generate(inputs, do_sample=True, max_new_tokens=16)
print(run.stats.summary, run.stats.fallbacks)
"""
_ADAPTER = (
    _LLAMA
    + """
from peft import LoraConfig

model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
model.save_pretrained("my-lora")  # the adapter alone
model = LlamaForCausalLM(config).eval()
model.load_adapter("my-lora")
"""
    + _ATTACH
)
_QUANTISED = (
    _LLAMA
    + """
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig

model.save_pretrained("my-model")
quantised = TorchAoConfig(Int8WeightOnlyConfig())
model = LlamaForCausalLM.from_pretrained("my-model", quantization_config=quantised)
"""
    + _ATTACH
)
_SCENES = """
import mmaccel

pipe = mmaccel.TextToImage.from_pretrained("scenes")
"""
_MADE = r"seed: \d+, drawn; .* out/\d+-\S+\.png: 256 tokens in \d+ forward passes"

STEPS = (
    # The command line
    Step(
        "I type mmaccel and press Enter",
        shell("mmaccel", r"Commands: generate +Generate images.*models", 2),
    ),
    Step("I look whether it works here", shell("mmaccel doctor", "Ready: mmaccel generate")),
    Step("I make the first image", shell("mmaccel generate -n 1", _MADE)),
    Step(
        "I ask the demo for a red fox",
        shell('mmaccel generate "a red fox in the snow"', "received 'fox'.*it knows: a an the", 2),
        "write with these, or name another model, such as deepseek-community/Janus-Pro-1B",
        shell("mmaccel generate 'a red circle above a small blue square'", _MADE),
    ),
    Step(
        "I misspell a command",
        shell("mmaccel genrate 'a red circle'", "No such command 'genrate'", 2),
        "Did you mean 'generate'?",
        shell("mmaccel generate 'a red circle'", _MADE),
    ),
    Step(
        "I give the number of steps, as I do for Stable Diffusion",
        shell("mmaccel generate 'a red circle' --steps 50", "No such option: --steps", 2),
        "leave it out, or choose passes with --window",
        shell("mmaccel generate 'a red circle' --window 16", _MADE),
    ),
    Step(
        "I misspell a policy",
        shell("mmaccel generate 'a red circle' --policy jacobbi", "received 'jacobbi'", 2),
        "did you mean jacobi?",
        shell("mmaccel generate 'a red circle' --policy jacobi", _MADE),
    ),
    Step(
        "I set the window to 0",
        shell("mmaccel generate 'a red circle' --window 0", "received 0", 2),
        "16 to 64 suits most",
        shell("mmaccel generate 'a red circle' --window 16", _MADE),
    ),
    Step(
        "I give a width alone",
        shell("mmaccel generate 'a red circle' --width 64", "received --width 64", 2),
        "expected both, or --size alone",
        shell("mmaccel generate 'a red circle' --width 64 --height 64", _MADE),
    ),
    Step(
        "I ask for a larger image than the model makes",
        shell("mmaccel generate 'a red circle' --size 512x512", "received 512x512", 2),
        "expected 64x64, the only one of this model, received 512x512; leave it out",
        shell("mmaccel generate 'a red circle'", _MADE),
    ),
    Step(
        "I ask for a GPU that is not there",
        shell("mmaccel generate 'a red circle' --device cuda", "received 'cuda'", 2),
        "auto takes cpu",
        shell("mmaccel generate 'a red circle' --device auto", _MADE),
        lacks=("nvidia",),
    ),
    Step(
        "I take half precision on a CPU",
        shell("mmaccel generate 'a red circle' --dtype fp16", _MADE),
    ),
    Step(
        "I want two images of each of two prompts",
        shell(
            "mmaccel generate 'a red circle' 'a blue square' -n 2 -o pictures && ls pictures",
            r"4 images in pictures.* \d+-a-red-circle\S+ \d+-a-red-circle\S+ \d+-a-blue-square",
        ),
    ),
    Step(
        "I write into a path that is a file",
        shell("mmaccel generate 'a red circle' --out notes.txt", "Not a directory", 1),
        "choose another",
        shell("mmaccel generate 'a red circle' --out out", _MADE),
        files={"notes.txt": "buy milk\n"},
    ),
    Step(
        "I run the same command again, with and without a seed",
        shell(
            "mmaccel generate 'a red circle' && mmaccel generate 'a red circle' && ls out | wc -l",
            r"\b2$",
        ),
        then=shell(
            "mmaccel generate 'a red circle' --seed 7 --out again && "
            "mmaccel generate 'a red circle' --seed 7 --out again && ls again | wc -l",
            r"\b1$",
        ),
    ),
    Step(
        "I want to see what it saves",
        shell("mmaccel generate 'a red circle' --compare", r"jacobi\S* .* yes .*times as fast"),
    ),
    # A file of prompts
    Step(
        "I stop a long run, and go on later",
        shell(
            "mmaccel generate --prompts prompts.txt --out run --batch-size 1",
            r"\d images? generated in run; continue",
            130,
            stop_at="run/*.png",
        ),
        "--resume",
        shell(
            "mmaccel generate --prompts prompts.txt --out run --batch-size 1 --resume && "
            "ls run/*.png | wc -l",
            r"\b6$",
        ),
        files={"prompts.txt": "a red circle\na blue square\na green ring\n" * 2},
    ),
    Step(
        "I start it again and do not ask to resume",
        shell(
            "mmaccel generate --prompts prompts.txt --out run && "
            "mmaccel generate --prompts prompts.txt --out run",
            "manifest",
            2,
        ),
        "--resume",
        shell("mmaccel generate --prompts prompts.txt --out run --resume", "run"),
        files={"prompts.txt": "a red circle\n"},
    ),
    Step(
        "A line of my prompt file is not JSON",
        shell("mmaccel generate --prompts bad.jsonl --out run", "line 2: expected JSON", 2),
        "write one object a line, such as",
        shell(
            """sed -i 's/square"$/square"}/' bad.jsonl && """
            "mmaccel generate --prompts bad.jsonl --out run",
            "2 images",
        ),
        files={"bad.jsonl": '{"prompt": "a red circle"}\n{"prompt": "a blue square"\n'},
    ),
    Step(
        "I give a prompt and a file of prompts",
        shell(
            "mmaccel generate 'a red circle' --prompts prompts.txt --out run",
            "expected no prompt with it",
            2,
        ),
        "leave it out",
        shell("mmaccel generate --prompts prompts.txt --out run", "1 image"),
        files={"prompts.txt": "a red circle\n"},
    ),
    # Models of the hub
    Step(
        "I copy the line with Janus-Pro, from its authors' repository",
        shell(
            "mmaccel generate 'a red fox' --model deepseek-ai/Janus-Pro-1B",
            "in the layout of its authors' own code",
            1,
            net="hub",
        ),
        "take the copy deepseek-community/Janus-Pro-1B",
        shell(
            "mmaccel generate 'a red fox' --model deepseek-community/Janus-Pro-1B",
            r"out/\d+-\S+\.png: ",
            net="hub",
        ),
    ),
    Step(
        "I am offline",
        shell("mmaccel generate 'a red circle' --model own/scenes", "in no cache", 2),
        "connect to the network",
        shell("mmaccel generate 'a red circle' --model own/scenes", _MADE, net="hub"),
    ),
    Step(
        "I am offline again, after the download",
        shell("mmaccel generate 'a red circle' --model own/scenes", _MADE, net="hub"),
        then=shell("mmaccel generate 'a blue square' --model own/scenes", _MADE),
    ),
    Step(
        "I misspell a repository",
        shell(
            "mmaccel generate 'a red circle' --model own/scene",
            "not there or private",
            2,
            net="hub",
        ),
        "check the spelling at https://huggingface.co/models?search=scene",
        shell("mmaccel generate 'a red circle' --model own/scenes", _MADE, net="hub"),
    ),
    Step(
        "The repository is gated",
        shell("mmaccel generate 'a red circle' --model own/gated", "which is gated", 2, net="hub"),
        "accept its licence at https://huggingface.co/own/gated, then run hf auth login",
        shell(
            "hf auth login --token hf_0123456789 && "
            "mmaccel generate 'a red circle' --model own/gated",
            _MADE,
            net="hub",
        ),
    ),
    Step(
        "The revision does not exist",
        shell(
            "mmaccel generate 'a red circle' --model own/scenes --revision v2",
            "received 'v2'",
            2,
            net="hub",
        ),
        "leave it out for the main branch",
        shell("mmaccel generate 'a red circle' --model own/scenes", _MADE, net="hub"),
    ),
    Step(
        "The disk is too small for the model",
        shell(
            "HF_HOME=/dev/shm/first-day mmaccel generate 'a red circle' --model own/large",
            "GiB on the disk of /dev/shm",
            2,
            net="hub",
        ),
        "or set HF_HOME to a folder on another disk",
        shell(
            "rm -r /dev/shm/first-day; "
            "HF_HOME=~/hub mmaccel generate 'a red circle' --model own/large",
            _MADE,
            net="hub",
        ),
        needs=("/dev/shm",),
    ),
    Step(
        "I try FLUX",
        shell(
            "mmaccel generate 'a red fox' --model black-forest-labs/FLUX.1-dev",
            "a FluxPipeline of diffusers, which removes noise",
            1,
            net="hub",
        ),
        "no policy applies to it; take one that makes tokens, such as "
        "deepseek-community/Janus-Pro-1B",
        shell(
            "mmaccel generate 'a red fox' --model deepseek-community/Janus-Pro-1B",
            r"out/\d+-\S+\.png: ",
            net="hub",
        ),
    ),
    Step(
        "I give the folder of a LoRA adapter",
        shell("mmaccel generate 'a red circle' --model own/lora", "an adapter", 1, net="hub"),
        "add this with model.load_adapter(...), then mmaccel.attach",
        shell("pip install -q peft && python adapter.py", r"16 tokens in \d+ forward passes"),
        files={"adapter.py": _ADAPTER},
    ),
    Step(
        "I give a language model to generate images with",
        python(
            _LLAMA
            + """
model.save_pretrained("my-model")
mmaccel.TextToImage.from_pretrained("my-model")
""",
            "UnsupportedModelError: .*llama",
            1,
        ),
        "mmaccel.attach",
        python(
            _LLAMA
            + """
with mmaccel.attach(model, "jacobi", seed=0) as run:
    model.generate(inputs, do_sample=True, max_new_tokens=32)
print(run.stats.summary)
""",
            r"32 tokens in \d+ forward passes",
        ),
    ),
    # Python
    Step(
        "I copy a diffusers call, with torch_dtype and generator",
        python(
            """
import mmaccel
import torch

pipe = mmaccel.TextToImage.from_pretrained("scenes", torch_dtype=torch.float32)
out = pipe(
    prompt="a red circle above a small blue square on grass",
    guidance_scale=2.0,
    height=64,
    width=64,
    num_images_per_prompt=2,
    generator=torch.Generator("cpu").manual_seed(0),
    output_type="np",
)
print(out.images.shape, out.stats.summary)
""",
            r"\(2, 64, 64, 3\) 512 tokens in \d+ forward passes",
        ),
    ),
    Step(
        "I leave num_inference_steps in the call",
        python(
            _SCENES + 'out = pipe("a red circle", num_inference_steps=50)', "num_inference_steps", 1
        ),
        "leave it out, or choose passes with policy=mmaccel.Jacobi(window=32)",
        python(
            _SCENES
            + """
out = pipe("a red circle", policy=mmaccel.Jacobi(window=32))
print(out.stats.summary)
""",
            r"256 tokens in \d+ forward passes",
        ),
    ),
    Step(
        "I give one seed for each image",
        python(
            _SCENES
            + """
both = pipe(["a red circle", "a blue square"], seed=[3, 4])
alone = pipe("a blue square", seed=[4])
print("the same image alone:", both.tokens[1].equal(alone.tokens[0]))
""",
            "the same image alone: True",
        ),
    ),
    Step(
        "I give three seeds for two prompts",
        python(
            _SCENES + 'pipe(["a red circle", "a blue square"], seed=[1, 2, 3])',
            "expected an integer or 2 of them, received 3",
            1,
        ),
        "give one seed per row",
        python(
            _SCENES + 'print(pipe(["a red circle", "a blue square"], seed=[1, 2]).tokens.shape)',
            r"\[2, 256\]",
        ),
    ),
    Step(
        "I watch the steps with callback_on_step_end",
        python(
            _SCENES
            + """

def show(pipe, step, n_tokens, state):
    print(step, n_tokens)
    return state


pipe("a red circle", callback_on_step_end=show)
""",
            r"0 \d+ 1 \d+ .* 256",
        ),
    ),
    Step(
        "I misspell a field of a policy",
        python(
            _SCENES + 'pipe("a red circle", policy={"name": "jacobi", "windw": 32})',
            "received 'windw'",
            1,
        ),
        "did you mean window?",
        python(
            _SCENES
            + """
out = pipe("a red circle", policy={"name": "jacobi", "window": 32})
print(out.stats.summary)
""",
            "256 tokens in",
        ),
    ),
    # A model of transformers
    Step(
        "I attach a policy to my language model",
        python(
            _LLAMA
            + """
with mmaccel.attach(model, "autoregressive", seed=0):
    plain = model.generate(inputs, do_sample=True, max_new_tokens=32)
with mmaccel.attach(model, "jacobi", seed=0) as run:
    made = model.generate(inputs, do_sample=True, max_new_tokens=32)
print(run.stats.summary)
print("the same tokens:", made.equal(plain))
""",
            r"32 tokens in 1?\d forward passes.*the same tokens: True",
        ),
    ),
    Step(
        "My call has a logits processor of my own",
        python(
            _LLAMA
            + """

def sharpen(ids, scores):
    return scores * 2


with mmaccel.attach(model, "jacobi") as run:
    model.generate(inputs, do_sample=True, max_new_tokens=32, logits_processor=[sharpen])
""",
            "ran without the policy: a logits processor of the caller's own",
        ),
        "pass logits_processor=[mmaccel.stateless(processor)]",
        python(
            _LLAMA
            + """

@mmaccel.stateless
def sharpen(ids, scores):
    return scores * 2


with mmaccel.attach(model, "jacobi") as run:
    model.generate(inputs, do_sample=True, max_new_tokens=32, logits_processor=[sharpen])
print(run.stats.fallbacks, run.stats.summary)
""",
            r"\[\] 32 tokens in \d+ forward passes",
        ),
    ),
    Step(
        "I attach to our own pipeline",
        python(_SCENES + 'mmaccel.attach(pipe, "jacobi")', "received a TextToImage", 1),
        "give the policy to its call: pipe(..., policy=policy)",
        python(
            _SCENES + 'print(pipe("a red circle", policy="jacobi").stats.summary)', "256 tokens in"
        ),
    ),
    # Questions about images
    Step(
        "I ask about an image",
        shell(
            f'python -c "{_DRAW}" && mmaccel answer street.png "how many objects are there?"',
            r"forward passes",
        ),
    ),
    Step(
        "I misspell the image",
        shell("mmaccel answer stret.png 'how many objects are there?'", "received 'stret.png'", 2),
        "check the path",
        shell(
            f'python -c "{_DRAW}" && mmaccel answer street.png "how many objects are there?"',
            "forward passes",
        ),
    ),
    Step(
        "I misspell a word that it shall speak",
        shell("mmaccel speak 'the red bird sngs'", "received 'sngs'", 2),
        "did you mean sings",
        shell("mmaccel speak 'the red bird sings'", "1 utterance"),
    ),
    Step(
        "I want a clip of something that it has never seen",
        shell("mmaccel animate 'a red dragon moves left over grass'", "received 'dragon'", 2),
        "write with these",
        shell("mmaccel animate 'a red circle moves left over grass'", "1 clip"),
    ),
    # ComfyUI
    Step(
        "I install the nodes into the wrong folder",
        shell("mmaccel comfy comfy", "received 'comfy', which is not there", 2),
        "give the folder with main.py",
        shell("mmaccel comfy ComfyUI", "is written; restart ComfyUI"),
        files={"ComfyUI/main.py": "", "ComfyUI/custom_nodes/readme.txt": ""},
    ),
    Step(
        "I install the nodes a second time",
        shell("mmaccel comfy ComfyUI && mmaccel comfy ComfyUI", "expected no such folder", 2),
        "replace it with --force",
        shell("mmaccel comfy ComfyUI --force", "is written; restart ComfyUI"),
        files={"ComfyUI/main.py": "", "ComfyUI/custom_nodes/readme.txt": ""},
    ),
    # The server
    Step(
        "I start a server without its packages",
        shell("mmaccel serve", "received not all of them", 1),
        'pip install "mmaccel[serve]"',
        shell(
            'pip install -q "mmaccel[serve]" && mmaccel serve --port {port}',
            "serving scenes at http://127.0.0.1:",
            stop_at="text:http://",
        ),
        lacks=("fastapi",),
    ),
    Step(
        "I ask the server for an image",
        python(
            """
import base64
import json
import urllib.request

asked = {"prompt": "a red circle above a blue square", "seed": 7}
request = urllib.request.Request(
    "http://127.0.0.1:{port}/v1/images/generations",
    json.dumps(asked).encode(),
    {"content-type": "application/json"},
)
made = json.load(urllib.request.urlopen(request))
print(base64.b64decode(made["data"][0]["b64_json"])[:4])
""",
            r"b'\\x89PNG'",
        ),
        server="mmaccel serve --port {port}",
        needs=("fastapi", "uvicorn", "prometheus_client"),
    ),
    Step(
        "The port is taken",
        shell("mmaccel serve --port {port}", "already in use", 2),
        "--port 0 takes a free one",
        shell("mmaccel serve --port 0", "serving scenes at http://", stop_at="text:http://"),
        server="mmaccel serve --port {port}",
        needs=("fastapi", "uvicorn", "prometheus_client"),
    ),
    # It changes what later imports print, so it comes last
    Step(
        "torchao is not installed",
        python(
            _LLAMA
            + """
from transformers import TorchAoConfig

model.save_pretrained("my-model")
LlamaForCausalLM.from_pretrained("my-model", quantization_config=TorchAoConfig("int8"))
""",
            "requires torchao",
            1,
        ),
        "Install with `pip install torchao`",
        shell("pip install -q torchao && python quantised.py", r"16 tokens in \d+ forward passes"),
        files={"quantised.py": _QUANTISED},
        lacks=("torchao",),
    ),
)
