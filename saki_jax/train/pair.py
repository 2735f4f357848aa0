"""Student and teacher: checked against each other, the teacher loaded."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from saki_jax.models import hf
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.compatibility import check_pair
from saki_jax.models.config import Qwen3Config
from saki_jax.models.lm import LanguageModel
from saki_jax.models.qwen3 import default_compute_dtype, language_model
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.models.unused_rows import mask_unused_rows


@dataclass(frozen=True)
class Pair:
    """Student and teacher: what they are and where they lie. The student's weights are state.

    Attributes:
      mesh: where everything lies.
      dtype: of the forward passes and of every copy of weights but the masters.
      student_config: of the student.
      student, teacher: as pure functions, both or neither with unused rows of the head masked;
        the teacher is None where none is named.
      teacher_params: in `dtype`.
      tokenizer: the student's; the teacher's has the same token map.
      end_ids: what ends a response.
    """

    mesh: Mesh
    dtype: Any
    student_config: Qwen3Config
    student: LanguageModel
    teacher: LanguageModel | None
    teacher_params: Any | None
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]


def load_pair(config: ConfigDict, mesh: Mesh) -> Pair:
    """Checks the two folders against each other and loads the teacher, if one is named.

    Raises:
      CheckpointError, TokenizerError: with the file and what to do.
    """
    dtype = default_compute_dtype() if config.compute_dtype == "auto" else config.compute_dtype
    dtype = jnp.dtype(dtype)
    student_config, _ = hf.inspect(config.student)
    tokenizer = tokenizers.load(config.student)

    def as_configured(model: LanguageModel) -> LanguageModel:
        return mask_unused_rows(model, tokenizer.size) if config.mask_unused_rows else model

    folders, teacher, teacher_params = (config.student,), None, None
    if config.teacher:
        folders = (config.student, config.teacher)
        teacher_config, teacher_params = hf.load(config.teacher, dtype=dtype, mesh=mesh)
        teacher = as_configured(language_model(teacher_config, dtype))
        check_pair(student_config, teacher_config, tokenizer, tokenizers.load(config.teacher))
    else:
        check_pair(student_config, student_config, tokenizer, tokenizer)
    return Pair(
        mesh=mesh,
        dtype=dtype,
        student_config=student_config,
        student=as_configured(language_model(student_config, dtype, remat=config.trainer.remat)),
        teacher=teacher,
        teacher_params=teacher_params,
        tokenizer=tokenizer,
        end_ids=tokenizers.end_ids(folders, config.rollout.end_ids),
    )
