#!/bin/sh
# Install packages with uv, which hard-links them from one cache:   requirements/install.sh ENVIRONMENT ARGUMENTS-OF-UV-PIP-INSTALL
# cpu.lock pins uv itself. It lies in .venv, next to pip.
set -eu
cd "$(dirname "$0")/.."
environment=$1
shift
pip=".venv/bin/python -m pip"
uv=.venv/bin/uv
[ -x "$uv" ] || $pip install --quiet --constraint requirements/cpu.lock uv || uv=
[ -x "$environment/bin/python" ] || .venv/bin/python -m venv --without-pip "$environment"
# uv does not read pip's settings, so hand over where pip looks for packages. A variable of the environment comes before a file.
settings=$($pip config list | sort)
setting() { printf '%s\n' "$settings" | sed -n "s/^[a-z:]*\.$1='\(.*\)'$/\1/p" | head -n 1 | sed 's/\\n/ /g' | xargs; }
export UV_FIND_LINKS="${UV_FIND_LINKS:-$(setting find-links | tr ' ' ',')}" UV_INDEX="${UV_INDEX:-$(setting extra-index-url)}"
export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$(setting index-url)}" UV_INDEX_STRATEGY=unsafe-best-match
[ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
# The package index has torch for CUDA, which does not start without CUDA's libraries. Unless pip looks elsewhere, use the build for CPUs.
[ -n "$UV_FIND_LINKS$UV_INDEX${UV_DEFAULT_INDEX:-}" ] || export UV_TORCH_BACKEND=cpu
if [ -n "$uv" ] && "$uv" pip install --quiet --python "$environment/bin/python" "$@"; then
    exit 0
fi
echo "uv could not install; pip does it now, which takes minutes" >&2
exec $pip --python "$environment/bin/python" install --quiet "$@"
