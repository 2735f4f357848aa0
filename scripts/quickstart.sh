#!/usr/bin/env bash
# Installs saki_jax into .venv and distils the embedded addition student with SAKI: minutes on two
# cores, nothing is downloaded but the Python packages. Options go to the trainer, for example
#   bash scripts/quickstart.sh --config.method=trb --workdir runs/trb
source "$(dirname "$0")/venv.sh" test

exec .venv/bin/python -m saki_jax.train --config configs/quickstart.py "$@"
