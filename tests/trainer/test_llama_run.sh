#!/bin/sh
# test_llama_run.sh [LLAMA [TEST_LLAMA]] - a run of examples/llama.c that takes hours: stopped and continued, validated,
# on many ranks, on the simulated GPU. Equal runs save equal bytes.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
build=${BUILD:-build} root=$PWD
case $build in /*) ;; *) build=$root/$build ;; esac
llama=${1:-$build/llama} make=${2:-$build/test_llama}
for program in "$llama" "$make"; do
    [ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
done
cp "$root/README.md" "$tmp/readme" && mkdir "$tmp/model" && (cd "$root" && "$make" --make "$tmp/model" >/dev/null) || exit 1
cd "$tmp" || exit 1
unset OMP_NUM_THREADS NO_COLOR
head -c 3000 readme >text
for i in 1 2 3 4 5 6 7 8 9; do
    words=$(tail -n "+$i" readme | tr -dc 'a-z ' | head -c $((i * 37 % 90 + 5)))
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"$i\"}, {\"role\": \"assistant\", \"content\": \"$words\"}]}"
done >chats.jsonl

common='--data text --block 16 --threads 1 --sample 0 --lr 1e-2'
run() { want=$1; shift; "$llama" model $common "$@" >out 2>err </dev/null; got=$?; [ $got -eq "$want" ] || { cat err; false; }; }
says() { text=$1 want=$2; shift 2; run "$want" "$@" && grep -q -- "$text" err || { cat err; false; }; }
same() { cmp "$1/checkpoint.safetensors" "$2/checkpoint.safetensors"; }
# Lines of a log that hold a loss, without times.
losses() { sed -n '/"loss":/{ s/,"tokens":.*//; p; }' "$1/metrics.jsonl"; }

# --- stopped and continued -------------------------------------------------------------------
# continues NAME OPTION...: 12 steps at once, and 12 steps that a signal stops after some, save the same bytes.
stop_after_some() { # kills the run once its log has a line
    : >out
    "$llama" model $common "$@" >out 2>err </dev/null & pid=$!
    n=0; while ! grep -q '^step  *3 ' out && [ $n -lt 600 ]; do sleep 0.05; n=$((n + 1)); done
    kill -TERM $pid; wait $pid; got=$?
}
continues() {
    name=$1; shift
    rm -rf whole part
    check "$name: 400 steps at once"            run 0 --out whole --steps 400 --log-every 1 "$@"
    stop_after_some --out part --steps 400 --log-every 1 "$@"
    check "$name: a signal stops it with 143"   test $got -eq 143
    check "$name: and prints how to continue"   grep -q 'stopped after step [0-9]*: Terminated. Go on with: .*llama model .*--out part .*--resume$' err
    sh -c "$(sed -n 's/.*Go on with: //p' err)" >out 2>err; got=$?
    check "$name: that command continues"       test $got -eq 0
    check "$name: the same bytes"               same whole part
    check "$name: the same losses"              test "$(losses whole | tail -n 50)" = "$(losses part | tail -n 50)"
    check "$name: the report is there"          test -s part/report.html
}
continues "all weights, bf16"
continues "adapters, fp16, 8-bit moments" --dtype fp16 --lora 2 --moments 8bit
check "adapters: the checkpoint has no frozen weights" sh -c '! grep -aq "\"model.layers.0.mlp.up_proj.weight\"" part/checkpoint.safetensors'
check "adapters: which --adapter reads"         run 0 --adapter part --steps 1

check "a run is not overwritten"                says 'holds a checkpoint: continue it with --resume' 1 --out part --lora 2 --steps 3
check "nor continued with other options"        says 'use the same options' 1 --out part --resume --lora 2 --moments 8bit --steps 500
head -c 2000 readme >text2
check "nor with other data"                     says 'is not the data that this run was trained on' 1 --out part --resume --dtype fp16 --lora 2 --moments 8bit --steps 500 --data text2
check "nor without a checkpoint"                says 'no checkpoint in nowhere' 1 --out nowhere --resume --steps 5
cp -r model other && head -c 6000 readme | dd of=other/model.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null
check "nor adapters of another base"            sh -c "cp -r part moved; '$llama' other $common --out moved --resume --dtype fp16 --lora 2 --moments 8bit --steps 500 2>err; grep -q 'use the same options, data and model' err"
stop_after_some --steps 100000000 --log-every 1
check "nothing is saved without --out"          grep -q 'Nothing is saved: there was no --out DIR' err

# --- validation ------------------------------------------------------------------------------
check "rows are kept for validation"            run 0 --val-rows 3 --steps 30 --lr 3e-2 --out val
check "losses of which are in the log"          grep -q '"val":[0-9]' val/metrics.jsonl
check "the best weights are kept"               sh -c 'grep -q "^best .*val [0-9.]* at step [0-9]*, in val/best" out && test -s val/best/model.safetensors'
check "a file of validation"                    run 0 --val-data text --steps 4
check "a run that diverges says so"             says 'the run seems to have diverged. Try a lower --lr' 0 --steps 40 --lr 1 --clip 0 --dtype fp16 --guard off --log-every 1

