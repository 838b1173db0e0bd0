#!/usr/bin/env bash
# Every check that needs a GPU, in under nine minutes and without a network: `make gpu`.
#
# Works from a checkout that is not installed, on Python with torch, transformers, pandas, scipy, matplotlib, typer,
# rich, psutil and jinja2; optional: torchao, for the quantised runs. Results go to results/reference/<gpu>/, reports to
# reports/reference/<gpu>/: one of each run, one of all together, table.md (one page) and log.txt. A step that fails or
# has no time left is said, and the rest goes on; the exit code is 1 if one failed, 2 if nothing could be begun.
#
# Variables: PYTHON; SPECBENCH_GPU_DEVICE (cuda), _DTYPE (bfloat16), _TARGET, _MOE and _SMALL (targets), _TEXT (a target
# with trained weights; SmolLM2 where its weights are in the Hub's cache), _LIMIT (questions a task), _TOKENS (new
# ones), _BATCHES (the largest first: it is measured even if time runs out), _COMPILE (0: no run with --compile), _NAME
# (of the folders), _SECONDS (for everything), _OUTPUT (where results/ and reports/ are made).
set -u
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-python3}
device=${SPECBENCH_GPU_DEVICE:-cuda}
dtype=${SPECBENCH_GPU_DTYPE:-bfloat16}
target=${SPECBENCH_GPU_TARGET:-random:llama-8b}
moe=${SPECBENCH_GPU_MOE:-random:olmoe-1b-7b}
small=${SPECBENCH_GPU_SMALL:-random:smollm2-135m}
limit=${SPECBENCH_GPU_LIMIT:-6}
tokens=${SPECBENCH_GPU_TOKENS:-128}
batches=${SPECBENCH_GPU_BATCHES:-16,4}
compile=${SPECBENCH_GPU_COMPILE:-1}
seconds=${SPECBENCH_GPU_SECONDS:-450}
command -v "$python" >/dev/null || { echo "PYTHON=$python is no program: name one that has torch" >&2; exit 2; }
[[ $seconds =~ ^[1-9][0-9]{0,5}$ ]] ||
  { echo "SPECBENCH_GPU_SECONDS=$seconds is no whole number of seconds from 1 to 999999, such as 450" >&2; exit 2; }
smollm2=${HF_HOME:-$HOME/.cache/huggingface}/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct
text=${SPECBENCH_GPU_TEXT:-$([ -d "$smollm2" ] && echo smollm2-135m)}

model=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
name=${SPECBENCH_GPU_NAME:-$(echo "${model:-$device}" | tr 'A-Z /' 'a-z--')}
results=${SPECBENCH_GPU_OUTPUT:-.}/results/reference/$name
reports=${SPECBENCH_GPU_OUTPUT:-.}/reports/reference/$name
mkdir -p "$results" "$reports" || exit 2
exec > >(tee "$reports/log.txt") 2>&1

export HF_HUB_OFFLINE=1
failed=()
runs=()

# step NAME SHARE COMMAND…: run it within SHARE of the seconds that are left, and stop it as Ctrl-C does. With
# refusal=2 a command that says it cannot run here (exit 2) has not failed.
step() {
  local what=$1 most=$(((seconds - SECONDS) * $2 / 100))
  shift 2
  printf '\n== %s (%s s gone, at most %s s)\n' "$what" "$SECONDS" "$most" >&2
  if [ "$most" -lt 5 ]; then
    failed+=("$what: no time left")
    return 1
  fi
  timeout --foreground -s INT -k 20 "$most" "$python" -m specbench "$@"
  local code=$?
  if [ $code -ne 0 ] && [ $code -eq "${refusal:-0}" ]; then
    echo "so the $what run is left out"
  elif [ $code -ne 0 ]; then
    failed+=("$what: exit $code")
  fi
  return $code
}

