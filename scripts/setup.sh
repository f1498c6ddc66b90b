#!/usr/bin/env bash
# Bring a Debian or Ubuntu machine to the point where memfit is built: system packages, .venv, build/.
# Does only what is missing; leaves build/bin/memfit and .venv/bin/python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '== %s\n' "$*" >&2; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

packages=(g++ cmake ninja-build ccache libfmt-dev nlohmann-json3-dev libcli11-dev libgtest-dev libgmock-dev libbenchmark-dev zlib1g-dev
          python3 python3-venv)

install_packages() {
  local missing=() package
  command -v dpkg-query >/dev/null || fail "this script knows Debian and Ubuntu. Elsewhere install the like of: ${packages[*]}"
  for package in "${packages[@]}"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || fail "needs root (or sudo) once, to install: ${missing[*]}"
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# Quick the second time: a stamp holds what was installed.
install_python() {
  local wanted
  wanted="$(sha256sum requirements.txt)"
  [[ -x .venv/bin/python && "$(cat .venv/memfit-requirements 2>/dev/null)" == "$wanted" ]] && return 0
  if [[ ! -x .venv/bin/python ]]; then
    say "making .venv"
    local python
    for python in "${PYTHON:-python3}" /usr/bin/python3; do
      "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
      python=
    done
    [[ -n "$python" ]] || fail "needs Python 3.10 or later with venv (apt-get install python3-venv)"
    "$python" -m venv .venv
  fi
  say "installing $(grep -v '^#' requirements.txt | tr '\n' ' ')into .venv"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt >&2
  printf '%s\n' "$wanted" > .venv/memfit-requirements
}

# Each compiler of a file with torch's headers takes up to 2 GiB.
jobs() {
  local cores memory
  cores="$(nproc)"
  memory="$(awk '/^MemAvailable:/ {print int($2 / 1024 / 1024 / 2)}' /proc/meminfo)"
  echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

build() {
  local log=build/setup.log
  mkdir -p build
  if [[ ! -f build/build.ninja ]]; then
    say "configuring build/"
    cmake --preset default > "$log" 2>&1 || { tail -n 40 "$log" >&2; fail "cmake failed, see $log"; }
  fi
  say "building (minutes the first time)"
  ninja -C build -j "$(jobs)" > "$log" 2>&1 || { grep -A 20 '^FAILED' "$log" | head -n 60 >&2 || true; fail "the build failed, see $log"; }
}

install_packages
install_python
build
say "ready: build/bin/memfit and .venv/bin/python"
