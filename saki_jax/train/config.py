"""Every key of a training run and its default; what is refused stands in validate.py.

The defaults are the paper's student protocol (Table 5, Appendix A; METHODS section 5). A file in
``configs/`` starts from `default_config` and changes what it needs to; the command line changes
single keys with ``--config.key=value``.
"""

from ml_collections import ConfigDict

from saki_jax.command import ConfigError, flatten
from saki_jax.data.answer_format import INSTRUCTION

__all__ = ["ConfigError", "default_config", "flatten"]


def default_config() -> ConfigDict:
    """The paper's student protocol. Adding a key that is not here is an error (it is locked)."""
    config = ConfigDict()
    config.method = "saki"  # a row of train/baselines.py
    config.student = ""  # folder of the initial student, Hugging Face format
    config.teacher = ""  # folder of the teacher, of the same tokenizer; grpo needs none
    config.seed = 0  # of rollouts, placements and the order of the prompts
    config.steps = 200  # rollouts; one optimiser step each
    config.note = ""  # a remark printed under the final table
    config.compute_dtype = "auto"  # of the forward passes; auto: bfloat16, but float32 on CPU
    config.mask_unused_rows = False  # True: ids beyond the tokenizer have probability 0 everywhere

    config.epsilon = epsilon = ConfigDict()  # the KL budget of the bridge, in nats
    epsilon.kind = "linear"  # linear, cosine, constant, piecewise
    epsilon.start = 0.02  # value at step 1
    epsilon.zero_at = 51  # first step with exactly 0 (linear, cosine)
    epsilon.points = ()  # piecewise: ((first step, value), ...)

    config.data = data = ConfigDict()  # the training prompts
    data.source = "file"  # file: `path`; addition: the embedded task, generated
    data.path = ""  # problems and answers: JSON lines, JSON or parquet
    data.problem_field = ""  # "" finds the usual names; dots go into nested objects
    data.answer_field = ""
    data.skip_bad_lines = False  # leave unreadable lines out, counted, instead of stopping
    data.dedup = False  # remove repeated questions and those with contradictory answers
    data.template = "chat"  # chat: the tokenizer's chat template; raw: the question alone
    data.instruction = INSTRUCTION  # appended after a space; "": nothing; verbatim: as in the file
    data.enable_thinking = False  # False closes an empty think block inside the prompt
    data.max_prompt_length = 1024  # tokens, template included; longer prompts are left out
    data.prompts_per_step = 64  # N
    data.samples = 8  # M responses a prompt
    data.epoch_end = "wrap"  # wrap: a batch may begin the next epoch; drop: it may not
    data.problems = 4096  # addition: how many problems to generate
    data.digits = (2, 4)  # addition: shortest and longest operands

    config.rollout = rollout = ConfigDict()
    rollout.response_length = 7168  # T, the cap on response tokens, the end token included
    rollout.block_size = 8  # K, tokens drafted before the teacher verifies
    rollout.block_sizes = ()  # to choose from by the corrections so far; () = always block_size
    rollout.block_costs = ()  # cost of a wave of each, in any unit; () = K + 2.5
    rollout.solver = "newton"  # newton: certified; bisect: the paper's 16 waves
    rollout.slots = 0  # rows generated at the same time, 0 = all; fewer need less cache memory
    rollout.cache_gib = 0.0  # GiB for all key/value caches, over all devices; 0 = no limit
    rollout.refill_rows = 0  # free slots at which waiting rows are admitted, 0 = a quarter of all
    rollout.prefill_prompts = 8  # prompts prefilled together, each once for all its samples
    rollout.prefill_buckets = 3  # n: prefills of P, P/2, .. P/2^(n-1) columns
    rollout.compact = 8  # at the end live rows are gathered into so few slots at least; 0 = never
    rollout.waves_per_call = 64  # waves between two reports of progress
    rollout.score_tokens = 16384  # tokens of a pass of the teacher's scoring, as in trainer
    rollout.end_ids = ()  # ids that end a response; () = all that the two folders name
    rollout.temperature = 1.0  # these four must stay 1, 1, 0, 0: otherwise the p that is
    rollout.top_p = 1.0  # recorded would not be the one that was sampled
    rollout.top_k = 0
    rollout.min_p = 0.0

    config.objective = objective = ConfigDict()  # METHODS section 3
    objective.advantage_logp = "current"  # current: the trainer's log pi, detached; or rollout
    objective.aggregation = "token_mean"  # token_mean, seq_mean, micro_batch_mean
    objective.micro_batch_rows = 8  # rows of the micro-batches that micro_batch_mean emulates
    objective.teacher_mode_coef = 1.0  # factor of -log pi(teacher mode) at corrections
    objective.extrapolation = 1.25  # exopd: lambda; 1 is opd
    objective.k1_clip = 10.0  # |log pi - log T| before it becomes an advantage
    objective.ratio_clip = 0.2  # the surrogate's trust region
    objective.dual_clip = 3.0  # bound of the loss where the advantage is negative
    objective.log_ratio_clip = 20.0  # |log pi - log p_old| before exp

    config.skd = ConfigDict()
    config.skd.top_k = 25  # a drafted token stands if it is among so many of the teacher's

    config.grpo = ConfigDict()
    config.grpo.grader = "auto"  # of the rewards, as eval.grader; the addition task needs none

    config.optimizer = optimizer = ConfigDict()  # AdamW, constant rate
    optimizer.learning_rate = 1e-6
    optimizer.b1 = 0.9
    optimizer.b2 = 0.999
    optimizer.eps = 1e-8
    optimizer.weight_decay = 0.01  # on every parameter
    optimizer.clip_norm = 1.0  # global norm, of the whole batch's gradient

    config.trainer = trainer = ConfigDict()
    trainer.tokens_per_micro_batch = 16384  # of a packed pass, at least a longest row a device
    trainer.chunk = 512  # positions whose logits exist at the same time
    trainer.remat = False  # recompute each layer in the backward pass: less memory, more time
    trainer.max_skips_in_row = 5  # non-finite steps after which the run stops

    config.mesh = mesh = ConfigDict()  # devices by axis; one of them may be -1, "what is left"
    mesh.data = -1  # rows
    mesh.fsdp = 1  # rows, and the weights' width
    mesh.tensor = 1  # heads, feed-forward width and vocabulary

    config.eval = evaluation = ConfigDict()  # the student alone, on problems it is not trained on
    evaluation.source = "file"  # as data.source; the addition task holds problems out
    evaluation.path = ""  # "" with source file: no evaluation
    evaluation.every = 0  # steps between evaluations, 0 = only before step 1 and at the end
    evaluation.problems = 256  # addition: how many to generate; file: the first so many, 0 = all
    evaluation.samples = 8  # k of Mean@k and Pass@k
    evaluation.response_length = 16384
    evaluation.grader = (
        "auto"  # math_verify (algebra), exact (numbers and texts), auto: if installed
    )
    evaluation.seed = 0  # training randomness does not depend on it, nor it on training
    evaluation.batch_rows = 512  # responses generated together
    evaluation.teacher = True  # evaluate the teacher once, before step 1

    config.probe = probe = ConfigDict()  # the fixed-prefix probe inside the run (Appendix E)
    probe.path = ""  # a file of `python -m saki_jax.evals.probe build`; "": no probe
    probe.steps = ()  # after which steps it is measured; the paper: 50, 100, 200

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 10  # steps; the last step and `keep_steps` are always saved
    checkpoint.keep = 3  # the newest so many stay
    checkpoint.keep_steps = ()  # these stay for ever
    return config.lock()
