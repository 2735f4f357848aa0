"""Every key of an evaluation and its default, which is the paper's protocol (section 5)."""

from ml_collections import ConfigDict

from saki_jax.command import ConfigError, check_at_least, check_one_of
from saki_jax.data.answer_format import INSTRUCTION
from saki_jax.data.benchmarks import BENCHMARKS
from saki_jax.data.template import TEMPLATES
from saki_jax.evals.grader import GRADERS

AS_TRAINED = "auto"
COMPUTE_DTYPES = ("auto", "float32", "bfloat16")


def default_config() -> ConfigDict:
    """The student alone, 8 samples at temperature 1, up to 16,384 new tokens."""
    config = ConfigDict()
    config.checkpoint = ""  # a Hugging Face folder, a run's folder, or RUN/checkpoints/STEP
    config.step = 0  # of a run's checkpoints, 0 = the newest
    config.method = ""  # the row in tables; "" = the run's method, or the folder's name
    config.student = ""  # the student's size in tables; "" = told from the shape of the model
    config.compute_dtype = "auto"  # auto: bfloat16, but float32 on CPU
    config.mask_unused_rows = (
        False  # ids beyond the tokenizer; True anyhow where a run was trained so
    )

    config.sets = sets = ConfigDict()  # files of the sets; several are separated by commas
    sets.dir = ""  # a folder with files called <set>.jsonl, .json or .parquet
    for name in BENCHMARKS:
        sets[name] = ""
    sets.own = ""  # other sets: NAME=FILE, several separated by commas
    sets.addition = 0  # held-out problems of the embedded task
    sets.addition_digits = (2, 4)  # shortest and longest operands
    sets.limit = 0  # the first so many problems of each set only; 0 = all
    sets.check_sizes = True  # compare the seven sets' sizes with the published ones
    sets.question_field = ""  # "" finds the usual names
    sets.answer_field = ""

    config.samples = 8  # k of Mean@k and Pass@k
    config.max_new_tokens = 16384
    config.seed = 0  # of the samples; apart from any training seed
    config.end_ids = ()  # () = what the run used, or what the folder names
    config.template = AS_TRAINED  # chat, raw; auto: as the run was trained, chat for a folder
    config.instruction = INSTRUCTION  # with template chat or raw; "": none; verbatim: the file's
    config.enable_thinking = False  # with template chat

    config.grader = "auto"  # exact: numbers and texts; math_verify: algebra too; auto: if installed

    config.batch_rows = 512  # responses generated in one call; at most so many are lost by a kill
    config.slots = 64  # of them at the same time, 0 = all; fewer need less cache memory
    config.waves_per_call = 256  # tokens between two reports of progress
    config.mesh = mesh = ConfigDict()
    mesh.data = -1
    mesh.fsdp = 1
    mesh.tensor = 1

    config.resamples = 10_000  # of the bootstrap
    return config.lock()


MEMORY_KEYS = ("batch_rows", "slots", "waves_per_call", "mesh.data", "mesh.fsdp", "mesh.tensor")
"""Settings that change cost, not results; a folder may be continued with others."""


def validate(config: ConfigDict) -> None:
    """Checks what can be told from the configuration alone.

    Raises:
      ConfigError: naming the key, what it says and what it may say.
    """
    if not config.checkpoint:
        raise ConfigError(
            "checkpoint is empty; set --config.checkpoint=DIR, a Hugging Face folder or a run's"
        )
    check_at_least(
        config,
        {
            "step": 0,
            "samples": 1,
            "max_new_tokens": 1,
            "seed": 0,
            "batch_rows": 1,
            "slots": 0,
            "waves_per_call": 1,
            "resamples": 1,
            "sets.limit": 0,
            "sets.addition": 0,
        },
    )
    check_one_of(
        config,
        {
            "template": (AS_TRAINED, *TEMPLATES),
            "compute_dtype": COMPUTE_DTYPES,
            "grader": GRADERS,
        },
    )
