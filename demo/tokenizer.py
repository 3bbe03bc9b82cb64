"""The tokenizer of the demo: byte-level BPE over generated problems, one token a digit, ChatML-like template.

`<think>` and `</think>` are added tokens but not special ones, so that they survive decoding and a grader sees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.problems import Split, Teacher, draw_drill, draw_problem, work

VOCABULARY = 512
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = [PADDING, "<|im_start|>", END_OF_TURN]
THINK_TOKENS = ["<think>", "</think>"]
CORPUS_PROBLEMS = 4000
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer; at most VOCABULARY tokens, the same for the same seed."""
    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(THINK_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(Random(seed)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END_OF_TURN, pad_token=PADDING)
    for token in THINK_TOKENS:
        tokenizer.add_tokens(AddedToken(token, special=False, normalized=False))  # pyright: ignore[reportArgumentType]
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a user's message, up to where the assistant's answer begins."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(str(rendered), add_special_tokens=False)


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _corpus(random: Random) -> Iterator[str]:
    for _ in range(CORPUS_PROBLEMS):
        problem = draw_problem(random, Split.TRAINING, two_step_share=0.4)
        yield problem.text
        yield work(problem, random, Teacher())
        yield "".join(piece.text for piece in draw_drill(random))
        yield from ("user\n", "assistant\n", "system\n")
