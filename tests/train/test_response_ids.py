"""Response ids on their way from the rollout to the loss: never read as text, never as padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.rollout import engine
from saki_jax.rollout.batch import Prompts, num_valid
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.packing import join
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.train.baselines import METHODS
from saki_jax.train.objective import Objective
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from tokenizer_kit import save_words
from toys import point_logits, scripted_model
from train_toys import KEY, bigram, make_rollout

END, PLAIN = 151643, 5  # Qwen3's <|endoftext|>, which is its pad token too


@pytest.mark.parametrize(
    ("response", "pad"), [([PLAIN, 9, END], END), ([PLAIN, 0, 9], 0), ([0, 0, 0], 0)]
)
def test_t02_masks_come_from_lengths_and_not_from_the_pad_id(response, pad):
    rollout = make_rollout([[1]], [response], pad=pad, width=6)
    assert rollout.tokens[0, 3:].tolist() == [pad] * 3
    assert rollout.valid[0].tolist() == [True] * 3 + [False] * 3
    assert num_valid(rollout) == 3
    routed = METHODS["saki"].route(rollout, KEY)
    assert routed.valid[0].tolist() == [True] * 3 + [False] * 3


WORDS = ["<end>", "ask", "x", "a", "b", "y", "z", "ab"]  # ids [3, 4] and [7] both read "ab"


def test_t06_the_sampled_ids_reach_the_loss_and_no_text_is_encoded(tmp_path, monkeypatch):
    tokenizer = tokenizers.load(save_words(tmp_path, WORDS, eos="<end>"))
    assert tokenizer.decode([3, 4]) == tokenizer.decode([7]) == "ab"
    prompt = tokenizer.encode("ask x")

    def refuse(*args, **kwargs):
        raise AssertionError("a text was encoded between rollout and loss")

    monkeypatch.setattr(Tokenizer, "encode", refuse)
    monkeypatch.setattr(type(tokenizer.hf), "__call__", refuse)
    monkeypatch.setattr(type(tokenizer.hf), "_encode_plus", refuse)

    # At positions 1 and 2 the model is sure of 3, then of 4; the cap of 2 ends the response.
    table = jnp.asarray([point_logits(t, len(WORDS)) for t in (2, 3, 4, 0)])
    model = scripted_model(len(WORDS))
    rollout = engine.make_rollout(model, model, RolloutSpec(2, (0,), 0, block_size=1))(
        table,
        table,
        Prompts(jnp.asarray([prompt]), jnp.asarray([2]), jnp.asarray([0])),
        0.02,
        step_key(0, 1),
    )
    assert rollout.tokens.tolist() == [[3, 4]]
    assert join(rollout.prompts, rollout.tokens).tolist() == [[*prompt, 3]]

    optimizer = optax.sgd(1.0)
    student = bigram(len(WORDS))
    update = make_update(student, METHODS["saki"], Objective(), optimizer)
    params = {"table": jnp.zeros((len(WORDS), len(WORDS)))}
    uniform = -float(np.log(len(WORDS)))
    rollout = rollout.replace(log_p=jnp.full((1, 2), uniform), log_t=jnp.full((1, 2), uniform - 1))
    state, stats = update(init_state(params, optimizer), rollout, jax.random.key(0))
    assert stats["num_valid"] == 2
    moved = np.abs(np.asarray(state.params["table"])) > 0.1
    assert moved[2, 3]  # log pi(3 | x)
    assert moved[3, 4]  # log pi(4 | 3)
