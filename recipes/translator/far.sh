#!/usr/bin/env bash
# A session of the teacher on a machine that takes and gives only small amounts at a time (README.md):
#
#   far.sh start WHEELS         copies the code to $W, unpacks wheels that are missing there, and waits for `go`
#   far.sh add FOLDER           takes in part of the training data (pack.py), of the snapshot or of what ships
#   far.sh go MINUTES           begins: back-translates, encodes and compiles at once, then trains for so long
#   far.sh wait SECONDS         waits until the session ends, and prints its log
#   far.sh bring OUT FIRST LAST copies these pieces of the snapshot, and all its other files
set -euo pipefail
W=${W:-/tmp/teacher} P=${P:-python3}
export PYTHONPATH=$W/code/src:$W/site PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$W/inductor
recipes=$W/code/recipes/translator

drive() { # in a process of its own
  cd "$W/code"
  until [ -f "$W/go" ]; do sleep 0.5; done
  "$P" $recipes/pack.py unpack "$W/in" "$W/R" && cp $recipes/*.yaml "$W/R/"
  mkdir -p "$W/R/snap" && mv "$W"/in/weights-*.zst "$W"/in/{snapshot,tokenizer,languages}.json "$W/R/snap/"
  mkdir -p "$W/small" && "$P" $recipes/pack.py sample "$W/R" "$W/small" && cp $recipes/*.yaml "$W/small/"
  "$P" $recipes/distill.py --model src/allyouneed/models/translator --data "$W/R" --only-monolingual --device "${D:-cuda}" \
    --seconds "${BACK:-60}" --tag "※ " >"$W/back.log" 2>&1 &
  "$P" $recipes/session.py "$W/R" --snapshot "$W/R/snap" --only-encode --workers 12 >"$W/encode.log" 2>&1 &
  "$P" $recipes/session.py "$W/small" --snapshot "$W/R/snap" --minutes 0.05 --workers 2 >"$W/small.log" 2>&1 &
  wait
  "$P" $recipes/session.py "$W/R" --snapshot "$W/R/snap" --minutes "$(cat "$W/go")"
}

case $1 in
  start)
    mkdir -p "$W/code/recipes" "$W/in" "$W/site"
    cp -r src "$W/code/" && cp -r recipes/translator "$W/code/recipes/" && cp -r bench "$W/code/"
    for wheel in "$2"/*.whl; do "$P" -m zipfile -e "$wheel" "$W/site"; done
    setsid nohup bash "$0" drive >"$W/log" 2>&1 &
    ;;
  add)
    [ ! -f "$2/model.safetensors" ] || mv "$2/model.safetensors" "$W/code/src/allyouneed/models/translator/"
    cp "$2"/* "$W/in/" 2>/dev/null || true
    ;;
  go) echo "$2" >"$W/go.new" && mv "$W/go.new" "$W/go" ;;
  drive)
    drive && echo "ended well" || echo "ended: exit code $?"
    touch "$W/ended"
    ;;
  wait)
    until=$((SECONDS + $2))
    while [ $SECONDS -lt $until ] && [ ! -f "$W/ended" ]; do sleep 1; done
    tail -n 3 "$W"/{back,encode,small}.log "$W/log" 2>/dev/null
    ;;
  bring)
    cp "$W"/R/teacher/snapshot/*.json "$2/"
    for n in $(seq "$3" "$4"); do cp "$(printf '%s/R/teacher/snapshot/weights-%02d.zst' "$W" "$n")" "$2/" || true; done
    ;;
esac
