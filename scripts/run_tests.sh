#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them on two processes (CPU only).
#   bash scripts/run_tests.sh                     the whole suite but `slow` and `parity`
#   bash scripts/run_tests.sh -m slow             the long ones
#   bash scripts/run_tests.sh tests/rollout -k K  anything pytest understands
#   EXTRAS=test,parity bash scripts/run_tests.sh -m parity    live comparison with torch
source "$(dirname "$0")/venv.sh" "${EXTRAS:-test}"

case " $* " in
  *" -m "*) marker=() ;;
  *) marker=(-m "not slow and not parity") ;;
esac
# A file's tests stay in one process, which compiles what they share once.
exec env JAX_PLATFORMS=cpu .venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadfile "${marker[@]}" "$@"
