#!/bin/bash
# From a fresh checkout to answers out of a long prompt: installs, builds, makes the recall model, starts weftd
# with CPU workers in a private folder, runs weft-demo, stops, and checks that nothing is left behind.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
Usage: tools/quickstart.sh [options]

  --context N   tokens of the first request, 2048 to 1032192 (default 32768; 131072 works too)
  --workers N   worker processes, 1 to 8 (default 4)
  --cache-dtype TYPE   how tokens are cached: f32, bf16, fp8_ds_mla or fp8 (default f32)
  --file PATH   text, or a folder of texts, to read instead of /usr/share/common-licenses
  --seed N      of the planted facts; default: new ones each time
  --keep        leave the daemon running in the background and say what to try next
  --built DIR   use the programs in this build folder instead of installing and building
  --help        this text

The model is constructed, not trained: it continues a text by looking up what followed the longest similar
passage before, and knows nothing else. That makes its answers checkable.
TEXT
}

context=32768 workers=4 cache=f32 keep=false built=
demo_options=()

needs_value() { [[ $# -ge 2 ]] || { echo "quickstart: $1 needs a value (see --help)" >&2; exit 2; }; }
# in_range OPTION VALUE FROM TO: checked before anything is installed or built.
in_range() {
  [[ $2 =~ ^[0-9]{1,9}$ ]] && ((10#$2 >= $3 && 10#$2 <= $4)) ||
    { echo "quickstart: $1 must be a whole number from $3 to $4, not '$2'" >&2; exit 2; }
}
while [[ $# -gt 0 ]]; do
  case $1 in
    --context) needs_value "$@"; in_range "$1" "$2" 2048 1032192; context=$2; shift ;;
    --workers) needs_value "$@"; in_range "$1" "$2" 1 8; workers=$2; shift ;;
    --cache-dtype) needs_value "$@"
      [[ $2 =~ ^(f32|bf16|fp8_ds_mla|fp8)$ ]] ||
        { echo "quickstart: --cache-dtype must be f32, bf16, fp8_ds_mla or fp8, not '$2'" >&2; exit 2; }
      cache=$2; shift ;;
    --file) needs_value "$@"
      [[ -r $2 ]] || { echo "quickstart: --file: cannot read $2" >&2; exit 2; }
      [[ ! -f $2 || -s $2 ]] || { echo "quickstart: --file: $2 is empty" >&2; exit 2; }
      demo_options+=(--file "$(realpath "$2")"); shift ;;
    --seed) needs_value "$@"; in_range "$1" "$2" 0 999999999; demo_options+=(--seed "$2"); shift ;;
    --keep) keep=true ;;
    --built) needs_value "$@"
      [[ -x $2/bin/weftd ]] || { echo "quickstart: --built: no programs in $2/bin" >&2; exit 2; }
      built=$(realpath "$2"); shift ;;
    --help | -h) usage; exit 0 ;;
    *) echo "quickstart: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift
done

build=${built:-build/release}
bin=$build/bin
model=$build/models/recall
daemon="" state="" stopped=false

step() { printf '\n==> %s  (%d s)\n' "$*" "$SECONDS"; }

is_alive() { [[ -n $daemon ]] && kill -0 "$daemon" 2>/dev/null; }

