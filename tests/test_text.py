"""GPT-2 on texts: windows of words, the paper's way of measuring it, and the command from files of the user."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import command, models, trees
from vitplast_jax.data import sources, text
from vitplast_jax.errors import UserError
from vitplast_jax.models import GPT2Spec
from vitplast_jax.plasticity import experiments, measure, rates
from vitplast_jax.training import config as settings
from vitplast_jax.training import start
from vitplast_jax.weights import export

SPEC = GPT2Spec(name="gpt2_tiny", width=16, depth=2, heads=2, hidden=64, vocabulary=300, context=24)

PROSE = """The lighthouse stood on a rock that the tide covered twice a day.
Its keeper counted the waves, and wrote the count into a book every evening.

When the wind came from the north, gulls slept behind the lantern.
Nobody had asked for the numbers in thirty years, but he kept them all the same.
In winter the boat could not land, so bread was baked from flour and patience.
The book is in a museum now, open at a page where the count suddenly stops.
"""
NEWS = """Harbour fees rise by 4 percent from Monday, the council said.
Team wins 3-1 at home; coach praises the defence.
A new bridge over the river opens in spring, two years late.
Markets were calm on Friday: shipping shares gained 0.8 percent.
The festival expects 12,000 visitors and asks them to come by train.
Storm warning for the coast: ferries stay in port until noon.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random GPT-2 as transformers stores it, its tokenizer in both forms, and two texts."""
    tokenizers = pytest.importorskip("tokenizers")
    place = tmp_path_factory.mktemp("gpt2")
    trained = tokenizers.ByteLevelBPETokenizer()
    lines = (PROSE + NEWS).splitlines()
    trained.train_from_iterator(lines, vocab_size=290, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(place))
    trained.save(str(place / "whole.json"))
    rng = np.random.default_rng(0)
    shapes = models.abstract_parameters(SPEC)
    params = trees.map_paths(lambda _, leaf: (0.4 * rng.normal(size=leaf.shape)).astype(np.float32), shapes)
    export.save_hf(params, SPEC, place)
    (place / "prose.txt").write_text(PROSE)
    (place / "news.txt").write_text(NEWS)
    return place


def test_windows_hold_the_texts_and_what_ends_them(folder):
    tokenizer = text.load_tokenizer(folder)
    windows = text.load(folder / "prose.txt", tokenizer, 8, 300)
    assert windows.shape[1] == 8 and windows.dtype == np.int32
    joined = "".join(f"{line}<|endoftext|>" for line in PROSE.splitlines() if line)
    assert joined.startswith(tokenizer.decode(windows.ravel().tolist(), skip_special_tokens=False))
    padded = text.load(folder / "news.txt", tokenizer, 100, 300, padded=True)
    assert padded.shape == (6, 100)
    second = tokenizer.decode(padded[1].tolist()).replace("<|endoftext|>", "")
    assert second == "Team wins 3-1 at home; coach praises the defence."
    odd = folder / "odd.txt"
    odd.write_bytes("\ufeffone\u2028line \x85\r\n\r\nanother\n".encode())  # byte order mark; no line ends inside
    rows = text.load(odd, tokenizer, 40, 300, padded=True).tolist()
    assert [tokenizer.decode(row).replace("<|endoftext|>", "") for row in rows] == ["one\u2028line \x85", "another"]
    assert padded[1, -1] == tokenizer.token_to_id("<|endoftext|>")
    cut = text.load(folder / "news.txt", tokenizer, 5, 300, padded=True)
    np.testing.assert_array_equal(cut, padded[:, :5])
    whole = text.load(folder / "prose.txt", text.load_tokenizer(folder / "whole.json"), 8, 300)
    np.testing.assert_array_equal(whole, windows)  # the same tokenizer in one file


def test_bad_texts_and_tokenizers_are_one_line(folder, tmp_path):
    tokenizer = text.load_tokenizer(folder)
    with pytest.raises(UserError, match="it is another model's"):
        text.load(folder / "prose.txt", tokenizer, 8, 50)
    with pytest.raises(UserError, match="0 sequences of 900 tokens"):
        text.load(folder / "prose.txt", tokenizer, 900, 300)
    (tmp_path / "latin.txt").write_bytes("Gebäude\n".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        text.load(tmp_path / "latin.txt", tokenizer, 8, 300)
    with pytest.raises(UserError, match="expected tokenizer.json, or vocab.json and merges.txt"):
        text.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        text.load_tokenizer(tmp_path)


@pytest.mark.parametrize("protocol", ["reference", "ours"])
def test_every_component_is_given_the_embedding_and_the_papers_attention_what_ln1_makes_of_it(protocol):
    rng = np.random.default_rng(1)
    draw = lambda _, leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    model = models.build(SPEC, trees.map_paths(draw, models.abstract_parameters(SPEC)))
    words = [rng.integers(0, 300, (7, 12)) for _ in range(2)]
    result = measure(model, *words, protocol=protocol, pairing="all", batch_size=4)
    embedded = [model.embed(jnp.asarray(side)) for side in words]
    found = {(row["block"], row["component"]): row["mean"] for row in result["rows"]}
    for index, block in enumerate(model.blocks):
        attention = (lambda x, b=block: b.attn(b.norm1(x))) if protocol == "reference" else block.attn
        padded = lambda x, b=block: b.mlp.fc2(jnp.pad(x, ((0, 0), (0, 0), (0, 48))))  # noqa: E731
        functions = {"ln1": block.norm1, "mha": attention, "ln2": block.norm2, "fc1": block.mlp.fc1, "fc2": padded}
        for name, function in functions.items():
            ratios = rates.pairwise_rates(*map(function, embedded), *embedded)
            assert found[index, name] == pytest.approx(float(ratios.mean()), rel=1e-4), (index, name)
    assert result["tokens"] == 12 and result["notes"]["mha_bound"].endswith("a causal mask")
    with pytest.raises(UserError, match="sequences of 12 and of 11 words"):
        measure(model, words[0], words[1][:, :11])
    with pytest.raises(UserError, match="has 300"):
        measure(model, words[0] + 300, words[1])


def run_measure(folder, out, *options):
    from vitplast_jax import measure as called

    config = out.parent / "config.py"
    config.write_text(
        "from vitplast_jax.training.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        f"    config.weights = {str(folder)!r}\n"
        "    config.data.name = 'text'\n"
        f"    config.data.path = {str(folder / 'news.txt')!r}\n"
        f"    config.measure.x_path = {str(folder / 'prose.txt')!r}\n"
        "    config.data.length = 16\n"
        "    config.mesh.data = 1\n"
        "    return config\n"
    )
    with pytest.raises(SystemExit) as ending:
        command.run(called.main, called.__doc__, called.FLAGS, [f"--config={config}", f"--workdir={out}", *options])
    return ending.value.code


def test_the_command_measures_two_text_files(folder, tmp_path, capsys):
    assert run_measure(folder, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "plasticity.json").read_text())
    assert result["images_x"] == result["images_y"] == result["pairs"] > 5 and result["tokens"] == 16
    assert f"{result['pairs']} pretraining sequences" in printed and "in theory" in printed
    assert (tmp_path / "out" / "plasticity.png").exists()
    ranks = {entry["component"]: (entry["rank"], entry["bound_rank"]) for entry in result["components"]}
    assert sorted(rank for rank, _ in ranks.values()) == [1, 2, 3, 4, 5] and ranks["mha"][1] is None
    shares = [choice["flops"] for choice in result["choices"]["components"]]
    assert all(0 < share < 1 for share in shares)


def test_a_tokenizer_may_lie_beside_a_bare_file_name(folder, monkeypatch):
    config = settings.validate({"data.name": "text", "data.path": "news.txt", "data.length": 16})
    started = start.Start(SPEC, {}, {}, ())
    monkeypatch.setattr(experiments, "load_language_start", lambda config: started)
    monkeypatch.chdir(folder)
    given = {"weights": "model.safetensors", "measure.x_path": "prose.txt"}
    _, x, y = experiments._read_texts(settings.validate({**config.to_dict(), **given}))
    assert x.shape[1] == y.shape[1] == 16


def test_texts_are_not_trained_on(tmp_path):
    with pytest.raises(UserError, match="texts are only measured"):
        sources.load("text", tmp_path, "train")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("measure.gradients=True", "loss gradients are those of images"),
        ("data.length=25", "takes 24 words"),
        ("measure.x_path=", "config.measure.x_path is empty"),
        ("measure.distribution=perturbation", "words cannot be perturbed"),
        ("measure.distribution=class", "texts have no classes"),
        ("measure.x_name=digits", "texts are compared with texts"),
        ("measure.sizes=56", "for texts set config.data.length"),
        ("weights=vit_pico_patch4_28.fashion_mnist", "texts need a language model"),
    ],
)
def test_what_texts_cannot_have_is_said(folder, tmp_path, capsys, monkeypatch, option, words):
    def too_late(*arguments, **options):
        raise AssertionError("measured before it was checked")

    if "perturbation" not in option:
        monkeypatch.setattr(experiments, "measure", too_late)
    assert run_measure(folder, tmp_path / "out", f"--config.{option}") == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
