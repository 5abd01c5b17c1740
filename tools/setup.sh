#!/bin/bash
# Installs the Debian 12 packages that Weft is built from, as root or through sudo. Harmless to repeat: with
# everything installed it touches nothing and needs no network.
set -euo pipefail

packages=(
  build-essential cmake ninja-build pkg-config ccache         # the build
  protobuf-compiler libprotobuf-dev libzmq3-dev libuv1-dev    # the wire and the loop
  libsqlite3-dev libspdlog-dev libcli11-dev nlohmann-json3-dev
  libsodium-dev libxxhash-dev libpcre2-dev libhwy-dev         # hashes, regexes, kernels
  libgtest-dev libgmock-dev                                   # the tests
)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,3s/^# //p' "$0"
  echo "Packages: ${packages[*]}"
  exit 0
fi

is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

if ! command -v dpkg-query >/dev/null; then
  echo "setup: this is not a Debian system; install by your own means: ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if [[ ${#missing[@]} == 0 ]]; then
  echo "setup: all ${#packages[@]} packages are installed"
  exit 0
fi

as_root=()
if [[ $(id -u) != 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "setup: run as root, or install sudo; missing: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
echo "setup: installing ${missing[*]}"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}"