# Processes of the daemon's session: the daemon and its workers.
session_processes() {
  local stat pid rest
  for stat in /proc/[0-9]*/stat; do
    read -r rest 2>/dev/null <"$stat" || continue  # it may be gone by now
    pid=${rest%% *}
    rest=${rest##*) }                       # state parent group session …
    read -r _ _ _ rest _ <<<"$rest"
    [[ $rest == "$daemon" ]] && echo "$pid"
  done
  return 0
}

stop_daemon() {
  if is_alive; then
    "$bin/weftctl" stop --state-dir "$state" --timeout 20 >/dev/null 2>&1 || kill -TERM "$daemon" 2>/dev/null || true
    local i
    for ((i = 0; i < 100; ++i)); do is_alive || break; sleep 0.1; done
    is_alive && kill -KILL "$daemon" 2>/dev/null
  fi
  [[ -z $daemon ]] || wait "$daemon" 2>/dev/null || true
}

# Whatever ends this script, nothing of it stays.
cleanup() {
  local code=$? died=false
  trap - EXIT INT TERM
  if [[ -n $state ]]; then
    [[ $stopped == true ]] || is_alive || died=true
    stop_daemon
    if [[ $code != 0 && $died == true && -s $state/weftd.log ]]; then
      echo "The daemon's last words:" >&2
      tail -n 15 "$state/weftd.log" >&2
    fi
    rm -rf "$state"
  fi
  exit "$code"
}

check_nothing_left() {
  local left shared
  left=$(session_processes)
  [[ -z $left ]] || { echo "still running: $left" >&2; return 1; }
  left=$(find "$state" -type s)
  [[ -z $left ]] || { echo "sockets left: $left" >&2; return 1; }
  shared=$(ls /dev/shm 2>/dev/null || true)
  left=$(comm -13 <(sort <<<"$shared_before") <(sort <<<"$shared") | grep -i weft || true)
  [[ -z $left ]] || { echo "shared memory left: $left" >&2; return 1; }
  echo "nothing left behind: no process, no socket, no shared memory"
}

# One at a time in a build folder: a second one waits here.
mkdir -p "$build"
exec 8>"$build/.quickstart.lock"
flock --nonblock 8 || { echo "waiting for another quickstart in this build folder"; flock 8; }

if [[ -z $built ]]; then
  step "Packages"
  tools/setup.sh

  step "Build"
  cmake --preset release >/dev/null
  cmake --build --preset release --target weftd weft-worker weftctl weft-demo weft-recall-model
fi

step "Recall model"
if [[ ! -f $model/config.json || $bin/weft-recall-model -nt $model/config.json ]]; then
  rm -rf "$model"
  "$bin/weft-recall-model" --out "$model"  # config.json comes last: where it is, all is
else
  echo "$model is up to date"
fi

exec 8>&-  # built; what follows has places of its own

step "weftd with $workers workers"
shared_before=$(ls /dev/shm 2>/dev/null || true)
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
state=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/weft-quickstart.XXXXXX")
# A session of its own: Ctrl-C reaches this script, which then stops the daemon in order.
setsid "$bin/weftd" --model "$model" --workers "$workers" --state-dir "$state" \
  --max-context $((context + 16384)) --pool-tokens $((context + 16384)) \
  --cache-dtype "$cache" --prefill zigzag --decode "dcp($workers)" >"$state/weftd.log" 2>&1 &
daemon=$!
"$bin/weftctl" status --wait --timeout 300 --state-dir "$state" >/dev/null &
waiter=$!
# Whichever comes first: readiness, or the daemon's end.
if ! wait -n -p first "$waiter" "$daemon" || [[ $first == "$daemon" ]]; then
  kill "$waiter" 2>/dev/null || true
  echo "quickstart: weftd did not become ready" >&2
  exit 1
fi

step "Demo"
demo=0
"$bin/weft-demo" --state-dir "$state" --context "$context" "${demo_options[@]}" || demo=$?

if [[ $keep == true && $demo == 0 ]]; then
  trap - EXIT INT TERM
  printf -v ctl '%q' "$(realpath "$bin/weftctl")"
  printf -v demo_program '%q' "$(realpath "$bin/weft-demo")"
  printf -v at -- '--state-dir %q' "$state"
  cat <<TEXT

weftd (process $daemon) goes on in the background; its sockets and its log, weftd.log, are in $state. Try:
  $ctl status $at
  $ctl requests --all $at
  $ctl explain 1 $at
  $ctl generate 'To be or not to be, that is it. To be or not to be' -n 12 --decode dp $at
  $ctl regroup --defaults --decode tp $at
  $demo_program $at --context $context --index split
Stop it and remove all of it with:
  $ctl stop $at && rm -r ${at#--state-dir }
TEXT
  exit 0
fi

step "Stop"
stop_daemon
stopped=true
check_nothing_left || demo=1
[[ $demo != 0 ]] || step "Done"
exit "$demo"
