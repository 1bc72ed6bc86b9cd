"""Convert the corpus and generated chats to token files for train.py.

    python training/prepare.py tokenizer --corpus DIR --out DATA     train the tokenizer
    python training/prepare.py corpus --corpus DIR --out DATA        DATA/{train,held_out}/<source>.npy
    python training/prepare.py chats --out DATA --count N            DATA/{train,held_out}/generated.npy

A token file is a flat uint16 array of documents, each of which ends with <|endoftext|>. The high bit marks the tokens
that count in the loss of fine-tuning: assistant messages including <|im_end|>, and all tokens of plain text.
"""

import argparse
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from generator import ChatGenerator, generate
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LEARN = 0x8000
MAX_TOKENS = 2048
GENERATED_BY_CORPUS = "gen-core"
HELD_OUT_SEED, TOKENIZER_SEED = 10**9, 10**9 + 1
# The parts of a text: words with their leading space, single digits, runs of other characters, and white space. Qwen's
# tokenizers use the same parts.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_records(corpus: Path) -> Iterator[dict]:
    """Yield the records of the corpus."""
    for name in ("chat.jsonl.xz", "text.jsonl.xz"):
        with lzma.open(corpus / name, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def record_texts(record: dict) -> list[str]:
    """Return the texts of a record: of each message, or the plain text."""
    return [message["content"] for message in record["messages"]] if "messages" in record else [record["text"]]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with the full byte alphabet, which encodes any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Encoder:
    """Encodes documents as tokens, with the LEARN bit on tokens that count in the loss."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.end_of_text, self.im_start, self.im_end = (tokenizer.token_to_id(special) for special in SPECIALS)
        self.newline = tokenizer.encode("\n").ids
        self.roles = {role: tokenizer.encode(f"{role}\n").ids for role in ("system", "user", "assistant")}

    def encode(self, documents: list[dict]) -> tuple[list[np.ndarray], int]:
        """Return a uint16 array for each document, and the number of bytes of the marked text."""
        encodings = iter(
            self.tokenizer.encode_batch(
                [text for record in documents for text in record_texts(record)], add_special_tokens=False
            )
        )
        arrays, marked_bytes = [], 0
        for record in documents:
            if "text" in record:
                parts = [np.array(next(encodings).ids + [self.end_of_text], np.uint16) | LEARN]
                marked_bytes += len(record["text"].encode())
            else:
                parts = []
                for message in record["messages"]:
                    content = np.array(next(encodings).ids + [self.im_end], np.uint16)
                    if message["role"] == "assistant":
                        content |= LEARN
                        marked_bytes += len(message["content"].encode())
                    parts += [
                        np.array([self.im_start, *self.roles[message["role"]]], np.uint16),
                        content,
                        np.array(self.newline, np.uint16),
                    ]
                parts[-1] = np.array([self.end_of_text], np.uint16)
            arrays.append(np.concatenate(parts))
        return arrays, marked_bytes


def on_topic(record: dict) -> bool:
    """Return whether a story mentions the subject that the user requested early, and at least twice."""
    user, story = (message["content"].lower() for message in record["messages"][:2])
    if " about " not in user:
        return True
    subject = user.rsplit(" about ", 1)[1].strip(" .?!").split(" ")[-1].rstrip("s")
    return story.count(subject) >= 2 and subject in story[:250]


def save(out: Path, split: str, source: str, arrays: list[np.ndarray]) -> None:
    """Write the documents of a source to OUT/SPLIT/SOURCE.npy."""
    folder = out / split
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{source}.npy", np.concatenate(arrays))


def note_bytes(out: Path, source: str, count: int) -> None:
    """Record the number of bytes of text that the marked tokens of a held-out file represent."""
    path = out / "held_out" / "bytes.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {source: count}, indent=1, sort_keys=True))


def prepare_corpus(corpus: Path, out: Path) -> None:
    """Write the token files of the corpus, with 1% of each source held out."""
    encoder = Encoder(Tokenizer.from_file(str(out / "tokenizer.json")))
    by_source: dict[str, list[dict]] = {}
    for record in read_records(corpus):
        if record["source"] != GENERATED_BY_CORPUS:
            by_source.setdefault(record["source"].replace("/", "-"), []).append(record)
    for source, records in sorted(by_source.items()):
        random.Random(source).shuffle(records)
        held_out = max(2, len(records) // 100)
        arrays, marked_bytes = encoder.encode(records[:held_out])
        save(out, "held_out", source, arrays)
        note_bytes(out, source, marked_bytes)
        records = records[held_out:]
        if source == "tinystories":
            off_topic = [record for record in records if not on_topic(record)]
            save(out, "train", "tinystories-off-topic", encoder.encode(off_topic)[0])
            records = [record for record in records if on_topic(record)]
        arrays, _ = encoder.encode(records)
        save(out, "train", source, arrays)
        print(f"{source:>22}: {len(records):6} documents, {sum(map(len, arrays)):9} tokens, {held_out} held out")


def _generated_part(tokenizer_file: str, count: int, seed: int) -> np.ndarray:
    encoder = Encoder(Tokenizer.from_file(tokenizer_file))
    arrays: list[np.ndarray] = []
    chats = [{"messages": messages} for messages in generate(count, seed)]
    for start in range(0, len(chats), 1000):
        arrays += encoder.encode(chats[start : start + 1000])[0]
    return np.concatenate([array for array in arrays if len(array) <= MAX_TOKENS])


def prepare_chats(out: Path, count: int, seed: int, workers: int) -> None:
    """Generate `count` chats in parallel processes, and write their token files."""
    tokenizer_file = str(out / "tokenizer.json")
    parts = max(workers, count // 25_000)
    with ProcessPoolExecutor(workers) as pool:
        arrays = list(
            pool.map(_generated_part, [tokenizer_file] * parts, [count // parts] * parts, range(seed, seed + parts))
        )
    save(out, "train", "generated", arrays)
    encoder = Encoder(Tokenizer.from_file(tokenizer_file))
    arrays_held_out, marked_bytes = encoder.encode([{"messages": chat} for chat in generate(1000, HELD_OUT_SEED)])
    save(out, "held_out", "generated", arrays_held_out)
    note_bytes(out, "generated", marked_bytes)
    print(f"{'generated':>22}: {count:6} documents, {sum(map(len, arrays)):9} tokens")


def tokenizer_texts(corpus: Path) -> Iterator[str]:
    """Yield the texts from which the tokenizer is trained."""
    for record in read_records(corpus):
        if record["source"] != GENERATED_BY_CORPUS:
            yield from record_texts(record)
    generator = ChatGenerator(TOKENIZER_SEED)
    for _ in range(100_000):
        for message in generator.chat():
            yield message["role"] + "\n"
            yield message["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tokenizer", "corpus", "chats"])
    parser.add_argument("--corpus", type=Path, help="folder with chat.jsonl.xz and text.jsonl.xz")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the token files")
    parser.add_argument("--count", type=int, default=1_000_000, help="number of chats to generate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "tokenizer":
        train_tokenizer(tokenizer_texts(arguments.corpus)).save(str(arguments.out / "tokenizer.json"))
    elif arguments.what == "corpus":
        prepare_corpus(arguments.corpus, arguments.out)
    else:
        prepare_chats(arguments.out, arguments.count, arguments.seed, arguments.workers)


if __name__ == "__main__":
    main()
