#!/bin/sh
# test_ranks_launch.sh - the trainer as several processes that a launcher starts, on 127.0.0.1. It
# writes the same checkpoint as with ranks that it forks itself, and reports a missing rank.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

gpt=${BUILD:-build}/trainer
port=$((10000 + $$ % 20000))
awk 'BEGIN { for (i = 0; i < 400; i++) print "the quick brown fox jumps over dog number", i % 17 }' >"$tmp/text"
options="--data $tmp/text --layers 2 --width 32 --heads 2 --block 16 --batch 4 --steps 12 --eval-every 6
    --eval-batches 2 --threads 1 --dropout 0.1 --quiet"

# tcp_ranks OUT OPTION...: both ranks, as two processes.
tcp_ranks() {
    out=$1; shift
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$gpt" $options --ranks tcp --out "$out" "$@" &
    other=$!
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$gpt" $options --ranks tcp --out "$out" "$@"
    first=$?
    wait $other && [ "$first" -eq 0 ]
}
missing() {
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$gpt" $options --ranks tcp --rank-seconds 1 \
        --out "$tmp/none" 2>"$tmp/log" && return 1
    grep -q 'ranks tcp: not all ranks connected in time' "$tmp/log"
}

check 'two ranks that it forks'                 "$gpt" $options --ranks fork:2 --out "$tmp/forked"
check 'two ranks over sockets'                  tcp_ranks "$tmp/tcp"
check 'the same checkpoint'                     cmp "$tmp/forked/checkpoint.safetensors" "$tmp/tcp/checkpoint.safetensors"
check 'two ranks over sockets that share states' tcp_ranks "$tmp/shards" --shard states
check 'the same checkpoint from them'           cmp "$tmp/forked/checkpoint.safetensors" "$tmp/shards/checkpoint.safetensors"
check 'batches in order, of sockets'            tcp_ranks "$tmp/turns" --ordered --total-batch 16
check 'and of one process'                      "$gpt" $options --ordered --total-batch 16 --out "$tmp/one"
check 'the same bits'                           cmp "$tmp/one/checkpoint.safetensors" "$tmp/turns/checkpoint.safetensors"
check 'a rank that does not come'               missing
report