# --- the same bits in other ways -------------------------------------------------------------
bits() { run 0 --steps 12 --out "$@"; }
bits plain --overwrite
bits again --recompute; check "recompute: the same bytes" same plain again
rm -rf again; bits again --recompute --lora 2; rm -rf plain; bits plain --lora 2
check "recompute of adapters: the same bytes"   same plain again
check "--loss chunks trains"                    run 0 --steps 3 --loss chunks
check "level 2, 16-bit states"                  run 0 --steps 3 --level 3 --masters 16bit --moments bf16
check "chats of different lengths"              run 0 --data chats.jsonl --chat zephyr --block 128 --steps 6 --batch 3

# --- frozen matrices as codes ----------------------------------------------------------------
# With the codes of a file of Q8_0 and with their decoded values: the same adapters, samples and merged model. The
# rows of down_proj do not divide into blocks.
check "a file of Q8_0"                          run 0 --gguf q8.gguf --gguf-type q8_0
of_codes() {
    "$llama" q8.gguf --tokenizer model/tokenizer.json $common --steps 9 --sample 9 --lora 2 --targets '*_proj' --quiet --overwrite \
        --out "codes_$1" --gguf "codes_$1.gguf" --frozen "$@" >"codes_$1.out" 2>err &&
        "$llama" "codes_$1.gguf" --tokenizer model/tokenizer.json --sample 0 --gguf "again_$1.gguf" --gguf-type f32 # orders the tensors
}
for kind in '--dtype fp32' '--dtype bf16 --level 0' '--dtype bf16 --level 2 --recompute' '--dtype fp16 --guard off'; do
    of_codes dtype $kind && of_codes q8_0 $kind
    check "codes, $kind: the same adapters"     cmp codes_dtype/adapter_model.safetensors codes_q8_0/adapter_model.safetensors
    check "codes, $kind: the same samples"      test "$(sed 's/ in .*s, //' codes_dtype.out)" = "$(sed 's/ in .*s, //' codes_q8_0.out)"
    check "codes, $kind: the same merged model" cmp again_dtype.gguf again_q8_0.gguf
done
check "codes made of other values: nearly the same loss" sh -c "
    for frozen in dtype q8_0; do '$llama' model $common --lora 2 --steps 1 --dtype fp32 --frozen \$frozen | sed -n 's/^step.*loss \([0-9.]*\).*/\1/p'; done >a
    awk 'NR == 1 { x = \$1 } END { d = x - \$1; exit !(NR == 2 && d * d > 0 && d * d < 0.01 * x * x) }' a"
check "codes: for a frozen model"               says 'add --lora or --adapter' 2 --steps 1 --frozen q8_0
check "codes: a run continues with them"        says 'use the same options' 1 --out codes_q8_0 --resume --lora 2 --targets '*_proj' --steps 20

# --- ranks -----------------------------------------------------------------------------------
for kind in '' '--lora 2' '--shard states'; do
    rm -rf ranks*
    for n in 1 2 4; do run 0 --steps 6 --batch 1 --total-batch 4 --ordered --ranks fork:$n $kind --out ranks$n; done
    check "1, 2 and 4 ranks${kind:+, $kind}: the same bytes" sh -c 'cmp ranks1/checkpoint.safetensors ranks2/checkpoint.safetensors && cmp ranks1/checkpoint.safetensors ranks4/checkpoint.safetensors'
    check "1 and 4 ranks${kind:+, $kind}: the same losses"   test "$(losses ranks1)" = "$(losses ranks4)"
done
# In another order of sums: the norms of the gradients and the losses agree.
norms() { sed -n 's/.*"loss":\([0-9.]*\).*"norm":\([0-9.]*\).*/\1 \2/p' "$1/metrics.jsonl"; }
near() { paste "$1" "$2" | awk '{ for (i = 1; i < 3; i++) bad += $i > 1.001 * $(i + 2) || $i < 0.999 * $(i + 2) } END { exit bad || NR < 4 }'; }
chats='--data chats.jsonl --chat zephyr --block 128 --steps 4 --batch 1 --log-every 1 --dtype fp32 --overwrite'
run 0 $chats --accumulate 2 --out one; norms one >a
run 0 $chats --ranks fork:2 --out two; norms two >b
check "2 ranks learn what 2 batches do, of chats, whose tokens count by number" near a b
port=$((20000 + $$ % 20000))
RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$llama" model $common $chats --ranks tcp --out three >/dev/null 2>&1 &
RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$llama" model $common $chats --ranks tcp --out three >out 2>err; wait
norms three >b; check "as torchrun starts them, too" near a b
check "ranks of no kind"                        says 'is not one of fork:N' 2 --ranks threads:2

report
