"""The one set of weights, in the forms that peers are converted from, and the reference's logits.

``python -m benchmarks.model DIRECTORY`` writes, in a process of its own (it needs torch and a gigabyte):

=====================  =====================================================================
hf/                    the given GGUF file as a Hugging Face checkpoint in fp32, with its tokenizer
passages.json          token ids of castline's parity text, in its own pieces
reference.npy          float32 [tokens, vocabulary]: transformers in fp32 with its ordinary attention
sanity.json            the tokens of the question that every system is asked, as a chat prompt
=====================  =====================================================================
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.environments import run
from benchmarks.prompts import Vocabulary

QUESTION = "What is the capital of France? Answer in one sentence."
"""The model is sure of its first token here; without the second sentence two tie, and rounding decides."""
ANSWER = "Paris"
DONE = "complete"


@dataclass(frozen=True, slots=True)
class SourceModel:
    """What the program of this module wrote. ``gguf`` is the file that the weights came in."""

    directory: Path
    gguf: Path

    @property
    def hf(self) -> Path:
        return self.directory / "hf"

    @property
    def reference_logits(self) -> Path:
        return self.directory / "reference.npy"

    @property
    def passages(self) -> list[list[int]]:
        passages: list[list[int]] = json.loads((self.directory / "passages.json").read_text())
        return passages

    @property
    def sanity_prompt(self) -> list[int]:
        prompt: list[int] = json.loads((self.directory / "sanity.json").read_text())
        return prompt

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self.hf / "tokenizer.json")

    def decode(self, tokens: list[int]) -> str:
        text: str = Tokenizer.from_file(str(self.hf / "tokenizer.json")).decode(tokens)
        return text


def prepare(directory: Path, log: Path) -> SourceModel:
    """Runs the program below where it has not been run."""
    from castline.builder.model_source import demo_path

    directory = directory.resolve()
    if not (directory / DONE).exists():
        run([sys.executable, "-m", "benchmarks.model", str(directory)], log, "reading the given weights")
    return SourceModel(directory, demo_path())


def write(directory: Path) -> None:
    import numpy as np

    from castline.builder.gguf import load_gguf
    from castline.builder.model_source import demo_path
    from castline.builder.torch_reference import torch_reference
    from castline.builder.verify import shipped_case

    parts = load_gguf(demo_path(), lambda config: None)
    directory.mkdir(parents=True, exist_ok=True)
    parts.model.save_pretrained(directory / "hf")
    parts.tokenizer.save_pretrained(directory / "hf")

    def encode(text: str) -> list[int]:
        ids: list[int] = parts.tokenizer(text)["input_ids"]
        return ids

    config = parts.model.config
    case = shipped_case(encode, config.vocab_size, config.max_position_embeddings)
    reference = torch_reference(parts.model)
    np.save(directory / "reference.npy", np.concatenate([reference(passage) for passage in case.passages]))
    (directory / "passages.json").write_text(json.dumps(case.passages))
    question = [{"role": "user", "content": QUESTION}]
    text = parts.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    sanity = parts.tokenizer(text, add_special_tokens=False)["input_ids"]
    (directory / "sanity.json").write_text(json.dumps(sanity))
    (directory / DONE).touch()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
