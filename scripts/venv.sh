# Sourced by the other scripts: makes .venv once and keeps it in step with pyproject.toml.
# Usage: source scripts/venv.sh EXTRAS        (for example: test   or   test,parity)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras="$1"
python="${PYTHON:-python3}"
if [ ! -x .venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "saki_jax needs Python 3.11 or newer; $("$python" --version 2>&1) was found as '$python'." \
      "Point PYTHON at a newer one, for example: PYTHON=python3.12 bash $0" >&2
    exit 1
  }
  "$python" -m venv .venv
fi

# Installing again costs half a minute even when nothing changed, so it happens only when
# pyproject.toml or the wanted extras did.
stamp=".venv/.installed-$(echo "$extras" | tr ',' '-')"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  echo "installing saki_jax[$extras] into .venv ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
  touch "$stamp"
fi
