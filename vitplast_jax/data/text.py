"""Which sequences of words does a language model get to see? Text files, cut up by a byte-pair tokenizer.

In: a text file (UTF-8; every line that is not empty is a text), and the user's tokenizer: `tokenizer.json`, or
`vocab.json` and `merges.txt`, as they lie beside GPT-2's weights. Out: int32 [n, length] of numbers of words.

The texts are joined, `<|endoftext|>` between them, and cut into windows of one length. `padded=True` is the way of the
plasticity paper's code: one window a text, cut off or filled up with `<|endoftext|>`; of short texts most of a window
is then the same word. The extra `text` brings the library (tokenizers).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from vitplast_jax.errors import UserError

NAME = "text"  # of such data, in config.data.name and config.measure.x_name
_END = "<|endoftext|>"


def load(path, tokenizer, length: int, vocabulary: int, padded: bool = False) -> np.ndarray:
    """The windows of a text file, int32 [n, length].

    Args:
      path: of the text file.
      tokenizer: from :func:`load_tokenizer`.
      length: tokens of a window.
      vocabulary: of the model; its last word stands for `<|endoftext|>` where the tokenizer has none.
      padded: one window a text instead of windows of the joined texts.
    Raises:
      UserError: no such file, not UTF-8, too short, or words that the model does not have.
    """
    try:
        # Lines end where files end them: str.splitlines would also cut a text at U+2028 or U+0085. A mark of the byte
        # order is no word.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read as text ({error.strerror}); give a text file, one text a line"
        ) from None
    texts = [line for line in lines if line.strip()]
    end = tokenizer.token_to_id(_END)
    end = vocabulary - 1 if end is None else end
    encoded = [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False)]
    largest = max((max(ids) for ids in encoded if ids), default=0)
    if largest >= vocabulary:
        raise UserError(f"the tokenizer knows a word {largest}, the model only {vocabulary}: it is another model's")
    if padded:
        windows = [(ids + [end] * length)[:length] for ids in encoded]
    else:
        joined = [word for ids in encoded for word in (*ids, end)]
        windows = [joined[k : k + length] for k in range(0, len(joined) - length + 1, length)]
    if len(windows) < 2:
        raise UserError(f"{path} gives {len(windows)} sequences of {length} tokens, at least 2 are needed")
    return np.asarray(windows, np.int32)


def load_tokenizer(place):
    """The tokenizer of a `tokenizer.json`, or of the folder that holds it or `vocab.json` and `merges.txt`."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("texts need the package tokenizers: pip install 'vitplast_jax[text]'") from None
    place = Path(place)
    folder = place if place.is_dir() else place.parent
    whole = place / "tokenizer.json" if place.is_dir() else place
    parts = [os.fspath(folder / name) for name in ("vocab.json", "merges.txt")]
    try:
        if whole.suffix == ".json" and whole.name != "vocab.json" and whole.is_file():
            found = tokenizers.Tokenizer.from_file(os.fspath(whole))
        elif all(map(os.path.isfile, parts)):
            found = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*parts))
            found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            found.decoder = tokenizers.decoders.ByteLevel()
        else:
            raise UserError(
                f"{place} holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt; say where they "
                "are with --config.data.tokenizer=FOLDER"
            )
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{place} is not a tokenizer that the package tokenizers can read ({error})") from None
    found.no_padding()
    found.no_truncation()
    return found
