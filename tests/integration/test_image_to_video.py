"""`ImageToVideo`: a plain loop's tokens, the codec's frames, and which frames are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel import ImageToVideo, Jacobi, SpeculativeJacobi
from mmaccel.errors import OptionError
from mmaccel.pipelines.video_start import read_start
from tests.media_beds import picture
from tests.video_beds import SHAPE, VOCAB, Transformer, build_video

FRAME = SHAPE[1] * SHAPE[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_video(tmp_path_factory.mktemp("cosmos"))


@pytest.fixture(scope="module")
def pipe(folders: tuple[Path, Path]) -> ImageToVideo:
    return ImageToVideo.from_pretrained(folders[0], codec=folders[1])


def test_greedy_tokens_are_a_plain_loops(pipe: ImageToVideo) -> None:
    plain = Transformer()
    for n_given, start in ((1, picture()), (9, [picture(k) for k in range(9)])):
        clip = pipe(start, temperature=0, policy=Jacobi(window=5))[0]
        line = clip.tokens.flatten()[: (1 if n_given == 1 else 2) * FRAME]
        while len(line) < 3 * FRAME:
            line = torch.cat((line, plain(line)[-1].argmax()[None]))
        assert clip.n_given == n_given and torch.equal(clip.tokens.flatten(), line)
        assert clip.passes < len(line)


def test_other_policies_stay_within_the_clip(pipe: ImageToVideo) -> None:
    made = pipe(picture(), seed=[1, 2], policy=SpeculativeJacobi(window=8, coupling="maximal"))
    assert made.stats.exactness == "distribution"
    for clip in made.clips:
        assert clip.tokens.shape == SHAPE and 0 <= int(clip.tokens.min())
        assert int(clip.tokens.max()) < VOCAB and clip.passes <= 2 * FRAME


def test_frames_are_the_codecs(pipe: ImageToVideo, folders: tuple[Path, Path]) -> None:
    clip = pipe(picture(), seed=4)[0]
    assert (clip.frames.shape, clip.frames.dtype) == ((17, 32, 48, 3), torch.uint8)
    assert (clip.fps, clip.n_given) == (25.0, 1)
    encoder, decoder = (torch.jit.load(str(folders[1] / f"{n}coder.jit")) for n in ("en", "de"))
    whole = decoder(clip.tokens[None])[0].permute(1, 2, 3, 0)
    wanted = ((whole + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8)
    assert int((clip.frames.int() - wanted.int()).abs().max()) <= 1
    given = torch.from_numpy(np.asarray(picture()).copy()).permute(2, 0, 1)[None, :, None]
    tokens = encoder((given / 127.5 - 1).expand(-1, -1, 17, -1, -1))[0][0, 0]
    assert torch.equal(clip.tokens[0], tokens.long())


def test_which_frames_are_read_and_how_they_are_cut() -> None:
    frames = [picture(k, (30, 20)) for k in range(12)]
    as_numbers = torch.stack([torch.from_numpy(np.asarray(frame).copy()) for frame in frames])
    read = read_start(frames, (30, 20), (1, 9))
    assert read.shape == (9, 3, 20, 30) and float(read.abs().max()) <= 1
    back = read.add(1).mul(127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert torch.equal(back, as_numbers[3:])  # the last nine
    for same in (as_numbers, as_numbers / 255, as_numbers.double() / 255, tuple(frames)):
        assert torch.equal(read_start(same, (30, 20), (1, 9)), read)
    assert torch.equal(read_start(frames[:5], (30, 20), (1, 9))[0], read_start(
        frames[4], (30, 20), (1, 9))[0])  # fmt: skip
    wide = Image.new("RGB", (90, 20), "red")
    wide.paste((0, 0, 255), (30, 0, 60, 20))
    middle = read_start(wide, (30, 20), (1,))[0]
    assert torch.equal(middle, torch.tensor([-1.0, -1, 1])[:, None, None].expand(3, 20, 30))
    tall = read_start(wide.rotate(90, expand=True).resize((10, 45)), (30, 20), (1,))[0]
    assert tall.shape == (3, 20, 30) and float(tall[2].mean()) > 0.9
    assert read_start(Image.new("L", (7, 5), 255), (30, 20), (1,)).unique().tolist() == [1.0]


@pytest.mark.parametrize("size", [(7, 50), (50, 7), (31, 23), (96, 64), (1, 9)])
def test_only_what_is_seen_is_scaled(size: tuple[int, int]) -> None:
    """As if all of it were scaled, and then cut; but what is long does not fill the memory."""
    wanted = (48, 32)
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    whole = (math.ceil(scale * size[0]), math.ceil(scale * size[1]))
    left, top = round((whole[0] - 48) / 2), round((whole[1] - 32) / 2)
    scaled = picture(3, size).resize(whole, Image.Resampling.BILINEAR)
    cut = np.asarray(scaled.crop((left, top, left + 48, top + 32))).astype(int)
    read = read_start(picture(3, size), wanted, (1,))[0].permute(1, 2, 0).add(1).mul(127.5)
    assert np.abs(read.numpy() - cut).max() <= 1.01


def test_pictures_of_all_kinds() -> None:
    strip = Image.new("RGB", (1, 60000), "red")  # scaled as a whole: more than a terabyte
    assert read_start(strip, (4000, 16), (1,))[0, :, 8, 99].tolist() == [1.0, -1.0, -1.0]
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    for kind in ("<u2", ">u2"):
        mode = "I;16" if kind == "<u2" else "I;16B"
        deep = Image.frombytes(mode, (16, 16), ramp.astype(kind).tobytes())
        read = read_start(deep, (16, 16), (1,))[0].add(1).mul(127.5).round()
        assert torch.equal(read, torch.arange(256.0).view(16, 16).expand(3, -1, -1))
    lying = picture(0, (30, 20))
    lying.getexif()[0x0112] = 6
    turned = read_start(lying, (20, 30), (1,))
    assert torch.equal(
        turned, read_start(picture(0, (30, 20)).rotate(270, expand=True), (20, 30), (1,))
    )
    for mode in ("1", "P", "CMYK", "RGBA", "LA"):
        assert read_start(Image.new(mode, (5, 4)), (16, 16), (1,)).shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (Image.new("RGB", (0, 5)), "expected pictures of pixels, received one of 0x5"),
        (Image.new("F", (5, 5)), "expected 8 or 16 bits a channel, .* mode 'F'"),
        (Image.new("I", (5, 5)), "expected 8 or 16 bits a channel, .* mode 'I'"),
        (None, "received NoneType 'None'; open it"),
        ("clip.mp4", "received str 'clip.mp4'"),
        ([], "received list"),
        ([1, 2], "received list"),
        (torch.zeros(3, 4, 4), r"received a tensor \[3, 4, 4\] of torch.float32"),
        (torch.zeros(1, 3, 4, 4), r"received a tensor \[1, 3, 4, 4\]"),
        (torch.zeros(0, 4, 4, 3), r"received a tensor \[0, 4, 4, 3\]"),
        (torch.zeros(1, 4, 4, 3, dtype=torch.int64), "of torch.int64"),
        (torch.full((1, 4, 4, 3), 1.5), "expected floats in 0..1, received 1.5..1.5"),
        (torch.full((1, 4, 4, 3), float("nan")), "expected floats in 0..1, received nan..nan"),
    ],
)
def test_a_start_that_is_none(pipe: ImageToVideo, start: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        pipe(start)
<<<<<<< HEAD


def test_arguments_outside_their_domain(pipe: ImageToVideo) -> None:
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"seed": []}, "seed: expected an integer"),
        ({"seed": "x"}, "seed: expected an integer"),
        ({"seed": 2**64}, "expected a 64-bit integer"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"policy": mmaccel.Stepwise()}, "policy"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1"),
    ]
    for options, said in unfit:
        with pytest.raises(OptionError, match=said):
            pipe(picture(), **options)
    odd: Any = "out"
    with pytest.raises(OptionError, match="deliver: expected a function, received 'out'"):
        pipe.serve(picture(), Filters(), deliver=odd)
    with pytest.raises(OptionError, match="filters"):
        pipe.serve(picture(), odd, deliver=print)
    with pytest.raises(OptionError, match="guidance_scale: expected 1, .* received 2.0"):
        pipe.serve(picture(), Filters(guidance_scale=2.0), deliver=print)


def test_one_run_at_a_time(pipe: ImageToVideo) -> None:
    def again(_: Any) -> None:
        pipe(picture())

    with pytest.raises(mmaccel.BusyError):
        pipe(picture(), on_step=again)
    assert len(pipe(picture())) == 1


def _change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    content = torch.load(folder / "model.pt")
    change(content["model"])
    torch.save(content, folder / "model.pt")


def _add_text(weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.cross_attention.wq.weight"] = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_add_text, "one that also reads text .*; give Cosmos-Predict1-4B or 12B"),
        (lambda w: w.pop("model.layers.1.attention.wk.weight"), "Missing key.*1.self_attn.k_proj"),
        (lambda w: w.pop("model.layers.0.attention.wk.weight"), "none as 'layers.0.attention.wk"),
        (lambda w: w.update(x=torch.zeros(1)), 'Unexpected key.*: "x"'),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "mismatch for model.norm"),
    ],
)
def test_files_of_another_model(
    folders: tuple[Path, Path], tmp_path: Path, change: Any, said: str
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    _change(folder, change)
    with pytest.raises(UnsupportedModelError, match=said):
        ImageToVideo.from_pretrained(folder, codec=folders[1])


def test_folders_that_are_not_whole(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, codec = folders
    with pytest.raises(OptionError, match="model: expected a folder"):
        ImageToVideo.from_pretrained(tmp_path / "none", codec=codec)
    with pytest.raises(OptionError, match="codec: expected a folder"):
        ImageToVideo.from_pretrained(model, codec=tmp_path / "none")
    with pytest.raises(UnsupportedModelError, match="model.pt or model.safetensors, received"):
        ImageToVideo.from_pretrained(codec, codec=codec)
    broken = shutil.copytree(codec, tmp_path / "codec")
    (broken / "decoder.jit").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedModelError, match="expected TorchScript in .*decoder.jit"):
        ImageToVideo.from_pretrained(model, codec=broken)
    (broken / "decoder.jit").unlink()
    with pytest.raises(UnsupportedModelError, match="received no decoder.jit; give the folder"):
        ImageToVideo.from_pretrained(model, codec=broken)
    other = shutil.copytree(codec, tmp_path / "other")
    torch.jit.script(torch.nn.Identity()).save(str(other / "encoder.jit"))
    pipe = ImageToVideo.from_pretrained(model, codec=other)
    with pytest.raises(UnsupportedModelError, match="expected an encoder to whole numbers"):
        pipe(picture())


@pytest.mark.parametrize("shape", [[1, 2, 3], [3, 2], [3, 2, 0], "3x2x3", [3, 2.0, 3], None])
def test_a_shape_that_is_none(folders: tuple[Path, Path], tmp_path: Path, shape: Any) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"video_latent_shape": shape}))
    with pytest.raises(UnsupportedModelError, match="expected video_latent_shape of frames"):
        ImageToVideo.from_pretrained(folder, codec=folders[1])
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="expected JSON in .*config.json"):
        ImageToVideo.from_pretrained(folder, codec=folders[1])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_theta": "500000"}, "rope_theta above 0 .* received '500000'"),
        ({"rope_theta": 0}, "rope_theta above 0"),
        ({"rope_theta": True}, "rope_theta above 0"),
        ({"norm_eps": math.inf}, "norm_eps above 0"),
        ({"norm_eps": math.nan}, "norm_eps above 0"),
        ({"apply_yarn": "false"}, "apply_yarn true or false .* received 'false'"),
        ({"yarn_scale": 0}, "yarn_scale above 0"),
        ({"yarn_beta_fast": "4"}, "yarn_beta_fast above 0"),
        ({"yarn_beta_fast": 1}, "yarn_beta_fast above yarn_beta_slow .* 1 and 1"),
        ({"yarn_beta_slow": -1}, "yarn_beta_slow above 0"),
        ({"original_latent_shape": [0, 2, 3]}, r"original_latent_shape of frames \(1 or more\)"),
    ],
)
def test_numbers_of_a_configuration_that_are_none(
    folders: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    text = json.dumps({"video_latent_shape": SHAPE} | YARN | config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=f"model: expected {said}"):
        ImageToVideo.from_pretrained(folder, codec=folders[1])


def test_null_is_what_a_configuration_does_not_say(
    folders: tuple[Path, Path], tmp_path: Path, pipe: ImageToVideo
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    names = ("rope_theta", "norm_eps", *YARN)
    config = {"video_latent_shape": SHAPE} | dict.fromkeys(names)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rotary: Any = ImageToVideo.from_pretrained(folder, codec=folders[1]).model
    own: Any = pipe.model
    assert torch.equal(rotary.model.model.rotary_emb.cos, own.model.model.rotary_emb.cos)


def test_a_model_and_a_codec_that_do_not_belong_together(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")

    def fewer(weights: dict[str, Tensor]) -> None:
        for name in ("model.tok_embeddings.weight", "model.output.weight"):
            weights[name] = weights[name][:20].clone()

    _change(folder, fewer)
    pipe = ImageToVideo.from_pretrained(folder, codec=folders[1])
    with pytest.raises(UnsupportedModelError, match=r"expected tokens \[3, 2, 3\] in 0..19"):
        pipe(picture())


def test_nan_of_the_model_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    _change(folder, lambda weights: weights["model.output.weight"].fill_(float("nan")))
    pipe = ImageToVideo.from_pretrained(folder, codec=folders[1])
    with pytest.raises(NumericsError):
        pipe(picture())
=======
>>>>>>> stage1-media
