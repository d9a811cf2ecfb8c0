#!/usr/bin/env bash
# Run several variants of a recipe side by side on one GPU and print their last lines:
#   bench/translation/sweep.sh DATA OUT 'width=256 dropout=0.3' 'width=512 dropout=0.4' …    (options for --set, one variant a word)
# RUNS names the folder of the runs (runs), COMMON holds options for all, FLAGS further flags of bench/translation/multi30k.py.
data=$1 out=$2
shift 2
number=0
for variant in "$@"; do
  # shellcheck disable=SC2086
  python3 bench/translation/multi30k.py --data "$data" --output "${RUNS:-runs}/sweep-$number" ${FLAGS:-} \
    --set ${COMMON:-} $variant >"$out/variant-$number.log" 2>&1 &
  number=$((number + 1))
done
wait
number=0
for variant in "$@"; do
  echo "== $variant"
  grep -E 'validation|averag|tok/s|^\{|Error' "$out/variant-$number.log" | tail -n "${LINES_EACH:-6}" | cut -c1-300
  number=$((number + 1))
done
