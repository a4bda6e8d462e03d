# Sourced by the scripts here: where things are, and how they speak. Needs bash.
# shellcheck shell=bash disable=SC2034  # what is set here is used by those who source it
set -euo pipefail

# Every test program and compile worker is a process that imports torch, several times as quickly from byte code.
unset PYTHONDONTWRITEBYTECODE

# No program of ours leaves a process that compiles behind what runs next.
export EAGERCACHE_LINGER=0

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

TORCH=${TORCH:-2.11.0}
default_torch=2.11.0
if [ "$TORCH" = "$default_torch" ]; then
  venv="$root/.venv"
else
  venv="$root/.venv-$TORCH"
fi
python="$venv/bin/python"
tree="$root/build/dev-$TORCH"
jobs=${JOBS:-$(nproc)}

# The releases of torch that are built and tested, a line each: "2.11.0 3.10" is the torch, then the oldest
# Python that it has a build for.
torch_table() {
  sed -n 's/^    Tried("\([0-9.]*\)", "\([0-9.]*\)").*/\1 \2/p' \
    "$root/python_hooks/eagercache/base/torch_versions.py"
}

# python_floor_of TORCH: the oldest Python for it; nothing where the table does not have it.
python_floor_of() { torch_table | sed -n "s/^${1//./\\.} //p"; }

say() { printf '%s\n' "$*"; }
die() {
  printf '%s\n' "$@" >&2
  exit 1
}

# version_at_least 3.25.1 3.24
version_at_least() {
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

cxx_is_good() {
  local version
  version=$("$1" -dumpfullversion -dumpversion 2>/dev/null) || return 1
  "$1" --version 2>/dev/null | grep -qi 'free software foundation' || return 1
  version_at_least "$version" 12
}

# The C++ compiler: CXX where it is set, else the first g++ of version 12 or later. Prints nothing and
# fails where there is none.
find_cxx() {
  local candidate
  for candidate in ${CXX:-g++ g++-14 g++-13 g++-12}; do
    if cxx_is_good "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# The system's cmake or ninja where it is new enough, else the one that setup put into the environment.
find_cmake() {
  local candidate version
  for candidate in "$(command -v cmake || true)" "$venv/bin/cmake"; do
    [ -x "$candidate" ] || continue
    version=$("$candidate" --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
    if [ -n "$version" ] && version_at_least "$version" 3.24; then
      say "$candidate"
      return 0
    fi
  done
  return 1
}

find_ninja() {
  local candidate
  for candidate in "$(command -v ninja || true)" "$venv/bin/ninja"; do
    if [ -x "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then
      say "$candidate"
      return 0
    fi
  done
  return 1
}

# run_logged LOG DESCRIPTION command...: one line on the terminal, everything else in LOG; on failure the
# end of it, and where the rest is.
run_logged() {
  local log=$1 description=$2 began=$SECONDS
  shift 2
  printf '  %-52s' "$description"
  printf '\n$ %s\n' "$*" >>"$log"
  if "$@" >>"$log" 2>&1; then
    printf '%4d s\n' "$((SECONDS - began))"
    return 0
  fi
  printf 'failed\n'
  {
    say "---- the last lines of ${log#"$root"/}"
    tail -n 30 "$log"
    say "----"
  } >&2
  return 1
}
