"""Evaluation of the student alone: what is asked of the model, and what stays untouched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.data import addition
from saki_jax.data.batches import PromptBatches, sample_rows
from saki_jax.data.template import EncodedPrompts, PromptFormat, encode_prompts
from saki_jax.evals.evaluate import TeacherCalledError, evaluate, evaluation_rows
from saki_jax.evals.grade import Verdict
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.batch import Prompts
from saki_jax.rollout.engine import make_rollout
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.score import score_rows
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.stash import empty_stash, prefill_next
from saki_jax.rollout.waiting import make_queue
from toys import lookup_model, random_table

VOCAB = len(addition.TOKENS) + 2  # two rows of the head have no token
END = len(addition.TOKENS) - 1
SPEC = RolloutSpec(response_length=6, end_ids=(END,), pad_id=END)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("addition")
    addition.save_tokenizer(folder)
    return tokenizers.load(folder)


@pytest.fixture(scope="module")
def encoded(tokenizer):
    problems = addition.problems(5, held_out=True, seed=0, digits=(2, 3))
    # P = 9 leaves a column of padding behind the longest prompt.
    raw = PromptFormat("raw", "")
    return encode_prompts(problems, tokenizer, raw, max_length=20, multiple=9)


@pytest.fixture(scope="module")
def model():
    return lookup_model(VOCAB)


@pytest.fixture(scope="module")
def table():
    return random_table(0, VOCAB)


@pytest.fixture(scope="module")
def generate(model):
    return make_generate(model, SPEC)


@pytest.fixture(scope="module")
def guided(model):
    """A rollout of 15 rows with a teacher, with other settings than the evaluation's."""
    spec = dataclasses.replace(SPEC, block_size=2, slots=4, solver="bisect")
    return make_rollout(model, model, spec)


def run(generate, table, encoded, tokenizer, **settings):
    return evaluate(
        generate, table, encoded, tokenizer, **{"samples": 3, "seed": 0, "batch_rows": 0} | settings
    )


def test_every_problem_gets_its_samples(generate, table, encoded, tokenizer):
    scores = run(generate, table, encoded, tokenizer)
    asked = [(p.id, s) for p in encoded.problems for s in range(3)]
    assert [(r.problem_id, r.sample) for r in scores.responses] == asked
    assert (scores.problems, scores.samples) == (5, 3)
    assert len({r.tokens for r in scores.responses}) > 10  # samples differ
    for r in scores.responses:
        assert r.finished == (r.tokens[-1] == END)
        assert END not in r.tokens[:-1]
        assert 1 <= len(r.tokens) <= 6
    assert scores.truncated == np.mean([not r.finished for r in scores.responses])
    assert scores.mean_length == np.mean([len(r.tokens) for r in scores.responses])
    assert sum(scores.verdicts.values()) == 15


def test_t07_ids_without_a_token_are_kept_counted_and_graded(generate, table, encoded, tokenizer):
    scores = run(generate, table, encoded, tokenizer)
    unknown = [sum(t > END for t in r.tokens) for r in scores.responses]
    assert scores.unknown_ids == sum(unknown) > 0
    kept = next(r for r, n in zip(scores.responses, unknown, strict=True) if n)
    assert len(kept.text) < len(kept.tokens) * len(addition.BOX_OPEN)
    assert kept.verdict in (Verdict.NO_ANSWER, Verdict.INCORRECT)


@pytest.mark.parametrize("batch_rows", [1, 4, 15, 64])
def test_the_size_of_the_calls_changes_nothing(generate, table, encoded, tokenizer, batch_rows):
    whole = run(generate, table, encoded, tokenizer)
    assert run(generate, table, encoded, tokenizer, batch_rows=batch_rows) == whole


def test_rows_behind_the_last_are_filled_under_ids_of_their_own(encoded):
    prompts, real = evaluation_rows(encoded, 3, first=12, size=8)
    assert real == 3
    assert prompts.sequence_id.tolist() == list(range(12, 20))
    assert (np.asarray(prompts.tokens) == encoded.tokens[4]).all()


