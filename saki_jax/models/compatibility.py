"""Whether a student and a teacher can be compared token by token."""

from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.config import Qwen3Config
from saki_jax.models.tokenizer import Tokenizer


def check_pair(
    student_config: Qwen3Config,
    teacher_config: Qwen3Config,
    student_tokenizer: Tokenizer,
    teacher_tokenizer: Tokenizer,
) -> None:
    """Refuses a pair whose distributions are not over the same tokens.

    Both heads must have the same number of rows, neither tokenizer may name an id without a row,
    and each token must have the same id in both.

    Raises:
      TokenizerError: with both numbers, or the first tokens that differ.
    """
    widths = (student_config.vocab_size, teacher_config.vocab_size)
    tokenizers.check_vocabularies(student_tokenizer, *widths)
    tokenizers.check_vocabularies(teacher_tokenizer, *widths)
    tokenizers.check_pair(student_tokenizer, teacher_tokenizer)