# measure NAME SHARE ARGUMENT…: a run whose blocks end in time for its report; what it has is kept.
# Its budget begins when the models are loaded; a --time-budget among the arguments is taken instead.
measure() {
  local run=$1 share=$2
  shift 2
  local budget=$(((seconds - SECONDS) * share / 100 * 6 / 10))
  step "$run" "$share" run --name "$run" --output "$results" --reports "$reports" --device "$device" --fresh \
    --time-budget "${budget}s" "$@"
  [ -f "$results/$run/manifest.json" ] && runs+=("$run")
}

# afford SECONDS WHAT: whether so many are left; if not, say that WHAT is left out.
afford() {
  [ $((seconds - SECONDS)) -ge "$1" ] && return
  echo "less than $1 s left: the $2 run is left out"
  return 1
}

oracles=(--method oracle:rate=0.8,k=4 --method oracle:rate=0.8,k=8 --method oracle:rate=0.8,k=16
  --method oracle:rate=0.8,k=8,tree=60)
random=(--task code --ignore-eos --max-new-tokens "$tokens" --no-text)

step doctor 20 doctor --strict
step roofline 15 roofline --target "$target" --device "$device" --dtype "$dtype" --tau 3.4 --draft-tokens 8 \
  --plot "$reports/roofline.svg"
measure eager-float32 15 --target "$small" --dtype float32 --graphs off --limit 5 "${random[@]}" \
  --method oracle:rate=0.8,k=8 --method oracle:rate=0.8,k=8,tree=60
measure graphs-float32 15 --target "$small" --dtype float32 --graphs auto --limit 5 "${random[@]}" \
  --method oracle:rate=0.8,k=8 --method oracle:rate=0.8,k=8,tree=60
step graphs-against-eager 20 compare eager-float32 graphs-float32 --results "$results" --metric tau --identical
measure dense 50 --target "$target" --dtype "$dtype" --limit "$limit" "${random[@]}" "${oracles[@]}" \
  --method vanilla --method eagle3:draft=random --method hf-generate
measure batches 55 --target "$target" --dtype "$dtype" --limit 16 --batch-size "$batches" "${random[@]}" \
  "${oracles[@]}" --method eagle3:draft=random
if [ "$compile" = 0 ]; then
  echo "SPECBENCH_GPU_COMPILE=0: the compiled run is left out"
elif afford 160 compiled; then # compiling alone takes a minute or more, and counts in the budget
  measure compiled 65 --target "$target" --dtype "$dtype" --compile --limit 2 "${random[@]}" \
    --method oracle:rate=0.8,k=8 --time-budget "$(((seconds - SECONDS) * 55 / 100))s"
fi
measure mixture 60 --target "$moe" --dtype "$dtype" --limit "$limit" "${random[@]}" \
  --method oracle:rate=0.8,k=4 --method oracle:rate=0.8,k=8
for scheme in int8 fp8; do
  if afford 30 "quantised-$scheme"; then
    refusal=2 measure "quantised-$scheme" 60 --target "$small" --quantize "$scheme" --limit 1 "${random[@]}" \
      --method oracle:rate=0.8,k=8
  fi
done
if [ -z "$text" ]; then
  echo "no trained weights here (SPECBENCH_GPU_TEXT): the text run is left out"
elif afford 30 text; then
  measure text 90 --target "$text" --limit 2 --max-new-tokens "$tokens" --method prompt-lookup \
    --method hf-prompt-lookup --method hf-generate
fi

seconds=$((SECONDS + 60 + seconds / 20)) # reports are always made
if [ ${#runs[@]} -gt 0 ]; then
  step report 70 report "${runs[@]}" --results "$results" --output "$reports" --format html --format md
  step table 90 report "${runs[@]}" --results "$results" --output - --format leaderboard >"$reports/table.md"
fi

echo
echo "results: $results, reports: $reports, after $SECONDS s"
for line in "${failed[@]+"${failed[@]}"}"; do echo "failed: $line"; done
[ ${#failed[@]} -eq 0 ]