def test_right_answers_are_counted(generate, table, encoded, tokenizer):
    """The rollout's tokens are replaced by worked answers, right for two problems of the five."""
    length = addition.MAX_RESPONSE
    wide = make_generate(lookup_model(VOCAB), dataclasses.replace(SPEC, response_length=length))

    def answers(params, prompts, key, purpose, on_progress=None):
        rollout = wide(params, prompts, key, purpose)
        tokens = np.full((15, length), END)
        lengths = np.zeros(15, int)
        for row in range(15):
            problem = encoded.problems[row // 3]
            a, b = map(int, problem.problem[:-1].split("+"))
            wrong = row // 3 > 1
            ids = [*tokenizer.encode(addition.response(a, b + wrong)), END]
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        return rollout.replace(tokens=jnp.asarray(tokens), length=jnp.asarray(lengths))

    scores = run(answers, table, encoded, tokenizer)
    assert scores.mean_at_k == scores.pass_at_k == pytest.approx(2 / 5)
    assert scores.verdicts == {"correct": 6, "incorrect": 9, "no_answer": 0, "timeout": 0}
    assert scores.summary()["mean_at_3"] == pytest.approx(2 / 5)


def test_r21_a_rollout_that_called_the_teacher_is_refused(guided, table, encoded, tokenizer):
    def generate(params, prompts, key, purpose, on_progress=None):
        return guided(params, random_table(1, VOCAB), prompts, 0.02, key)

    with pytest.raises(TeacherCalledError, match="teacher forwards during evaluation"):
        run(generate, table, encoded, tokenizer)


def test_r21_only_weights_and_the_evaluation_seed_matter(
    model, generate, guided, table, encoded, tokenizer
):
    """Neither slots, nor training in between, nor the training seed changes a token."""

    def train(seed):
        prompts, _ = evaluation_rows(encoded, 3, 0, 15)
        return guided(table, random_table(1, VOCAB), prompts, 0.02, step_key(seed, 1))

    first = run(generate, table, encoded, tokenizer)
    trained = train(seed=99)
    few_slots = make_generate(model, dataclasses.replace(SPEC, block_size=2, slots=4))
    assert run(few_slots, table, encoded, tokenizer) == first
    jax.tree.map(np.testing.assert_array_equal, trained, train(seed=99))  # nor the other way round
    assert run(generate, table, encoded, tokenizer, seed=1) != first
    assert run(generate, random_table(2, VOCAB), encoded, tokenizer) != first


def test_r21_evaluation_draws_apart_from_training(generate, table, encoded):
    """With the same key and rows, the purpose alone makes the tokens differ."""
    prompts, _ = evaluation_rows(encoded, 3, 0, 15)
    key = step_key(0, 0)
    draft = generate(table, prompts, key, Purpose.DRAFT)
    evaluation = generate(table, prompts, key, Purpose.EVALUATION)
    assert not np.array_equal(draft.tokens, evaluation.tokens)


def test_repeated_ids_are_refused(generate, table, encoded, tokenizer):
    twice = EncodedPrompts(encoded.problems[:1] * 2, encoded.tokens[[0, 0]], encoded.length[[0, 0]])
    with pytest.raises(ValueError, match="1 problem ids occur more than once"):
        run(generate, table, twice, tokenizer)


def seen_by(model: LanguageModel) -> tuple[LanguageModel, list[np.ndarray]]:
    """The model, and a list of all token arrays that its forward sees (at `effects_barrier`)."""
    seen: list[np.ndarray] = []

    def forward(params, tokens, start, cache, segment_ids=None):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), tokens, ordered=True)
        return model.forward(params, tokens, start, cache, segment_ids)

    return dataclasses.replace(model, forward=forward), seen


def prefilled(model: LanguageModel, table, prompts: Prompts) -> np.ndarray:
    """The tokens that generation feeds into a model's cache for these prompts, by row."""
    model, seen = seen_by(model)
    rows, width = prompts.tokens.shape
    stash = empty_stash((model,), rows, width)
    queue = jax.tree.map(jnp.asarray, make_queue(prompts, rows))
    prefill_next((model,), (table,), stash, prompts, queue, rows, (width - 1,))
    jax.effects_barrier()
    by_row = np.zeros_like(seen[0])
    by_row[np.asarray(queue.row)] = seen[0][np.asarray(queue.prompt)]
    return by_row


def scored(model: LanguageModel, table, prompts: Prompts) -> np.ndarray:
    """The tokens that the teacher's scoring pass is given for these prompts."""
    model, seen = seen_by(model)
    rows, width = prompts.tokens.shape
    response, length = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
    score_rows(model, table, prompts, response, length, budget=width)
    jax.effects_barrier()
    by_row = np.zeros((rows, width), np.int32)
    # One row a pass, longest first.
    by_row[np.argsort(-np.asarray(prompts.length), kind="stable")] = np.concatenate(seen)
    return by_row


def test_t03_training_evaluation_and_teacher_see_the_same_prompts(model, table, encoded):
    """By hash: what training and evaluation prefill (into both caches), and what is scored."""
    batch = PromptBatches(encoded, prompts_per_step=5, seed=0).at(1)
    rows = sample_rows(batch, 1)
    training = Prompts(*(jnp.asarray(x[np.argsort(batch.index)]) for x in rows))
    evaluation, _ = evaluation_rows(encoded, 1, 0, 5)
    seen = [
        prefilled(model, table, training),
        prefilled(model, table, evaluation),
        scored(model, table, training),
    ]
    hashes = {dataclasses.replace(encoded, tokens=tokens).fingerprint() for tokens in seen}
    assert hashes == {encoded.fingerprint()}
