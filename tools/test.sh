#!/bin/bash
# Installs what is needed, builds everything and runs all tests but the nightly ones. The last lines are ctest's
# own summary. Arguments go to ctest: tools/test.sh -R layout
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh
cmake --preset dev
cmake --build --preset dev
# Tests wait for processes, sockets and clocks as much as they compute: one more than there are cores.
exec ctest --preset dev -LE nightly -j "$(($(nproc) + 1))" "$@"
