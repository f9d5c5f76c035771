#!/bin/sh
# test_trainer.sh [PROGRAM]: command-line tests of the trainer, examples/trainer/trainer.c.
# PROGRAM: the built trainer; default BUILD/trainer (BUILD, CC, OPENMP: see the Makefile).
# Ends with the line `N passed, N failed, N skipped`; exit status 1 on a failure.
# SPDX-License-Identifier: MIT OR Unlicense
build=${BUILD:-build} root=$PWD
case $build in /*) ;; *) build=$PWD/$build ;; esac
program=${1:-$build/trainer}
case $program in /*) ;; *) program=$PWD/$program ;; esac
passed=0 failed=0 skipped=0
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
unset OMP_NUM_THREADS NO_COLOR

ok()   { passed=$((passed + 1)); echo "ok   $1"; }
bad()  { failed=$((failed + 1)); echo "FAIL $1: $2"; sed 's/^/       /' out err 2>/dev/null | head -n 6; }
skip() { skipped=$((skipped + 1)); echo "skip $1: $2"; }

# check NAME CONDITION...: passes when the command does.
check() { name=$1; shift; if "$@" >/dev/null 2>&1; then ok "$name"; else bad "$name" "not so: $*"; fi; }

# gpt STATUS ARGUMENT...: runs the trainer; its exit status must be STATUS.
gpt() { want=$1; shift; "$program" "$@" >out 2>err </dev/null; got=$?; [ $got -eq "$want" ]; }

# await COMMAND...: until it succeeds, as long as a busy machine may need.
await() { n=0; while ! "$@" 2>/dev/null && [ $n -lt 1200 ]; do sleep 0.1; n=$((n + 1)); done; }
gone() { ! kill -0 "$1"; }

# refuses NAME STATUS TEXT ARGUMENT...: fails with STATUS, TEXT on stderr, nothing on stdout,
# and leaves no new file behind.
refuses() {
    name=$1 status=$2 text=$3; shift 3
    before=$(ls -A); gpt "$status" "$@" || { bad "$name" "exit status $got, not $status"; return; }
    grep -q -- "$text" err || { bad "$name" "stderr lacks '$text'"; return; }
    [ ! -s out ] || { bad "$name" "wrote to stdout"; return; }
    [ "$before" = "$(ls -A)" ] || { bad "$name" "left files behind"; return; }
    ok "$name"
}

# A corpus of 3000 bytes, and a model that trains a step in about a millisecond.
awk 'BEGIN { for (i = 0; i < 150; i++) printf "%s jumps %d times.\n", i % 3 ? "The fox" : "A dog", i % 7 }' >text
small="--data text --layers 2 --heads 2 --width 16 --block 8 --batch 4 --eval-batches 2 --threads 1"
touch out err

# numbers TOKEN...: tokens of 16 bits, as nanoGPT writes them (also of stdin, one a line).
numbers() { for i in "$@"; do echo $i; done | numbers_of; }
numbers_of() { printf "$(awk '{ printf "\\%03o\\%03o", $1 % 256, int($1 / 256) }')"; }
# llm_header COUNT [MAGIC [VERSION]]: what llm.c writes before them.
llm_header() {
    numbers $((${2:-20240520} % 65536)) $((${2:-20240520} / 65536)) ${3:-1} 0 $(($1 % 65536)) $(($1 / 65536))
    dd if=/dev/zero bs=1012 count=1 2>/dev/null
}
# The corpus as tokens: a token is the number of a byte among those that occur.
awk '{ text = text $0 "\n" } END {
    for (i = 1; i < 128; i++) { c = sprintf("%c", i); if (index(text, c)) id[c] = n++ }
    for (i = 1; i <= length(text); i++) print id[substr(text, i, 1)] }' text >ids
numbers_of <ids >raw.bin; count=$(awk 'END { print NR }' ids)
{ llm_header $count; cat raw.bin; } >llm.bin

# --- wrong usage: exit status 2, and the message says what to do ---
refuses "unknown flag suggests the nearest"  2 "Did you mean --layers?"      --layer 3
refuses "unknown flag with a value"          2 "Did you mean --steps?"       --stepz=3
refuses "the beginning of a name"            2 "Did you mean --profile?"     --prof
refuses "two letters exchanged"              2 "Did you mean --width?"       --widht 3
refuses "a name from elsewhere"              2 "Did you mean --out?"         --save x
refuses "nanoGPT's name, its way"            2 "--max_iters. Did you mean --steps?" --max_iters=3
refuses "unknown flag, nothing near"         2 "unknown option --frobnicate. trainer --help" --frobnicate 3
refuses "a short one, nothing near"          2 "unknown option --bogus. trainer --help" --bogus
refuses "stray argument"                     2 "unexpected argument"         text
refuses "an option without dashes"           2 "\"steps\". Did you mean --steps?" steps 10
refuses "an option with one dash"            2 "\"-steps\". Did you mean --steps?" -steps 10
refuses "one with its value"                 2 "Did you mean --steps?"       -steps=10
refuses "nanoGPT's log"                      2 "unknown option --wandb_log. With --out DIR, DIR/metrics.jsonl" --wandb_log=True
refuses "nanoGPT's compiler"                 2 "unknown option --compile. The kernels are compiled already: leave out --compile" --compile=False
refuses "nanoGPT's number of samples"        2 "unknown option --num_samples. --sample N writes one sample of N tokens" --num_samples 3
refuses "nanoGPT's saves"                    2 "unknown option --always_save_checkpoint. Each validation saves" --always_save_checkpoint=True
refuses "nanochat's depth"                   2 "unknown option --depth. Give --layers N, and --width" --depth 12
refuses "nanochat's batch"                   2 "Did you mean --batch?"       --device_batch_size=4
refuses "nanoGPT's length of a sample"       2 "Did you mean --sample?"      --max_new_tokens 5
refuses "nanoGPT's prompt"                   2 "Did you mean --prompt?"      --start x
refuses "value missing at the end"           2 "--steps needs a value"       --steps
refuses "value missing before a flag"        2 "--out needs a value"         --out --resume
refuses "word as a number"                   2 "is not a number"             --lr=abc
refuses "number with a tail"                 2 "is not a number"             --lr 3e-4x
refuses "empty number"                       2 "is not a whole number"       --steps=
refuses "fraction as a whole number"         2 "is not a whole number"       --layers 2.5
refuses "nan"                                2 "is not a number"             --lr nan
refuses "negative count"                     2 "out of range"                --steps=-1
refuses "overflowing count"                  2 "out of range"                --steps 99999999999999999999
refuses "zero layers"                        2 "out of range"                --layers 0
refuses "dropout of 1"                       2 "out of range"                --dropout 1
refuses "beta of 1"                          2 "out of range"                --beta1 1
refuses "unknown dtype lists the choices"    2 "fp32|fp16|bf16"              --dtype fp64
refuses "unknown rule lists the choices"     2 "torch|static"                --rule none
refuses "unknown preset"                     2 "char-cpu|char-gpu|gpt2"      --preset big
refuses "unknown device lists the choices"   2 "auto|cpu|cuda|cuda:1"        --device gpu
refuses "device without its number"          2 "auto|cpu|cuda|cuda:1"        --device cuda:
refuses "device with a tail"                 2 "auto|cpu|cuda|cuda:1"        --device cuda:1x
refuses "device below zero"                  2 "auto|cpu|cuda|cuda:1"        --device cuda:-1
refuses "a graph on the CPU"                 2 "--graph needs a GPU"         $small --device cpu --graph
refuses "one preset of two unknown"          2 "\"big\" is not one of"  --preset gpt2,big
refuses "tries without end"                  2 "leave one out"               --retry 3 --graph
refuses "tries that are no number"           2 "out of range"                --retry=-1
refuses "pairs of an odd head"               2 "must be even, not 3" $small --width 6 --positions rope
refuses "GPT-2's file of another model"      2 "this model is another"       $small --preset modern --export x
refuses "a plant without layer norms"        2 "--plant needs --bias on, --norm layer" $small --bias on --norm rms --plant 5
refuses "a trail of a graph"                 2 "leave one out"               --trail t --graph
refuses "a profile of a graph"               2 "leave one out"               --profile --graph
refuses "a guard that looks now and then" 2 "is not one of on|off|auto" $small --guard often
refuses "a guard that looks at no step"  2 "is not one of on|off|auto" $small --guard -3
refuses "a plant without biases"         2 "--plant needs --bias on"   $small --plant 5
refuses "bias neither off nor on"            2 "off|on"                      --bias 1
refuses "vocabulary of one"                  2 "out of range"                --vocab 1
refuses "a text with tokens to validate"     2 "must both be"                $small --val-data raw.bin
refuses "tokens with a text to validate"     2 "must both be"                $small --data raw.bin --val-data text
refuses "level 4"                            2 "0|1|2|3"                     --level 4
refuses "flag with a value"                  2 "takes no value"              --quiet=1
refuses "no master weights without low ones" 2 "--level 3 with"              $small --no-master
refuses "nor with fp32"                      2 "--level 3 with"              $small --no-master --level 3 --dtype fp32
refuses "what lies beside f32 weights"       2 "add --level 3 --dtype bf16" $small --masters 8bit
refuses "or beside weights of fp16"          2 "add --level 3 --dtype bf16" $small --masters 16bit --level 3
refuses "a recipe in fp16"                   2 "--recipe needs bf16"         $small --recipe mxfp8
refuses "a recipe without autocast"          2 "--recipe needs bf16"         $small --recipe fp8 --dtype bf16 --level 0
refuses "scales of no mxfp8"                 2 "--e8m0 rounds the scales of mxfp8" $small --recipe fp8 --dtype bf16 --e8m0 floor
refuses "narrow products of no recipe"       2 "--narrow-products multiplies the codes of a recipe" $small --narrow-products
refuses "codes of no recipe"                 2 "--codes keeps the codes of a recipe" $small --codes
refuses "a part of no recipe"                2 "--recipe-without leaves out a part of nvfp4" $small --recipe-without 2d
refuses "4over6 of no nvfp4"                 2 "--over6 is for blocks of nvfp4" $small --dtype bf16 --recipe fp8 --over6 w
refuses "4over6 of transformed inputs"       2 "add --recipe-without hadamard" $small --dtype bf16 --recipe nvfp4 --over6 both
refuses "row scales of no nvfp4"             2 "--row-scaled is for inputs in nvfp4" $small --dtype bf16 --recipe fp8 --row-scaled
refuses "row scales of transformed inputs"   2 "add --recipe-without hadamard" $small --dtype bf16 --recipe nvfp4 --row-scaled
refuses "row scales with 4over6 of inputs"   2 "use --over6 w" $small --dtype bf16 --recipe nvfp4 --recipe-without all --row-scaled --over6 x
refuses "an unknown recipe of a name"        2 '"*.w=fp6" is not NAME=RECIPE' $small --dtype bf16 --recipe-of '*.w=fp6'
refuses "a recipe of no weight"              1 "pattern 'h.9.*': the pattern fits no" $small --dtype bf16 --recipe-of 'h.9.*=fp8'
refuses "a recipe of a name in fp16"         2 "--recipe needs bf16"         $small --recipe-of '*=fp8'
refuses "an unknown recipe"                  2 "none|fp8|fp8-delayed|fp8-block|mxfp8|nvfp4" $small --recipe fp6
refuses "a word for the guard's steps"       2 "on|off|auto or a number of steps from 0 to 1048576, where 0 is off" $small --guard none
refuses "a number beyond a large limit"      2 "pass a number from 0 to 1e12" $small --steps 1e13
refuses "width not divisible by heads"       2 "not divisible"               --width 10 --heads 3
refuses "min-lr above lr"                    2 "above --lr"                  --lr 1e-4 --min-lr 1e-3
refuses "warm-up longer than the schedule"   2 "lower it, or raise"          --warmup 20 --steps 10
refuses "the best checkpoint of no run"      2 "is for --resume"             --from best
refuses "weights for a run that goes on"     2 "leave one of them out"       --init x --resume --out y
refuses "a vocabulary of neither kind"       2 "use the one of the model's" $small --vocabulary 0a20
refuses "a vocabulary with half a byte"      2 "use the one of the model's" $small --vocabulary "bytes 0a2"
refuses "a byte of it twice"                 2 "use the one of the model's" $small --vocabulary "bytes 0a200a"
refuses "a vocabulary of text for tokens"    2 "holds tokens, but the model knows text" $small --data raw.bin --vocabulary "bytes 0a20" --eval-only
refuses "resume without a folder"            2 "--out DIR"                   --resume
refuses "prompt outside the vocabulary"      2 "does not occur"              $small --prompt "@"
refuses "text as a prompt of tokens"         2 "token numbers below 26, .* with --tokenizer" $small --data raw.bin --prompt "3 the"
refuses "prompt of tokens beyond them"       2 "token numbers below 26"      $small --data raw.bin --prompt "3 26"

# --- failures: exit status 1 ---
: >empty; printf a >one; head -c 1000 /dev/zero | tr '\0' a >same; head -c 80 text >short
refuses "data file missing"     1 "cannot read nosuch"      --data nosuch
refuses "data is a folder"      1 "cannot read ."           --data .
refuses "empty data"            1 "has 0 bytes"             --data empty
refuses "data of one byte"      1 "has 1 bytes"             --data one
refuses "one byte repeated"     1 "one byte repeated"       --data same
refuses "block too long"        1 "smaller --block"         --data short --block 64
refuses "resume, no checkpoint" 1 "no checkpoint in"        $small --out nosuch --resume
refuses "folder's parent is a file" 1 "cannot make the folder one/no: .* Choose another --out" $small --out one/no/run
refuses "folder is a file"      1 "Choose another --out"    $small --out one/run
refuses "weights missing"       1 "reading --init"          $small --init nosuch.safetensors
refuses "a byte that the model never met" 1 "holds the byte 0x" $small --vocabulary "bytes 0a203132" --eval-only
refuses "more than the machine's memory" 1 "needs about .* TiB, and the machine has .*: use a smaller" $small --layers 512 --heads 1 --width 65536
refuses "config file missing"   1 "cannot read nosuch"      --config nosuch
printf '{\n"lr": "1e-3",\nbroken\n}\n' >broken.json
refuses "config file malformed" 1 "broken.json is not whole: its JSON is malformed in line 3, at \"broken" --config broken.json
{ printf '{\n"data": "'; head -c 6140 /dev/zero | tr '\0' a; printf '\\u1"\n}\n'; } >escape.json
refuses "half a character at the end of a long value" 1 "escape.json is not whole: its JSON is malformed in line 2" --config escape.json
{ printf '{\n"data": "'; head -c 9000 /dev/zero | tr '\0' a; printf '"\n}\n'; } >long.json
refuses "a value without end" 1 'long.json: the value of "data" is not a text' --config long.json
{ printf '{\n"data": "'; head -c 1030 /dev/zero | tr '\0' a; printf '"\n}\n'; } >long.json
refuses "a long value" 2 "--data is too long" --config long.json
: >empty.bin; head -c 5001 raw.bin >odd.bin; head -c 4000 llm.bin >cut.bin; head -c 100 llm.bin >head.bin
{ cat llm.bin; numbers 1; } >long.bin; { llm_header $count 20240520 2; cat raw.bin; } >version.bin
{ llm_header $count 20240801 7; cat raw.bin; } >wide.bin
{ llm_header $count 20240801 6; cat raw.bin; } >six.bin; head -c 2000 /dev/zero >zeros.bin; mkdir folder.bin
refuses "tokens missing"        1 "cannot read nosuch.bin"  --data nosuch.bin
refuses "tokens are a folder"   1 "cannot read folder.bin"  --data folder.bin
refuses "no tokens"             1 "has 0 tokens"            --data empty.bin
refuses "few tokens"            1 "smaller --block"         --data raw.bin --block 1000
refuses "half a token"          1 "odd number of bytes"     --data odd.bin
refuses "tokens cut off"        1 "header promises"         --data cut.bin
refuses "tokens after the end"  1 "header promises"         --data long.bin
refuses "header cut off"        1 "within its header"       --data head.bin
refuses "unknown token version" 1 "has version 2"           --data version.bin
refuses "half of 32-bit tokens" 1 "header promises 3350 tokens, which are 14424" --data wide.bin
refuses "a version without 32 bits" 1 "version 6 of llm.c's format: of tokens of 32 bits only 7" --data six.bin
refuses "one token repeated"    1 "one token repeated"      --data zeros.bin
refuses "token beyond --vocab"  1 "holds token 25, beyond"  $small --data raw.bin --vocab 25
refuses "validation beyond it"  1 "raw.bin holds token 25"  $small --data zeros.bin --val-data raw.bin --vocab 25
refuses "text beyond --vocab"   1 "26 different bytes"      $small --vocab 25
refuses "validation missing"    1 "Check --val-data"        $small --val-data nosuch
refuses "validation too short"  1 "one has 1 bytes"         $small --val-data one
# /proc takes no files, not even root's.
if [ -d /proc/self ]; then refuses "unwritable folder" 1 "Choose another --out" $small --out /proc
else skip "unwritable folder" "no /proc"; fi

# --- help, version ---
gpt 0 --help; check "--help exits with 0" test $got -eq 0
cp out help; gpt 0 -h; check "-h is --help" cmp -s out help
missing=
for o in data val-data vocab bias dtype level layers heads width activation norm positions qk-norm head zero-init optimizer muon-lr loss retry export export-type vocabulary init from eval-only guard plant report compare block batch accumulate steps lr min-lr warmup \
         decay-steps schedule weight-decay beta1 beta2 dropout clip seed rule init-scale \
         growth-interval eval-every eval-batches log-every out resume overwrite sample \
         temperature top-k prompt threads quiet preset config device tokenizer token-bits eval-train sample-every keep csv top-p ranks rank-seconds total-batch ordered shard peak-tflops graph profile trail no-master help version; do
    grep -q -- "  --$o" help || missing="$missing $o"
done
check "--help lists each option" test -z "$missing"
check "in 79 columns, all of it" awk 'length > 79 { exit 1 }' help
[ ! -r "$root/Makefile" ] || check "as those of make help" sh -c "cd '$root' && ${MAKE:-make} -s help | awk 'length > 79 { exit 1 } END { exit NR < 15 }'"
check "--help names each word of --guard" grep -q "^  --guard on|off|auto|N  " help
check "--help writes numbers as people do" sh -c "grep -q 'auto; 1e-6 to 1000000' help && ! grep -q 'e[-+]0' help"
check "--help has examples" grep -q "^Examples" help
check "--resume says what a larger --steps lengthens" sh -c "grep -A 2 -e '--resume  ' help | grep -q 'lengthens the schedule'"
gpt 0 --version; check "--version" grep -Eq '^trainer [0-9]+\.[0-9]+\.[0-9]+$' out

# --- training ---
gpt 0 $small --steps 60 --lr 1e-2 --log-every 20 --eval-every 30
check "training exits with 0" test $got -eq 0
check "no file without --out" test ! -e checkpoint.safetensors -a ! -e metrics.jsonl
first=$(awk '$1 == "0" { print $3 }' out)
last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
check "the validation loss falls ($first to $last)" awk "BEGIN { exit !($last < 0.8 * $first) }"
check "a plain line per interval" test "$(grep -c '^ *[0-9][0-9]*  *[0-9-]' out)" -eq 5
check "the fields of a log line" grep -Eq '^ +20 +[0-9.]+ +- +[0-9.]+ +[0-9.e+-]+ +65536 +0 +[0-9]+ +[0-9.]+$' out
check "under their names, once" test "$(grep -c '^ *step *loss *val *norm *lr *scale *skips @step *tok/s *ms$' out)" -eq 1
check "in 79 columns, all of it" awk 'length > 79 { exit 1 }' out
check "no carriage return or escape in a pipe" test "$(tr -dc '\r\033' <out | wc -c)" -eq 0
check "nothing on stderr" test ! -s err
cp out plain
gpt 0 $small --steps 60 --lr 1e-2 --log_every=20 --eval_every=30; strip() { cut -c 1-60 "$1"; }
strip plain >a; strip out >b; check "_ stands for -; same run, same numbers" cmp -s a b
gpt 0 $small --steps 60 --lr 1 --lr 1e-2 --log-every 20 --eval-every 30
strip out >b; check "the last of repeated flags counts" cmp -s a b
gpt 0 $small --steps 60 --lr 1e-2 --log-every 20 --eval-every 30 --threads 2
strip out >b; check "same numbers with two threads" sh -c 'grep -v ^run a >c; grep -v ^run b | cmp -s - c'
for d in fp32 fp16 bf16; do for l in 0 1 2 3; do
    gpt 0 $small --steps 60 --lr 1e-2 --dtype $d --level $l --log-every 60 --eval-every 60
    last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
    check "$d at level $l learns ($last)" awk "BEGIN { exit !(${last:-9} < 0.8 * $first) }"
done; done
gpt 0 $small --steps 1; check "the start line tells dtype and level" grep -q "^run      fp16 at level 1, loss" out
gpt 0 $small --steps 1 --dtype fp32; check "fp32 has no level" grep -q "^run      fp32, loss" out
gpt 0 $small --steps 1 --dtype fp32 --level 3; check "whatever was asked for" grep -q "^run      fp32 (level 3 is for fp16 and bf16), loss" out
gpt 0 $small --steps 1 --level 0; check "level 0 is fp32" grep -q "^run      fp32 (level 0: no autocast), loss" out
gpt 0 $small --steps 4 --level 3 --no-master; check "--no-master with level 3 trains" grep -q "^run      fp16 at level 3" out
many=$(($(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 64) + 1))
gpt 0 $small --steps 1 --threads $many
if grep -q ", $many threads," out; then check "more threads than processors" grep -q "warning: $many threads on .*: --threads [0-9]* is faster$" err
else skip "more threads than processors" "built without OpenMP"; fi
gpt 0 $small --steps 12 --init-scale 1e30 --log-every 4
check "an overflow lowers the scale" awk '/^ *[0-9]/ { last = $6 } END { exit !(last > 0 && last < 1e29) }' out
check "and skips the step" grep -Eq ' [1-9][0-9]* @[0-9]+ ' out
gpt 0 $small --steps 4; check "the guard is announced" grep -q "^guard    on: a site that overflows falls back to f32$" out
check "and found nothing" grep -q "^guard    no event: every site stayed in its dtype$" out
gpt 0 $small --steps 4 --guard off; check "--guard off says nothing of a guard" sh -c '! grep -q "^guard " out'
gpt 1 $small --steps 50 --rule static --init-scale 1e30
check "a scale that can never fit is reported" grep -q "while training: ." err
check "with what to try" grep -q "Try a lower --init-scale, another --rule or a lower --lr$" err
check "and not twice" test "$(grep -c . err)" -eq 1
gpt 1 $small --steps 50 --rule static --init-scale 1e30 --out ended
check "the page of a run that fails says why" grep -q "Ended by an error at step [0-9]*: ." ended/report.html
gpt 0 $small --guard off --steps 60 --lr 100 --clip 0 --log-every 20 --eval-every 60
check "a loss that is nan is warned of" grep -Eq "warning: at step [0-9]+ the loss is nan \((NaN|Inf) in the gradient of transformer\..*\): .* Try a lower --lr" err
check "once" test "$(grep -c . err)" -eq 1
check "nan has no sign" sh -c 'grep -q "^ *60 *nan *nan *nan " out && ! grep -q -e -nan out'
gpt 0 $small --guard off --steps 60 --lr 100 --clip 0 --log-every 60 --eval-every 60
check "so are 20 skips, between log lines" grep -Eq "warning: at step 2[0-9] the last 20 steps were skipped \((NaN|Inf) in the gradient of transformer\." err
# tells NAME TEXT ARGUMENT...: runs, and says on stderr what one option leaves without effect.
tells() { name=$1 text=$2; shift 2; gpt 0 $small --steps 1 --quiet "$@"; check "$name" grep -q -- "$text" err; }
tells "Muon's rate without Muon is told"   "--muon-lr 0.02 does nothing here"       --muon-lr 0.02
tells "the end of a constant rate, too"    "--min-lr 0.0001 does nothing here"      --min-lr 1e-4 --schedule constant
tells "and the steps to it"                "--decay-steps 9 does nothing here"      --decay-steps 9 --schedule constant
tells "the growth of a static scale"       "--growth-interval 5 does nothing here"  --growth-interval 5 --dtype bf16
tells "a prompt without a sample"          "--prompt The does nothing here"         --prompt The
tells "the likeliest of the likeliest"     "--top-k 5 does nothing here"            --top-k 5 --sample 3 --temperature 0
tells "tries without training"             "--retry 2 does nothing here"            --retry 2 --eval-only
tells "what only a GPU's products do"      "--epilogues on does nothing here"       --epilogues on --device cpu
gelu="--device cpu --steps 20 --dtype bf16 --bias on --activation gelu-tanh --quiet"
gpt 0 $small $gelu --out apart; gpt 0 $small $gelu --epilogues on --out joined
check "on a CPU the weights are the same" cmp apart/checkpoint.safetensors joined/checkpoint.safetensors
check "the run keeps the choice" grep -q '"epilogues": "on"' joined/config.json; rm -rf apart joined
refuses "an epilogue that is none" 2 "off|bias|gelu|on" $small --epilogues all
gpt 0 $small --steps 1 --quiet --guard 0; check "a guard of 0 steps is none" test ! -s err
gpt 0 $small --steps 1 --quiet --muon-lr 0.02 --optimizer muon; check "what works is not told of" test ! -s err
gpt 0 $small --steps 5 --dropout 0.2 --accumulate 3 --quiet --sample 40 --prompt "The" --top-k 5
check "--quiet prints the result and the sample" sh -c 'head -n 1 out | grep -q "^best val" && sed -n 2p out | grep -q "^The" && ! grep -q "^ *step" out'
check "the sample has 43 bytes" sh -c 'test $(tail -n +2 out | wc -c) -eq 44'
cp out a; gpt 0 $small --steps 5 --dropout 0.2 --accumulate 3 --quiet --sample 40 --prompt "The" --top-k 5
check "the same seed gives the same sample" cmp -s a out
printf 'x = 1;\r\ny = "\303\251\377";\r\n' >odd; for i in 1 2 3 4 5; do cat odd odd >odd2; cat odd2 >>odd; done
gpt 0 --data odd --layers 1 --heads 1 --width 8 --block 8 --batch 2 --steps 5 --eval-batches 1 --sample 200 --temperature 5
check "CRLF and invalid UTF-8 train; samples hold no control bytes" sh -c 'test '$got' -eq 0 && test "$(tr -dc "\r\033" <out | wc -c)" -eq 0'

# --- tokens ---
gpt 0 $small --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >a
gpt 0 $small --data raw.bin --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "nanoGPT's tokens train as their text does" cmp -s a b
check "their number is shown" grep -q "^data     raw.bin: 3015 tokens to train on, 335 to validate$" out
gpt 0 $small --data llm.bin --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "llm.c's tokens train as their text does" cmp -s a b
check "of 16 bits, without being told" grep -q "3015 tokens to train on" out
# wide_of: tokens of 32 bits, of stdin.
wide_of() { awk '{ print $1 % 65536; print int($1 / 65536) }' | numbers_of; }
{ llm_header $count 20240801 7; wide_of <ids; } >llm32.bin
gpt 0 $small --data llm32.bin --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "llm.c's tokens of 32 bits, too" cmp -s a b
awk '{ print 40 * $1 }' ids >ids40; numbers_of <ids40 >raw40.bin; wide_of <ids40 >wide40.bin
gpt 0 $small --data raw40.bin --steps 20 --eval-every 20; strip out | sed '/^data/d' >c
refuses "tokens of 32 bits without a header" 1 "looks as if its tokens were of 32 bits: add --token-bits 32, or" $small --data wide40.bin
gpt 0 $small --data wide40.bin --token-bits 32 --steps 20 --eval-every 20; strip out | sed '/^data/d' >d
check "but with --token-bits 32" cmp -s c d
gpt 0 $small --data wide40.bin --token-bits 16 --steps 2; check "or 16, if you say so" grep -q "6030 tokens to train on" out
# numpy's: 64 bits without a header, arrays with one, and numbers that are no tokens.
long_of() { awk '{ print $1 % 65536; print int($1 / 65536); print 0; print 0 }' | numbers_of; }
long_of <ids40 >long40.bin
refuses "tokens of 64 bits without a header" 1 "looks as if its tokens were of 64 bits, numpy's default: add --token-bits 64" $small --data long40.bin
refuses "which 32 bits would make zeros of"  1 "tokens were of 64 bits" $small --data long40.bin --token-bits 32
gpt 0 $small --data long40.bin --token-bits 64 --steps 20 --eval-every 20; strip out | sed '/^data/d' >d
check "but with --token-bits 64" cmp -s c d
# npy TYPE SHAPE [MAJOR]: what numpy writes before an array.
npy() { printf "\223NUMPY\\00${3:-1}\\000"; numbers 118; [ "${3:-1}" -eq 1 ] || numbers 0
    printf "%-117s\n" "{'descr': '$1', 'fortran_order': False, 'shape': $2, }"; }
for type in u2 i2 u4 i4 u8 i8; do
    case $type in *2) how=numbers_of ;; *4) how=wide_of ;; *8) how=long_of ;; esac
    { npy "<$type" "($count,)"; $how <ids40; } >array.npy
    gpt 0 $small --data array.npy --steps 20 --eval-every 20; strip out | sed '/^data/d' >d
    check "an array of $type" cmp -s c d
done
{ npy '|u1' "($count,)"; cat text; } >bytes.npy; gpt 0 $small --data bytes.npy --steps 2; check "of u1" grep -q "vocabulary 12[0-9]$" out
{ npy '<u2' "($count,)" 2; cat raw40.bin; } >array.bin
gpt 0 $small --data array.bin --steps 20 --eval-every 20; strip out | sed '/^data/d' >d
check "whatever its name and version" cmp -s c d
cp raw40.bin CAPITALS.BIN; gpt 0 $small --data CAPITALS.BIN --steps 20 --eval-every 20; strip out | sed '/^data/d' >d
check "tokens named in capitals" cmp -s c d
{ npy '>u2' "($count,)"; cat raw40.bin; } >a.npy; refuses "an array of the other order" 1 "the high bytes of its numbers come first" $small --data a.npy
{ npy '<f4' "($count,)"; cat wide40.bin; } >a.npy; refuses "an array of floats" 1 "its array has numbers of type '<f4'" $small --data a.npy
{ npy '<u2' "(5, 670)"; cat raw40.bin; } >a.npy; refuses "an array of two dimensions" 1 "its array has the shape (5, 670)" $small --data a.npy
{ npy '<u2' "(9999,)"; cat raw40.bin; } >a.npy; refuses "a cut array" 1 "promises 9999 tokens of 2 bytes: get the complete file" $small --data a.npy
{ npy '<i2' "(400,)"; awk 'BEGIN { for (i = 0; i < 400; i++) print i == 9 ? 65535 : i % 7 }' | numbers_of; } >a.npy
refuses "a negative token" 1 "holds a number that is not a token: it is negative" $small --data a.npy
printf '\223NUMPY\001\000\377\377xxxxxxxxxxxxxxxxxx' >a.npy; refuses "half a header" 1 "the header of its array is damaged" $small --data a.npy
awk 'BEGIN { for (i = 0; i < 900; i++) { print 0; print i % 3 ? 16256 : 16448 } }' | numbers_of >float.bin
refuses "numbers of f32" 1 "holds floating-point numbers of 32 bits" $small --data float.bin
awk 'BEGIN { for (i = 0; i < 900; i++) { print 0; print 0; print 0; print i % 3 ? 16368 : 16392 } }' | numbers_of >double.bin
refuses "and of f64" 1 "holds floating-point numbers of 64 bits" $small --data double.bin --token-bits 32
awk 'BEGIN { for (i = 0; i < 2000; i++) { t = i * 7 % 500; print t % 256 * 256 + int(t / 256) } }' | numbers_of >big.bin
refuses "tokens of the other order" 1 "looks as if the high bytes of its tokens came first" $small --data big.bin
awk 'BEGIN { for (i = 0; i < 900; i++) print i % 2 ? 999 : i % 5 }' | wide_of >wide999.bin
# A few numbers that are no tokens, such as -1 for padding, do not make another width of them.
wide_of <ids >small32.bin; refuses "few tokens of 32 bits" 1 "tokens were of 32 bits" $small --data small32.bin
padded() { awk 'NR % 200 == 9 { print 65535; print 65535; '"$1"' next } { print $1; print 0; '"$2"' }' ids40 | numbers_of; }
padded '' '' >pad.bin;                                              refuses "32 bits with some -1" 1 "tokens were of 32 bits" $small --data pad.bin
padded 'print 65535; print 65535;' 'print 0; print 0;' >pad.bin;    refuses "64 bits with some -1" 1 "tokens were of 64 bits" $small --data pad.bin
refuses "64 bits with some -1, taken for 32" 1 "tokens were of 64 bits" $small --data pad.bin --token-bits 32
refuses "where -1 is no token" 1 "holds a number that is not a token: it is negative" $small --data pad.bin --token-bits 64
awk 'BEGIN { for (i = 0; i < 900; i++) { print 0; print i % 200 == 9 ? 49024 : i % 3 ? 16256 : 16448 } }' | numbers_of >pad.bin
refuses "f32 with some -1" 1 "holds floating-point numbers of 32 bits" $small --data pad.bin
cp text pad.bin; refuses "a text named .bin" 1 "looks like a text, or as if its tokens were of 8 bits" $small --data pad.bin
rm pad.bin small32.bin
# Files of other programs, as texts and as tokens.
foreign() { { printf "$2"; cat text; } >"$1"; refuses "$3" 1 "$1 is $4" $small --data "$1"; }
foreign x.gz  '\037\213\010'              "gzip"    "compressed by gzip: decompress it first"
foreign x.bin '\037\213\010'              "gzip as tokens" "compressed by gzip"
foreign x.zip 'PK\003\004'                "zip"     "a zip file"
foreign x.zst '\050\265\057\375'          "zstd"    "compressed by zstd"
foreign x.xz  '\3757zXZ\000'              "xz"      "compressed by xz"
foreign x.bz2 'BZh9'                      "bzip2"   "compressed by bzip2"
foreign x.arrow 'ARROW1\000\000'          "Arrow"   "an Arrow file"
foreign x.parquet 'PAR1'                  "Parquet" "a Parquet file"
foreign x.h5  '\211HDF\015\012\032\012'   "HDF5"    "an HDF5 file"
foreign x.txt '\377\376'                  "UTF-16"  "UTF-16: convert it to UTF-8"
foreign x.txt '\376\377'                  "UTF-16 of the other order" "UTF-16"
foreign x.txt '\377\376\000\000'          "UTF-32"  "UTF-32"
tr '\n0' 'XO' <text | sed 's/./&0/g' | tr 0 '\000' >wide.txt; refuses "UTF-16 without a mark" 1 "wide.txt has zeros in every second byte" $small --data wide.txt
{ printf '\357\273\277'; cat text; } >mark.txt; gpt 0 $small --data mark.txt --steps 1; check "a mark of UTF-8 is part of the text" grep -q "vocabulary 29$" out
mkdir 'd [v2]' && cp raw.bin 'd [v2]/part_1.bin' && gpt 0 $small --data 'd [v2]/part_*.bin' --steps 1
check "a pattern in a folder with brackets" grep -q "3015 tokens to train on" out
rm -r x.* a.npy array.* bytes.npy CAPITALS.BIN float.bin double.bin big.bin wide.txt mark.txt 'd [v2]'
awk 'BEGIN { print 70000; for (i = 0; i < 900; i++) print i * 37 % 1000 }' | wide_of >large.bin
gpt 0 $small --data large.bin --token-bits 32 --width 2 --steps 2; check "and beyond 65535" grep -q "vocabulary 70001$" out
head -n 1000 ids | numbers_of >part_1.bin; head -n 1001 ids | tail -n 1 | numbers_of >part_2.bin
tail -n +1002 ids | wide_of >part_3; { llm_header $(($(wc -c <part_3) / 4)) 20240801 7; cat part_3; } >part_3.bin; rm part_3
gpt 0 $small --data 'part_*.bin' --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "many files train as one does" cmp -s a b
check "their number is shown" grep -q "^data     part_\*.bin: 3 files, 3015 tokens to train on, 335 to validate$" out
head -c 700 text >piece1; tail -c +701 text >piece2
gpt 0 $small --data 'piece?' --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "many texts, too" cmp -s a b
refuses "a pattern of nothing" 1 "no file matches nosuch\*. Check --data" $small --data 'nosuch*'
cp raw.bin piece3.bin
refuses "tokens among texts" 2 "piece3.bin: all of --data must be texts" $small --data 'piece*'; rm piece3.bin
mkdir parts; mv part_* parts; cp parts/part_1.bin parts/odd_4.bin; printf x >>parts/odd_4.bin
refuses "one that is cut among them" 1 "parts/odd_4.bin has an odd number of bytes" $small --data 'parts/*.bin'
rm -r parts piece?; head -n 3015 ids | numbers_of >train.bin; tail -n 335 ids | numbers_of >val.bin
{ llm_header 335; cat val.bin; } >val_llm.bin
gpt 0 $small --data train.bin --val-data val.bin --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "--val-data validates as the last tenth does" cmp -s a b
gpt 0 $small --data train.bin --val-data val_llm.bin --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "tokens of both kinds go together" cmp -s a b
check "the file to validate on is named" grep -q "335 to validate of val_llm.bin$" out
head -c 3015 text >train; tail -c 335 text >val
gpt 0 $small --data train --val-data val --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | sed '/^data/d' >b
check "texts too" cmp -s a b
gpt 0 $small --data raw.bin --steps 5 --quiet --sample 12 --prompt "1 0 1"
check "a sample of tokens is numbers" sh -c 'sed -n 2p out | grep -Eq "^1 0 1( [0-9]+){12}$"'
gpt 0 $small --data raw.bin --steps 5 --quiet --sample 12
check "without a prompt too" sh -c 'sed -n 2p out | grep -Eq "^[0-9]+( [0-9]+){11}$"'
if [ -r "$root/tests/reference/tokenizer.json" ]; then
    cp "$root/tests/reference/tokenizer.json" words.json
    awk 'BEGIN { srand(1); for (i = 0; i < 3000; i++) print (i * 7 + i % 5 * 3) % 420 }' | numbers_of >words.bin
    gpt 0 $small --data words.bin --vocab 420 --tokenizer words.json --steps 3 --quiet --sample 40 --prompt "the gradient" --out words
    check "with a tokenizer a sample is text" sh -c 'sed -n 2p out | grep -q "^the gradient" && ! sed 1d out | grep -Eq "([0-9]+ ){4}"'
    cp out a; gpt 0 --out words --resume --steps 0 --quiet --sample 40 --prompt "the gradient"
    check "which a run keeps" sh -c 'tail -n +2 a >b; tail -n +2 out | cmp -s - b'
    gpt 0 $small --data raw.bin --tokenizer words.json --steps 3 --quiet --sample 8 --prompt "the fox"
    check "which may have tokens that its data lack" sh -c 'test '$got' -eq 0 && grep -q "^the fox" out'
    gpt 0 $small --data raw.bin --tokenizer words.json --steps 1; check "all of them get rows" grep -q "vocabulary 420$" out
    gpt 0 $small --data raw.bin --steps 3 --quiet --out narrow
    gpt 0 --out narrow --resume --steps 0 --tokenizer words.json --quiet --sample 4 --prompt '"$%'
    check "a model of fewer tokens writes text, too" grep -q '^"\$%' out
    refuses "but knows no prompt beyond them" 1 "prompt holds \"t\", token 84 of words.json, and the model has 26 tokens" --out narrow --resume --steps 0 --tokenizer words.json --sample 4 --prompt "the"
    refuses "a tokenizer of a model of bytes" 2 "tokenizer is for tokens" $small --vocabulary "bytes 0a20" --tokenizer words.json --eval-only
    refuses "data of another tokenizer" 1 "holds token 999, and the 420 tokens of --tokenizer end before it" $small --data wide999.bin --token-bits 32 --tokenizer words.json
    gpt 0 $small --data text --tokenizer words.json --steps 60 --lr 1e-2 --log-every 20 --eval-every 30 --out cut; strip out | grep '^ *[0-9]' >a
    check "a text is cut by it" grep -Eq "^data     text: [0-9]+ tokens to train on" out
    "$build/test_tokenizer" --encode words.json "$(cat text; echo .)" >encoded 2>err; tr ' ' '\n' <encoded | sed '$d' | numbers_of >cut.bin
    gpt 0 $small --data cut.bin --tokenizer words.json --steps 60 --lr 1e-2 --log-every 20 --eval-every 30; strip out | grep '^ *[0-9]' >b
    if [ -s encoded ]; then check "into the tokens of a file that was cut before" cmp a b; else skip "the tokens of a file that was cut before" "no test_tokenizer"; fi
    gpt 0 --out cut --resume --steps 70 --quiet; check "and so it goes on" test $got -eq 0
    rm -r cut narrow
    refuses "one that is not there" 1 "cannot read nosuch.json: .* Check --tokenizer" $small --data raw.bin --tokenizer nosuch.json
    head -c 9000 words.json >half.json; refuses "half of one" 1 "half.json" $small --data words.bin --tokenizer half.json
    echo '{"layers": "3"}' >none.json; refuses "another file" 1 "none.json is not a tokenizer.json: it has no model" $small --data words.bin --tokenizer none.json
    rm -r words words.* half.json none.json
else skip "a tokenizer" "no tests/reference/tokenizer.json"; fi
gpt 0 $small --steps 60 --lr 1e-2 --vocab 64 --log-every 60 --eval-every 60 --sample 300 --temperature 100
check "a padded vocabulary is shown" grep -q "vocabulary 26 padded to 64$" out
last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
check "it learns ($last)" awk "BEGIN { exit !(${last:-9} < 0.8 * $first) }"
check "and no sample is padding" sh -c 'sed "1,/^--- sample/d" out | tr -d "\n" | tr -d "$(tr -d "\n" <text)" | wc -c | grep -q "^ *0$"'
gpt 0 $small --data raw.bin --vocab 64 --steps 60 --lr 1e-2 --log-every 60 --eval-every 60 --sample 300 --temperature 100 --quiet
check "nor one of tokens" sh -c 'sed -n 2p out | tr " " "\n" | awk "\$1 > 25 { exit 1 }"'
numbers 0 40000 65535 >few.bin; for i in 1 2 3 4 5 6; do cat few.bin few.bin >few2; mv few2 few.bin; done
gpt 0 $small --data few.bin --width 2 --steps 20 --lr 1e-2 --top-k 3 --sample 20 --log-every 20
check "tokens up to 65535 train" sh -c 'test '$got' -eq 0 && grep -q "vocabulary 65536$" out'

# --- GPT-2 ---
params() { head -c 20000 "$1/checkpoint.safetensors" | tr ',' '\n' | LC_ALL=C sed -n 's/.*"\(transformer\.[a-z0-9_.]*\)":{.*/\1/p' | sort; }
gpt 0 $small --steps 40 --lr 1e-2 --dropout 0.1 --decay-steps 60 --log-every 60 --eval-every 20 --bias on --out bias
gpt 0 --out bias --resume --steps 60
last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
check "--bias on learns, and is resumed ($last)" awk "BEGIN { exit !(${last:-9} < 0.8 * $first) }"
gpt 0 $small --steps 60 --lr 1e-2 --dropout 0.1 --decay-steps 60 --log-every 60 --eval-every 20 --bias on --out bias2
check "as if it had not stopped, bit for bit" cmp -s bias/checkpoint.safetensors bias2/checkpoint.safetensors
gpt 0 $small --steps 1 --out nobias
params bias >a; params nobias >b
check "a bias for each linear layer and norm" test "$(grep -c 'bias$' a)" -eq 13 -a "$(grep -c 'bias$' b)" -eq 0
check "and nothing else" sh -c 'grep -v "bias$" a | cmp -s - b'
gpt 0 --preset gpt2 --data raw.bin --layers 1 --width 24 --block 16 --batch 2 --accumulate 2 --warmup 2 --steps 20 --log-every 10 --eval-every 20 --eval-batches 1 --out gpt2
check "--preset gpt2 trains, cut down" grep -q "1 layers, 12 heads, width 24, block 16, vocabulary 26 padded to 50304$" out
check "its weights are GPT-2's" sh -c 'grep -q "\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":\[50304,24\]" gpt2/checkpoint.safetensors && grep -q "transformer.h.0.attn.c_attn.bias" gpt2/checkpoint.safetensors'

# --- the modern preset ---
gpt 0 $small --preset modern --steps 60 --lr 1e-2 --log-every 60 --eval-every 60
modern=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
gpt 0 $small --steps 60 --lr 1e-2 --log-every 60 --eval-every 60; last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
check "--preset modern learns faster ($modern, $last)" awk "BEGIN { exit !(${modern:-9} < 0.8 * ${last:-0}) }"
run="$small --preset modern --lr 1e-2 --dropout 0.1 --accumulate 2 --decay-steps 40 --log-every 10 --eval-every 20"
gpt 0 $run --steps 40 --out modern; check "it tells what it is" grep -q "^form     relu2, rms norm, rope, qk norm, own head, Muon$" out
check "in 79 columns" awk '!/^to sample:/ && length > 79 { exit 1 }' out
gpt 0 $run --steps 20 --out modern2 && gpt 0 --out modern2 --resume --steps 40
check "it is resumed, bit for bit" cmp -s modern/checkpoint.safetensors modern2/checkpoint.safetensors
gpt 0 --init modern/best.safetensors --data text --steps 0 --sample 20 --quiet; check "its weights alone write" test $got -eq 0
check "without a table of positions" sh -c '! head -c 20000 modern/checkpoint.safetensors | grep -q wpe && head -c 20000 modern/checkpoint.safetensors | grep -q "\"lm_head.weight\""'
gpt 0 --preset gpt2,modern --data raw.bin --layers 1 --heads 2 --width 16 --block 8 --batch 2 --accumulate 1 --steps 2 --eval-batches 1
check "--preset gpt2,modern is both" sh -c 'grep -q "padded to 50304$" out && grep -q "^form .*Muon$" out'
for d in fp32 bf16; do for l in 1 2 3; do
    gpt 0 $small --preset modern --steps 60 --lr 1e-2 --dtype $d --level $l --log-every 60 --eval-every 60
    last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
    check "modern $d at level $l learns ($last)" awk "BEGIN { exit !(${last:-9} < 0.5 * $first) }"
done; done
for one in "--activation relu2" "--activation gelu-tanh" "--norm rms" "--norm rms --bias on" "--positions rope" "--qk-norm on" "--head own" "--zero-init on" "--optimizer muon" "--optimizer muon --muon-lr 1e-2"; do
    gpt 0 $small --steps 60 --lr 1e-2 $one --log-every 60 --eval-every 60
    last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
    check "$one alone learns ($last)" awk "BEGIN { exit !(${last:-9} < 0.8 * $first) }"
done

# --- logits in chunks ---
estimate() { sed -n 's/^size .* about \([0-9.]*\) MiB.*/\1/p' out; }
run="--data raw.bin --vocab 20000 --layers 1 --heads 2 --width 16 --block 32 --batch 16 --eval-batches 1 --threads 1 --steps 3 --log-every 3 --lr 1e-2 --dtype fp32"
gpt 0 $run --loss whole; whole=$(estimate); cp out a
gpt 0 $run --loss chunks; chunks=$(estimate)
near() { awk -v a="$(sed -n 's/^best val \([0-9.]*\).*/\1/p' a)" -v b="$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)" 'BEGIN { d = a - b; exit !(a > 0 && d < 0.001 && d > -0.001) }'; }
check "logits in chunks learn the same" near
check "of less memory ($chunks, $whole MiB)" awk "BEGIN { exit !(${chunks:-9999} < 0.7 * ${whole:-0}) }"
gpt 0 $run; check "which many are given" test "$(estimate)" = "$chunks"
gpt 0 $run --vocab 200; few=$(estimate); gpt 0 $run --vocab 200 --loss whole
check "and few are not" test "$(estimate)" = "$few"

gpt 0 $run --profile; estimate=$(estimate)
taken=$(awk '/^(parameters|gradients|optimizer state|low copies|activations)/ { n += $NF } END { print n }' out)
check "the estimate is what a step takes ($estimate, $taken MiB)" awk "BEGIN { d = ${estimate:-0} / ${taken:-1}; exit !(d > 0.97 && d < 1.03) }"
gpt 0 $run --profile --level 3 --dtype bf16; estimate=$(estimate)
taken=$(awk '/^(parameters|gradients|optimizer state|low copies|activations)/ { n += $NF } END { print n }' out)
check "so where weights are low ($estimate, $taken MiB)" awk "BEGIN { d = ${estimate:-0} / ${taken:-1}; exit !(d > 0.97 && d < 1.03) }"

gpt 0 $run --loss chunks --accumulate 3; check "and of more batches a step" test -n "$(estimate)" -a "$(estimate)" = "$chunks"

# --- tries ---
# f16 gradients are rounded by the loss scale, so b begins with the scale at which step 1 of a was applied (each skip
# halves it without a guard; the log rounds it): both then have the same weights, scale and batches, whatever the seed, and skip alike.
run="$small --seed 2 --dropout 0.1 --accumulate 2 --steps 20 --lr 1e-2 --log-every 1 --eval-every 20 --guard off"
gpt 0 $run --init-scale 16777216 --retry 30; losses() { awk '$1 ~ /^[0-9]+$/ && $1 > 0 { print $1, $2, $4 }' out; }
losses >a; scale=$(awk '$1 == 1 { print 16777216 / 2 ^ $7 }' OFMT=%d out)
check "a skipped step is tried again" sh -c 'awk "\$1 == 1 { exit !(\$7 > 2 && \$8 == \"@1\") }" out'
gpt 0 $run --init-scale "$scale" --retry 30; losses >b
check "which step 1 of the other run needs no try for" sh -c 'awk "\$1 == 1 { exit \$7 != 0 }" out'
check "with its own batch and dropout, and loses nothing" cmp -s a b
gpt 0 $run --init-scale 16777216; losses >b
check "as it does without" sh -c '! cmp -s a b'

# --- GPT-2's files, of which test_gpt2 knows the numbers ---
gpt 0 $small --bias on --steps 20 --lr 1e-2 --export hf
check "--export says where" grep -q "^export   hf/model.safetensors, for transformers to load$" out
check "with a config.json beside it" grep -q '"model_type": "gpt2"' hf/config.json
refuses "what is there already" 1 "hf/model.safetensors is there already: name another --export" $small --steps 0 --export hf
gpt 0 $small --steps 0 --export hf --overwrite; check "but with --overwrite" test $got -eq 0
gpt 0 --init hf --steps 0 --sample 20 --quiet; check "a folder of GPT-2's writes" test $got -eq 0
gpt 0 --init hf --data text --steps 3 --lr 1e-3 --batch 4 --eval-batches 2 --threads 1; check "and trains on" grep -q "^begun    with the weights of hf/model.safetensors$" out
gpt 0 $small --steps 1 --out gpt2_run
refuses "an export over a run" 1 "is the configuration of a run, which --export would replace" $small --steps 0 --export gpt2_run
refuses "an export where no folder can be" 1 "cannot make the folder one/hf: .* Choose another --export" $small --steps 3 --export one/hf

# --- GGUF, of which interop_gguf.py knows the numbers ---
if [ -r "$root/tests/reference/tokenizer.json" ]; then
    cp "$root/tests/reference/tokenizer.json" words.json
    of_words="$small --tokenizer words.json --activation gelu-tanh"
    losses_of() { gpt 0 "$@" --tokenizer words.json --data text --eval-only --eval-batches 2 --batch 4 --threads 1 --quiet && cat out; }
    for bias in on off; do
        rm -rf gg gg.gguf; gpt 0 $of_words --bias $bias --steps 10 --lr 1e-2 --export gg
        gpt 0 $of_words --bias $bias --steps 10 --lr 1e-2 --export gg.gguf --export-type f32
        check "--export says that llama.cpp loads it" grep -q "^export   gg.gguf, for llama.cpp to load$" out
        losses_of --init gg >a; losses_of --init gg.gguf >b
        check "--init of GGUF has the losses of the folder, bias $bias" sh -c 'test -s a && cmp -s a b'
    done
    refuses "GGUF without a tokenizer" 2 "FILE.gguf needs --tokenizer" $small --activation gelu-tanh --steps 0 --export x.gguf
    refuses "GGUF of another GELU" 2 "gelu-tanh only" $small --tokenizer words.json --steps 0 --export x.gguf
    refuses "GGUF without a row for each token" 1 "Raise --vocab to 420" $of_words --vocab 419 --steps 0 --export x.gguf
    refuses "what is there already" 1 "gg.gguf is there already" $of_words --steps 0 --export gg.gguf
    printf 'GGUF\003\000\000\000' >cut.gguf
    refuses "a GGUF file that is cut" 1 "cut.gguf: the file ends too early" --init cut.gguf --steps 0
    rm -f gg8.gguf; gpt 0 $of_words --width 32 --bias on --steps 0 --export gg8.gguf --export-type q8_0
    check "Q8_0 is read" gpt 0 --init gg8.gguf --tokenizer words.json --steps 0 --data text
else skip "GGUF" "no tests/reference/tokenizer.json"; fi

printf '{"model_type": "gpt2"}' >hf/config.json
refuses "a config.json of nothing" 1 "has no n_layer" --init hf --steps 0

# --- devices ---
gpt 0 $small --steps 2 --device cpu --out on_cpu; cpu=$(sed -n 's/.*"device":"\(cpu[a-z0-9 ]*\)".*/\1/p' on_cpu/metrics.jsonl)
check "the metrics begin with the device" sh -c 'head -n 1 on_cpu/metrics.jsonl | grep -q "^{\"metrics\":\"mixprec\",\"version\":1,\"device\":\"cpu.*\"}$"'
check "the start line names it ($cpu)" grep -q "^run .*, ${cpu:-none}, 1 thread," out
gpt 0 --out on_cpu --resume --steps 4
check "once" test "$(grep -c '"device":' on_cpu/metrics.jsonl)" -eq 1
sed 's/"cpu[^"]*"/"cuda:7"/' on_cpu/metrics.jsonl >a && mv a on_cpu/metrics.jsonl; gpt 0 --out on_cpu --resume --steps 6
check "and again on another" sh -c 'grep "\"device\":" on_cpu/metrics.jsonl | tr -d "\n" | grep -q "cuda:7.*cpu" && grep -c "\"scale\"" on_cpu/metrics.jsonl | grep -q 4'
# Another instruction set by name: a CPU as well, with its memory, its profile and its warnings.
gpt 0 --isa list; sets=$(tr -d ',' <out | sed 's/ (default)//')
check "--isa list has one default" test "$(grep -c '(default)' out)" -eq 1
refuses "an instruction set that is none" 2 "\"avx9\" is not an instruction set of this machine, which has $(cat out)" $small --isa avx9
bits=
for isa in $sets; do
    gpt 0 $small --steps 3 --dtype bf16 --isa "$isa" --out "isa_$isa" --profile
    check "--isa $isa is a CPU" sh -c "grep -q '^run .*, cpu.*, 1 thread,' out && grep -q ' of the machine.s ' out && grep -q '^GEMM' out"
    case $isa in scalar | avx512_bf16 | amx*) ;; *) bits="$bits $isa" ;; esac
done
for isa in $bits; do
    check "--isa $isa trains the bits of ${bits##* }" cmp -s "isa_$isa/checkpoint.safetensors" "isa_${bits##* }/checkpoint.safetensors"
done
# A trainer built for GPUs, of which there are two that compute as the CPU does, or none.
cat >gpu.c <<'END'
#include <stdlib.h>
#include "mixprec.h"
static mixp_result nothing_to_wait_for(const mixp_exec *x) { (void)x; return MIXP_OK; }
const mixp_device *mixp_cuda(int ordinal, const char **why) {
    static mixp_device gpu;
    gpu = *mixp_cpu();
    gpu.name = "cuda";
    gpu.wait = nothing_to_wait_for;
    *why = getenv("NO_GPU") ? "no GPU is visible" : ordinal > 1 ? "there is no such GPU" : "";
    return **why ? NULL : &gpu;
}
END
if [ ! -r "$build/libmixprec.a" ] || [ ! -r "$root/examples/trainer/trainer.c" ]; then skip "a trainer for GPUs" "no $build/libmixprec.a"
elif ! ${CC:-cc} -DTRAINER_CUDA -DMIXPREC_IMPLEMENTATION_DONE -I"$root" "$root/examples/trainer/trainer.c" gpu.c \
        "$build/libmixprec.a" ${OPENMP--fopenmp} -lm -o gpu >out 2>err; then bad "a trainer for GPUs" "does not compile"
else
    alone=$program program=$PWD/gpu
    gpt 0 $small --steps 20 --lr 1e-2 --device cpu --out gpu_cpu; cp out a
    check "a trainer for GPUs trains on the CPU" grep -q "^run .*, ${cpu:-none}, 1 thread," out
    gpt 0 $small --steps 20 --lr 1e-2 --out gpu_auto
    check "auto takes the GPU" grep -q "^run .*, cuda:0, step by step," out
    check "which the metrics name" sh -c 'head -n 1 gpu_auto/metrics.jsonl | grep -q "\"device\":\"cuda:0\""'
    # A CPU's file says which bits its products have: the states lie behind the header.
    states() { tail -c "+$(($(od -An -t u4 -N 4 "$1") + 9))" "$1"; }
    states gpu_cpu/checkpoint.safetensors >a; states gpu_auto/checkpoint.safetensors >b
    check "and trains the same weights" cmp -s a b
    gpt 0 $small --steps 2 --device cuda --isa scalar; check "--isa on a GPU does nothing" grep -q -- "--isa scalar does nothing here" err
    gpt 0 $small --steps 2 --device=cuda; check "--device cuda is the first" grep -q "^run .*, cuda:0, " out
    gpt 0 $small --steps 2 --device cuda:1; check "--device cuda:1 is the second" grep -q "^run .*, cuda:1, " out
    gpt 0 $small --steps 20 --lr 1e-2 --out gpu_profile --profile
    check "--profile of a GPU trains the same weights" cmp -s gpu_auto/checkpoint.safetensors gpu_profile/checkpoint.safetensors
    check "and says that it waits" grep -q "^The profile waits for each kernel: without --profile a step on cuda is faster" out
    gpt 0 $small --steps 5 --device cpu --profile; check "a CPU waits for nothing" sh -c '! grep -q "waits for each kernel" out && grep -q "^GEMM" out'
    refuses "a GPU that is not there" 1 "cuda:2: there is no such GPU; --device cpu" $small --device cuda:2
    refuses "a GPU without graphs"    2 "this is cuda:1: leave out --graph"         $small --device cuda:1 --graph
    NO_GPU=1; export NO_GPU
    refuses "no GPU"                  1 "cuda: no GPU is visible; --device cpu"      $small --device cuda
    refuses "graphs without a GPU"    2 "--graph needs a GPU"                  $small --graph
    gpt 0 $small --steps 2
    check "auto without a GPU says why, and takes the CPU" sh -c "grep -q '^device   no GPU is used: no GPU is visible$' out && grep -q '^run .*, $cpu, 1 thread' out"
    unset NO_GPU; program=$alone
fi

# --- profile ---
run="$small --steps 60 --lr 1e-2 --dropout 0.1 --accumulate 2 --log-every 20 --eval-every 30"
gpt 0 $run --out plain_run; strip out | sed '/^best/,$d' >a
gpt 0 $run --out profiled --profile; strip out | sed '/^best/,$d' >b; sed '1,/^best/d' out >table
check "--profile prints the same losses" cmp -s a b
check "and trains the same weights" cmp -s plain_run/checkpoint.safetensors profiled/checkpoint.safetensors
check "and the same configuration" cmp -s plain_run/config.json profiled/config.json
# about A B WITHIN. Each of 30 lines is rounded to 0.001 ms, and to 0.1 %.
about='function about(a, b, within) { return a - b <= within && b - a <= within }'
check "the groups and the rest are the whole step" awk "$about"'
    /^memory/ { exit } /^a whole step/ { all = $4 } /^the rest/ { sum += $5; if ($5 < 0) bad = 1 }
    /^(GEMM|attention|elementwise|optimizer|guard[+]log) / { sum += $2 } END { exit !(all > 0 && !bad && about(sum, all, 0.016)) }' table
check "the lines of a group are the group" awk "$about"'
    function done() { if (lines && !about(sum, group, 0.016)) bad = 1; groups += lines > 0; lines = sum = 0 }
    /^memory/ { exit } /^[a-z]/ { done(); group = $2 } /^  / { lines++; sum += $(NF - 2) }
    END { exit bad || groups != 3 }' table
check "the shares are those of the times" awk "$about"'
    /^memory/ { exit } /^(GEMM|attention|elementwise|optimizer) / { ms[$1] = $2; share[$1] = $3 } /^a whole step/ { all = $4 }
    END { for (g in ms) { n++; if (!about(share[g] * all, 100 * ms[g], 0.06 * all + 0.2)) bad = 1 } exit n != 4 || bad }' table
calls() { awk -v name="$1" 'index($0, name) == 1 { print $NF }' table; }
check "calls are those of a step" test "$(calls '  update')" = 1.0 -a "$(calls '  embedding  ')" = 4.0 -a "$(calls '  dropout')" = 20.0
bytes() { awk -v name="$1" 'index($0, name) == 1 { printf "%.0f", $NF * 1048576 }' table; }
check "memory is shown" awk '/^memory/ { on = 1 } on && / [0-9.]+$/ { n += $NF > 0 } END { exit !(n >= 5) }' table
gpt 0 $small --width 64 --steps 3 --dtype fp32 --profile --quiet; cp out table; p=$(bytes parameters)
check "gradients as parameters, twice that in AdamW" sh -c "test ${p:-0} -gt 300000 && test $(bytes gradients) -eq $p && test $(bytes 'optimizer state') -ge $((2 * p)) && test $(bytes 'optimizer state') -le $((2 * p + 200000))"
check "fp32 needs no copies" test -z "$(bytes 'low copies')"
full=$(bytes activations); gpt 0 $small --width 64 --steps 3 --level 2 --profile --quiet; cp out table
check "fp16 halves the activations" test $(($(bytes activations) * 100)) -le $((full * 55))
gpt 0 $small --steps 1 --profile; check "one step is too few" grep -q "^--profile needs two steps" out
gpt 0 $small --steps 5 --profile --quiet --sample 5; check "the table follows the sample" sh -c 'sed -n "3,4p" out | grep -q "^where a step goes"'

# --- recipes below 16 bits ---
fit="--data text --layers 1 --heads 2 --width 32 --block 8 --batch 4 --eval-batches 2 --eval-every 4 --threads 1 --dtype bf16"
gpt 0 $fit --steps 8 --decay-steps 8 --out plain_bf16
for recipe in fp8 fp8-delayed mxfp8 nvfp4; do
    gpt 0 $fit --recipe $recipe --steps 8 --decay-steps 8 --out $recipe && cp out a
    check "--recipe $recipe is named" grep -q "bf16 at level 1, linear layers in $(echo $recipe | tr - _)" a
    check "--recipe $recipe trains other weights" sh -c "! cmp -s plain_bf16/checkpoint.safetensors $recipe/checkpoint.safetensors"
    gpt 0 $fit --recipe $recipe --steps 4 --decay-steps 8 --out $recipe.2 && gpt 0 --out $recipe.2 --resume --steps 8
    check "--recipe $recipe resumes bit for bit" cmp -s $recipe/checkpoint.safetensors $recipe.2/checkpoint.safetensors
done
rules='*h.0.attn*=none,*mlp*=nvfp4,*=fp8-delayed'
gpt 0 $fit --recipe-of "$rules" --steps 8 --decay-steps 8 --out rules && cp out a
check "--recipe-of is named" sh -c 'tr -s " \n" " " <a | grep -q "linear layers in bf16 but for .h.0.attn"'
check "--recipe-of trains other weights than its recipes" sh -c 'for r in plain_bf16 nvfp4 fp8-delayed; do
    ! cmp -s rules/checkpoint.safetensors $r/checkpoint.safetensors || exit 1; done'
gpt 0 $fit --recipe-of '*=nvfp4' --steps 8 --decay-steps 8 --out rules.all
check "--recipe-of all weights has the weights of --recipe" cmp -s nvfp4/checkpoint.safetensors rules.all/checkpoint.safetensors
gpt 0 $fit --recipe-of "$rules" --steps 4 --decay-steps 8 --out rules.2 && gpt 0 --out rules.2 --resume --steps 8
check "--recipe-of resumes bit for bit" cmp -s rules/checkpoint.safetensors rules.2/checkpoint.safetensors
gpt 0 $fit --recipe mxfp8 --e8m0 floor --steps 8 --decay-steps 8 --out mxfp8.floor
check "--e8m0 floor trains other weights" sh -c "! cmp -s mxfp8/checkpoint.safetensors mxfp8.floor/checkpoint.safetensors"
gpt 0 $fit --recipe mxfp8 --guard on --steps 1; check "the guard says what falls back to bf16" \
    sh -c 'tr -s " \n" " " <out | grep -q "guard on: a site that overflows falls back to f32; an operand that loses too much, to bf16"'
gpt 0 $fit --recipe mxfp8 --guard on --steps 2 --out blocks && tr -s " \n" " " <out >a
check "the report has the range of scales" grep -q "scales of x from 2^-*[0-9]* to 2^-*[0-9]*; blocks that clip 0%" a
check "the report has the largest score of attention" grep -q "scores of attention up to [0-9.e-]*, at transformer.h.0" a
for recipe in fp8 nvfp4; do
    gpt 0 $fit --recipe $recipe --codes --steps 8 --decay-steps 8 --out $recipe.codes
    check "--codes is named" sh -c 'tr -s " \n" " " <out | grep -q "linear layers in '$recipe'[a-z_]*, their inputs kept as codes"'
    check "--codes keeps the bits of $recipe" cmp -s $recipe/checkpoint.safetensors $recipe.codes/checkpoint.safetensors
    wide="--data text --layers 4 --heads 2 --width 64 --block 32 --batch 4 --eval-batches 1 --threads 1 --dtype bf16 --recipe $recipe"
    gpt 0 $wide --steps 3 --profile --quiet; cp out table; full=$(bytes activations)
    gpt 0 $wide --steps 3 --profile --quiet --codes; cp out table; kept=$(bytes activations)
    check "--codes takes memory off activations of $recipe" test "${kept:-0}" -gt 0 -a "${kept:-0}" -lt "$full"   # evaluation's are left
done
for part in stochastic hadamard 2d all; do
    gpt 0 $fit --recipe nvfp4 --recipe-without $part --steps 8 --decay-steps 8 --out nvfp4.$part
    check "nvfp4 without $part trains other weights" sh -c "! cmp -s nvfp4/checkpoint.safetensors nvfp4.$part/checkpoint.safetensors"
done
gpt 0 $fit --recipe nvfp4 --recipe-without all --over6 both --steps 8 --decay-steps 8 --out nvfp4.over6
gpt 0 $fit --recipe nvfp4 --recipe-without all --row-scaled --over6 w --steps 8 --decay-steps 8 --out nvfp4.rows
check "--row-scaled trains other weights" sh -c "! cmp -s nvfp4.all/checkpoint.safetensors nvfp4.rows/checkpoint.safetensors"
check "--over6 trains other weights" sh -c "! cmp -s nvfp4.all/checkpoint.safetensors nvfp4.over6/checkpoint.safetensors"

# --- folders and resuming ---
run="$small --lr 1e-2 --dropout 0.1 --accumulate 2 --decay-steps 40 --log-every 5 --eval-every 10"
metrics() { sed '/,"run":/d; s/,"ms".*//' "$1/metrics.jsonl"; }
gpt 0 $run --steps 40 --out straight
check "a run leaves its files" test -s straight/checkpoint.safetensors -a -s straight/best.safetensors -a -s straight/metrics.jsonl -a -s straight/config.json
check "and no temporary ones" test "$(ls -A straight | grep -vc '^\.lock$')" -eq 5
check "metrics are one object a line" test "$(grep -c '^{"step":[0-9]*,.*"scale":.*}$' straight/metrics.jsonl)" -eq 9 -a "$(grep -vc '^{.*}$' straight/metrics.jsonl)" -eq 0
refuses "a checkpoint is not overwritten" 1 "--overwrite" $run --steps 40 --out straight
gpt 0 $run --steps 10 --out halves && gpt 0 --out halves --resume --steps 20 && gpt 0 --out halves --resume --steps 40 --threads 1
check "resumed twice equals straight, bit for bit" cmp -s straight/checkpoint.safetensors halves/checkpoint.safetensors
metrics straight >a; metrics halves >b
check "its metrics agree" cmp -s a b
echo '{"step":41,"loss":9}' >>halves/metrics.jsonl; printf '{"step":4' >>halves/metrics.jsonl
gpt 0 --out halves --resume --steps 50
check "lines of lost steps are dropped from the metrics" test "$(grep -c '"step":41' halves/metrics.jsonl)" -eq 0
check "the log goes on after them" sh -c 'tail -n 1 halves/metrics.jsonl | grep -q "^{\"step\":50,.*}$"'
before=$(cksum straight/*); gpt 0 --out straight --resume --steps 0 --sample 10 --quiet
check "--steps 0 samples and writes nothing" test "$before" = "$(cksum straight/*)"
gpt 0 --out straight --resume --steps 0; check "--steps 0 leaves nothing to train" grep -q "^resumed  at step 40; nothing is left to train: --steps is 0$" out
gpt 0 $run --steps 10 --out no/such/run/; check "missing folders are made" test -s no/such/run/config.json
mkdir lost; cp straight/*.* lost; rm lost/metrics.jsonl; ln -s metrics.jsonl lost/metrics.jsonl
refuses "a log that cannot be read"  1 "cannot read lost/metrics.jsonl" --out lost --resume --steps 50
check "is not replaced" test -h lost/metrics.jsonl
mkdir -p nobest/best.safetensors/x
refuses "a best checkpoint that could not be saved" 1 "cannot write nobest/best.safetensors: Is a directory" $run --steps 10 --out nobest
refuses "resume with another width"  2 "--width is 16 in straight/config.json.*Leave out --width 32" --out straight --resume --steps 50 --width 32
refuses "resume with other heads"    2 "--heads is 2 in straight/config.json" --out straight --resume --steps 50 --heads=4
refuses "resume with biases"         2 "--bias is off in straight/config.json" --out straight --resume --steps 50 --bias on
refuses "resume with another level"  2 "level is 1 in straight/config.json: a run keeps the dtype of its weights" --out straight --resume --steps 50 --level 3
gpt 0 --out straight --resume --steps 0 --quiet --width 016; check "the same width may be given" test $got -eq 0
{ cat text; printf T; } >text2
refuses "resume with another text"   1 "is not the text" --out straight --resume --steps 50 --data text2
gpt 0 $small --data train.bin --val-data val.bin --vocab 32 --steps 5 --out tokens && gpt 0 --out tokens --resume --steps 9
check "a run on tokens is resumed" grep -q "^resumed  at step 5 of 9" out
refuses "resume with other tokens"   1 "name that one with --data and --val-data" --out tokens --resume --steps 11 --data raw.bin
mkdir torn; cp straight/checkpoint.safetensors torn; head -c 200 straight/config.json >torn/config.json
refuses "a config.json that was cut" 1 "torn/config.json is not whole" --out torn --resume --steps 50 --data text
sed 's/"seed": "1.*/"seed": "1/' straight/config.json >torn/config.json
refuses "a line of it that was cut"  1 "torn/config.json is not whole: its JSON is malformed in line" --out torn --resume --steps 50 --data text
: >torn/config.json
refuses "an empty config.json"       1 "torn/config.json is not whole" --out torn --resume --steps 50 --data text
head -c 1000 straight/checkpoint.safetensors >cut; mkdir damaged; mv cut damaged/checkpoint.safetensors; cp straight/config.json damaged
refuses "resume from a cut checkpoint" 1 "while resuming: .* Start over with --overwrite" --out damaged --resume --steps 50
cp straight/best.safetensors damaged
refuses "with the best one beside it" 1 "copy damaged/best.safetensors to damaged/checkpoint.safetensors, or start over with --overwrite" --out damaged --resume --steps 50
cp damaged/best.safetensors damaged/checkpoint.safetensors
gpt 0 --out damaged --resume --steps 50; check "which then goes on" grep -q "^resumed  at step [1-4]0 of 50$" out
gpt 0 $run --steps 3 --out straight --overwrite
check "--overwrite begins anew" grep -q '"step":3,' straight/metrics.jsonl

# --- what a log says of time and tokens, and what is made of it ---
run="$small --lr 1e-2 --dropout 0.1 --accumulate 2 --decay-steps 40 --log-every 5 --eval-every 10"
gpt 0 $run --steps 20 --eval-train on --csv on --out told && gpt 0 --out told --resume --steps 40
rows() { sed -n 's/^{"step":\([0-9]*\),.*"tokens":\([0-9]*\),"ms":[^,]*,"mem":[^,]*,"seconds":\([0-9.e+-]*\),"time":\([0-9]*\)}$/\1 \2 \3 \4/p' told/metrics.jsonl; }
now=$(date +%s)
check "a row has tokens, seconds and the time" sh -c "test $(rows | wc -l) -eq 9"
check "of which a step takes 2 batches of 4 x 8" sh -c "test -z '$(rows | awk '$2 != $1 * 64')'"
check "seconds go on where they were" test -z "$(rows | awk '$3 + 0 < last { print } { last = $3 + 0 }')"
check "and the time is now" test -z "$(rows | awk -v now="$now" '$4 < now - 600 || $4 > now')"
check "training data are validated on, too" sh -c 'grep -c "\"val\":[0-9.]*,\"train\":[0-9.]*," told/metrics.jsonl | grep -qx 5 && grep -Eq "^train    loss [0-9]+\.[0-9]{4} on as many batches of the training data" out'
csv() { awk -F, -v step="$1" -v column="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == column) n = i } $1 == step { print $n }' told/metrics.csv; }
check "--csv writes each row" test "$(wc -l <told/metrics.csv)" -eq 10
check "with its numbers" test "$(csv 30 loss)" = "$(sed -n 's/^{"step":30,"loss":\([0-9.]*\),.*/\1/p' told/metrics.jsonl)" -a "$(csv 30 tokens)" = 1920 -a -z "$(csv 5 val)"
# PaLM's 6N + 12LHQT: of N = 6640 weights (a table of 26 x 16, 2 blocks of 3104, a norm), 2 layers, 16 wide, 8 tokens.
mfu() { gpt 0 $run --steps 20 --peak-tflops 1e-3 --csv on --out told --overwrite "$@"
    sed -n 's/^{"step":\([0-9]*\),.*"tokens":\([0-9]*\),"ms":\([0-9.]*\),"mfu":\([0-9.e+-]*\),.*/\1 \2 \3 \4/p' told/metrics.jsonl |
        awk '{ want = $2 / $1 / ($3 * 1e-3) * (6 * 6640 + 12 * 2 * 16 * 8) / (1e9 * ranks); n += want > 0.999 * $4 && want < 1.001 * $4 } END { exit n != 4 }' ranks="$ranks"; }
ranks=1; check "the share of a peak is PaLM's" mfu
check "in the log, too" grep -Eq '^mfu      [0-9.]+ % of 0.001 Tflop/s$' out
check "and the table" test -n "$(csv 20 mfu)" -a -z "$(csv 0 mfu)"
check "tables that are looked up count nothing" mfu --preset modern --lr 1e-3
ranks=2; check "and of ranks it is that of each" mfu --ranks fork:2
gpt 0 $small --bias on --steps 12 --plant 8 --guard 1 --accumulate 3 --ranks fork:2
check "under ranks an event has the loop's step, and one rank prints it" sh -c "grep -c '^guard    step ' out | grep -qx 1 && grep -q '^guard    step 8: ' out"
# A narrow terminal, and the words about clipping.
COLUMNS=60; export COLUMNS; gpt 0 $small --steps 60 --clip 1e-3 --out narrow; unset COLUMNS
check "at 60 columns no line of a table wraps" sh -c "grep -v '^to sample' out | awk 'length > 60 { exit 1 }' && grep -q '^  step    loss     val   norm     scale skips @step$' out"
check "nor of the summary" sh -c "grep -A 20 '^---' out | awk 'length > 60 { exit 1 }' && grep -q '^loss     .* -> ' out"
check "clipping that is unusual is told" grep -q "^         more than usual: lower the learning rate" out
gpt 0 --out narrow --resume --steps 70 --clip 1; check "and is not, with a limit of 1" sh -c "! grep -A 1 'gradients clipped in 0%' out | grep -q unusual"
COLUMNS=60; export COLUMNS; gpt 0 $small --steps 2 --compare fp32; unset COLUMNS
check "nor of a comparison" awk 'length > 60 { exit 1 }' out
# What a checkpoint holds.
gpt 0 $small --steps 2 --level 3 --dtype bf16 --out stored
refuses "other moments"         2 "moments is f32 in stored/config.json: a run keeps the states of its optimizer. Leave out --moments bf16" --out stored --resume --steps 4 --moments bf16
refuses "other masters"         2 "masters is f32 in stored/config.json" --out stored --resume --steps 4 --masters 8bit
refuses "no masters"            2 "no-master is 0 in stored/config.json" --out stored --resume --steps 4 --no-master
refuses "another optimizer"     2 "optimizer is adamw in stored/config.json" --out stored --resume --steps 4 --optimizer muon
refuses "another level"         2 "level is 3 in stored/config.json: a run keeps the dtype of its weights, bf16. Leave out --level 1" --out stored --resume --steps 4 --level 1
refuses "weights of another dtype" 2 "dtype is bf16 in stored/config.json: a run keeps the dtype of its weights, bf16" --out stored --resume --steps 4 --dtype fp16
gpt 0 $small --steps 2 --level 1 --out stored --overwrite; gpt 0 --out stored --resume --steps 4 --level 2 --dtype bf16
check "levels that store weights alike may change" test $got -eq 0
rm -r narrow stored
refuses "a peak of nothing" 2 "out of range" --peak-tflops 0
refuses "an --eval-train that is none" 2 "off|on" --eval-train yes
# metrics.py, with a package that stands in for wandb.
metrics_py() { "${PYTHON:-python3}" "$root/examples/metrics.py" "$@" >out 2>err; got=$?; }
if [ ! -r "$root/examples/metrics.py" ] || ! "${PYTHON:-python3}" -c 'import argparse' 2>/dev/null; then skip "metrics.py" "no Python"
else
    metrics_py --help; check "metrics.py --help" sh -c "test $got -eq 0 && grep -q -- --follow out"
    metrics_py nosuch; check "without a log" sh -c "test $got -eq 1 && grep -q '^metrics.py: there is no nosuch/metrics.jsonl: name the folder' err"
    mkdir none && echo 'raise ImportError' >none/wandb.py && cp none/wandb.py none/tensorboard.py
    PYTHONPATH=none metrics_py told; check "without TensorBoard" sh -c "test $got -eq 1 && grep -q '^metrics.py: the package tensorboard is missing: python3 -m pip install tensorboard' err"
    PYTHONPATH=none metrics_py told --wandb x; check "without W&B" grep -q '^metrics.py: the package wandb is missing' err
    mkdir stand_in && cat >stand_in/wandb.py <<'END'
class Run:
    def log(self, row, step):
        print(step, row["loss"], flush=True)
    def finish(self):
        print("finished", flush=True)
def init(project, name):
    print(project, name, flush=True)
    return Run()
END
    mkdir follow; printf '{"metrics":"mixprec","version":1}\n{"step":1,"loss":3,"scale":1}\n{"step":1,"cost":"a","ms":1}\nbroken\n{"step":2,"loss":2.5,"sc' >follow/metrics.jsonl
    PYTHONPATH=stand_in metrics_py follow --wandb mine; check "a log that a power cut has damaged" sh -c "tr '\n' ' ' <out | grep -q '^mine follow 1 3 finished $'"
    PYTHONPATH=stand_in "${PYTHON:-python3}" "$root/examples/metrics.py" follow --wandb mine --follow >followed 2>err & pid=$!
    await grep -q '^1 3' followed; printf 'ale":1}\n{"step":3,"loss":2,"scale":1}\n' >>follow/metrics.jsonl
    await grep -q '^3 2' followed
    printf '{"metrics":"mixprec","version":1}\n{"step":2,"loss":2.5,"scale":1}\n{"step":3,"loss":2,"scale":1}\n{"step":4,"loss":1.5,"scale":1}\n' >follow/new
    mv follow/new follow/metrics.jsonl; await grep -q '^4 1.5' followed
    "${PYTHON:-python3}" -c "import os, signal; os.kill($pid, signal.SIGINT)"; n=0; while kill -0 $pid 2>/dev/null && [ $n -lt 50 ]; do sleep 0.1; n=$((n + 1)); done; kill $pid 2>/dev/null; wait $pid 2>/dev/null
    check "--follow reads what comes, also in a new file, and nothing twice" sh -c "head -n 5 followed | tr '\n' ' ' | grep -q '^mine follow 1 3 2 2.5 3 2 4 1.5 $' && ! grep -q Traceback err"
    rm -r none stand_in follow followed
fi
if [ ! -r "$root/examples/metrics.py" ] || ! "${PYTHON:-python3}" -c 'import tensorboard' 2>/dev/null; then skip "a log for TensorBoard" "no tensorboard"
else
    check "a log for TensorBoard" "${PYTHON:-python3}" "$root/examples/metrics.py" told
    cat >read.py <<'END'
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
log = EventAccumulator("told/tensorboard"); log.Reload()
for e in log.Scalars("loss"): print(e.step, "%.6g" % e.value)
END
    "${PYTHON:-python3}" read.py >a 2>/dev/null
    sed -n 's/^{"step":\([0-9]*\),"loss":\([0-9.]*\),.*/\1 \2/p' told/metrics.jsonl | awk '{ printf "%d %.6g\n", $1, $2 }' >b
    check "which reads it again" sh -c 'test -s a && cmp a b'
fi
gpt 0 $run --steps 40 --keep 2 --out kept
check "--keep keeps the newest" test "$(cd kept && echo step-*)" = "step-000000030.safetensors step-000000040.safetensors"
cp kept/checkpoint.safetensors last; rm kept/checkpoint.safetensors
check "each as it was" cmp -s last kept/step-000000040.safetensors
gpt 0 --out kept --resume --from 30 --steps 40; check "a run goes on from one" grep -q "^resumed  at step 30 of 40$" out
check "to the same end" cmp -s last kept/checkpoint.safetensors
refuses "one that is not kept" 1 "no checkpoint in kept of --from 20" --out kept --resume --from 20 --steps 50
refuses "a step that is none"  2 "is not one of last|best or the number of a step" --out kept --resume --from first --steps 50
gpt 0 $run --dropout 0 --steps 20; strip out | grep "^ *[0-9][0-9]* *[0-9-]" >a
gpt 0 $run --dropout 0 --steps 20 --sample-every 5 --sample 20 --prompt The; strip out | grep '^ *[0-9][0-9]* *[0-9-]' >b
check "samples while it trains" test "$(grep -c '^--- sample at step [15]' out)" -eq 3 -a "$(grep -c '^The' out)" -ge 4 -a "$(grep -c '^--- sample$' out)" -eq 1
check "change no number" cmp -s a b
gpt 0 $run --steps 6 --ranks fork:2 --sample-every 2 --prompt The; check "of ranks, once each" test "$(grep -c '^The' out)" -eq 2
tells "the likeliest share without a sample" "--top-p 0.5 does nothing here" --top-p 0.5
gpt 0 --out kept --resume --steps 0 --sample 60 --temperature 5 --top-p 1e-6 --quiet; cp out a
gpt 0 --out kept --resume --steps 0 --sample 60 --temperature 0 --quiet; check "the least --top-p leaves the likeliest" cmp -s a out

# --- without the text ---
mkdir away; gpt 0 $run --steps 40 --out whole; mv text away/text
gpt 0 --out whole --resume --steps 0 --sample 40 --prompt "The" --quiet; cp out a
check "a run samples without its text" grep -q "^The" a
gpt 0 --out whole --resume --steps 0 --sample 40 --prompt "The" --quiet --data away/text
check "what it samples with it" cmp -s a out
gpt 0 --init whole/checkpoint.safetensors --steps 0 --sample 40 --prompt "The" --quiet; sed 1d a >b
check "so do its weights alone" cmp -s out b
refuses "but it trains on none" 1 "cannot read text" --out whole --resume --steps 50
refuses "nor on a byte it has not met" 1 "holds the byte 0x0d, which the model does not know" --init whole/best.safetensors --data odd2 --steps 3
refuses "weights of another width" 2 "--width is 16 in whole/config.json" --init whole/best.safetensors --data away/text --width 32
head -c 2000 away/text | sed 's/fox/dog/' >other
gpt 0 --init whole/best.safetensors --data other --block 8 --eval-batches 4 --batch 4 --steps 20 --lr 1e-3 --out tuned --threads 1
check "weights are trained on on another text" grep -q "^begun    with the weights of whole/best.safetensors$" out
first=$(awk '$1 == "0" { print $3 }' out); last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
check "from where they were ($first to $last)" awk "BEGIN { exit !(${first:-9} < 2.5 && ${last:-9} < $first) }"
check "in the vocabulary they know" sh -c 'grep vocabulary whole/config.json >a; grep vocabulary tuned/config.json | cmp -s a -'
check "and the end says how to sample" grep -q "^to sample: .* --out tuned --resume --steps 0 --sample 500$" out
mv away/text text; before=$(cksum whole/*)
gpt 0 --out whole --resume --from best --eval-only; best=$(awk '$1 == "val" { print $2 " " $NF }' out)
gpt 0 --out whole --resume --steps 0; check "--from best --eval-only finds the best ($best)" grep -q "^best val ${best% *} at step ${best#* }," out
check "and writes nothing" test "$before" = "$(cksum whole/*)"
gpt 0 --init whole/best.safetensors --data text --block 8 --batch 4 --eval-batches 2 --threads 1 --eval-only
check "its weights alone have that loss" grep -q "^val ${best% *} at step 0$" out

# --- the report ---
page=straight/report.html
check "a report that needs nothing else" sh -c "grep -q '</html>' $page && ! grep -Eq '<script|<link|src=|url\\(http|href' $page"
check "with what was run" sh -c "grep -q '<code>[^<]*--out straight[^<]*</code>' $page && for w in 'begun, UTC' weights tokens 'tokens a second'; do grep -q \"<dt>\$w</dt>\" $page || exit 1; done"
check "with its panels" sh -c "for w in Loss 'Loss scale' 'Gradient norm' 'Gradients by magnitude' 'Underflow by layer' 'Sites that fell back' 'Where a step went'; do grep -q \"<h2>\$w\" $page || exit 1; done"
gpt 0 $run --steps 40 --out reported; check "its summary ends the run" sh -c 'grep -q "^--- reported/report.html$" out && grep -q "^loss  *[#*+=:._-]" out && grep -q "^scale .* of 40 steps skipped$" out && grep -q "^time  *GEMM" out && grep -q "^memory  *parameters" out'
check "in 79 columns" awk '!/^to sample:/ && length > 79 { exit 1 }' out
rm reported/report.html; gpt 0 --out reported --report; check "--report writes it again" test -s reported/report.html
{ head -n 9 reported/metrics.jsonl; sed -n 10p reported/metrics.jsonl | cut -c 1-40 | tr -d '\n'; } >a
cp a reported/metrics.jsonl
gpt 0 --out reported --report
check "of a log that was cut, as far as it goes" sh -c 'grep -q "warning: .*metrics.jsonl ends within line [0-9]*: all before it is shown" err && grep -q "class=.cut.>Not whole" reported/report.html && grep -q "</html>" reported/report.html'
gpt 0 --out reported --resume --steps 50; check "which a resumed run mends" sh -c 'test ! -s err && ! grep -q "Not whole" reported/report.html'
cp reported/report.html before.html; sed 's/"version":1/"version":2/' straight/metrics.jsonl >reported/metrics.jsonl
refuses "a log of another version" 1 "is of version 2, and this program reads 1: use the program that wrote it" --out reported --report
check "leaves the page as it is" cmp -s before.html reported/report.html
{ head -n 3 straight/metrics.jsonl; echo '{"step":x}'; tail -n 2 straight/metrics.jsonl; } >reported/metrics.jsonl
refuses "a log with a bad line" 1 "line 4 is malformed: remove that line, or continue the run" --out reported --report
echo hello >reported/metrics.jsonl; refuses "no log at all" 1 "pass the metrics.jsonl of a run" --out reported --report
refuses "a folder without a log" 1 "cannot read nosuch/metrics.jsonl" --out nosuch --report
gpt 0 --out straight --report --ranks fork:2; check "--report is one rank's work" test $got -eq 0
refuses "a report without a folder" 2 "--report needs the folder" --report
if command -v "${CXX:-c++}" >/dev/null && [ -r "$root/examples/report.h" ]; then
    { echo '#include "mixprec.h"'; echo '#include "examples/report.h"'; } >report.cpp
    check "report.h is C++11, too" "${CXX:-c++}" -std=c++11 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -I"$root" -fsyntax-only report.cpp
else skip "report.h is C++11, too" "no C++ compiler"; fi

# --- the guard: an overflow of fp16 is planted, and one site falls back ---
run="$small --steps 60 --lr 1e-2 --bias on --weight-decay 0 --log-every 20 --eval-every 60"
gpt 0 $run --plant 30 --dtype fp32; full=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
for l in 1 2; do
    gpt 0 $run --plant 30 --level $l --init-scale 256 --out guarded$l; last=$(sed -n 's/^best val \([0-9.]*\).*/\1/p' out)
    check "guarded fp16 at level $l ends as fp32 does ($last, $full)" awk "BEGIN { d = ${last:-9} - ${full:-0}; exit !(d < 0.05 && d > -0.05) }"
    check "and does not say that nothing did" sh -c '! grep -q "^guard    no event" out'
    check "and says what fell back" grep -q '^guard    step 31: transformer.h.1.mlp.c_proj.weight: linear: overflow, f32 now$' out
    check "its summary, too" grep -q "^sites    transformer.h.1.mlp.c_proj.weight: linear: f32 from step 31$" out
    check "with the number it stores" grep -q "^in f32   transformer.h.1.mlp.c_proj.weight: linear, largest 6624[67]" out
    check "in the report" sh -c "grep -q 'transformer.h.1.mlp.c_proj.weight: linear' guarded$l/report.html && grep -q 'overflow at step 31; still f32' guarded$l/report.html"
    check "the loss scale is not lowered for it" test "$(awk '$1 == "40" { print $6 }' out)" = 256
done
# A validation follows the skipped step, and finds the site before a sampled step does.
gpt 0 $run --plant 30 --eval-every 30 --init-scale 256 --out headline
check "a page's headline names where a skip began" grep -q 'class="note">Step 30 was skipped, the only one: the loss was not finite: transformer.h.1.mlp.c_proj.weight: linear made' headline/report.html
gpt 0 $run --plant 37 --init-scale 256 --out headline --overwrite
check "so does the log, of a step before a sampled one" sh -c 'grep -c "\"step\":37,\"skip\":\"the loss was not finite: transformer.h.1.mlp.c_proj.weight: linear" headline/metrics.jsonl | grep -q "^1$"'
gpt 0 $run --plant 30 --guard off --init-scale 256; check "without the guard the scale falls" awk '$1 == "60" { last = $6 } END { exit !(last < 1e-6) }' out
gpt 0 $run --log-every 5 --guard off; strip out >a; gpt 0 $run --log-every 5 --guard 1; strip out | grep -v '^guard ' >b
check "a guard that finds nothing changes no number" cmp -s a b

gpt 0 $run --steps 20 --guard off --out unguarded && gpt 0 --out unguarded --resume --steps 40 --guard on
check "a run without a guard goes on with one" grep -q "^resumed  at step 20 of 40$" out
gpt 0 --out unguarded --resume --steps 60 --guard off; check "and without again" grep -q "^resumed  at step 40 of 60$" out

# --- dtypes compared ---
gpt 0 --out guarded1 --resume --compare fp32
check "--compare ranks the sites" awk '/^site / { on = 1; next } on && /^transformer/ { n++; if (n > 1 && $(NF - 2) + 0 > last) bad = 1; last = $(NF - 2) + 0; if ($(NF - 3) > 0.1) bad = 1 } END { exit n < 10 || bad }' out
check "in 79 columns" awk 'length > 79 { exit 1 }' out
gpt 0 --out guarded1 --resume --compare fp16; check "a dtype with itself differs in nothing" awk '/^transformer/ { n++; if ($(NF - 3) + 0 != 0) bad = 1 } END { exit n < 10 || bad }' out
gpt 0 $small --compare fp32 --steps 100; check "and trains nothing" sh -c '! grep -q "^best" out && grep -q "^site" out'

# --- two runs in one folder ---
"$program" $small --steps 100000000 --log-every 1 --eval-every 1000000 --out shared >out2 2>err2 </dev/null & first=$!
await grep -q '^ *3 ' out2
refuses "a second run in the folder" 1 "another trainer is training in shared: wait until it is done, or choose another --out" $small --steps 5 --out shared --overwrite
refuses "and a second resumed one" 1 "another trainer is training in shared" --out shared --resume --steps 50
gpt 0 --out shared --resume --steps 0 --sample 5 --quiet; check "sampling from it is fine" test $got -eq 0
kill -KILL $first; wait $first 2>/dev/null
touch shared/.best.safetensors.99999.0.tmp shared/.checkpoint.safetensors.99999.3.tmp shared/.mine.safetensors.99999.0.tmp
gpt 0 --out shared --resume --steps 5; check "a killed run leaves no lock" grep -q "^resumed  at step 0 of 5" out
check "the rest of killed saves is removed, and nothing else" test "$(ls -A shared | grep tmp)" = .mine.safetensors.99999.0.tmp

# --- being stopped ---
killer() {      # sends SIGNAL when TEXT, or the log line of step 50, is out, and SIGKILL when that did not help
    await grep -q "${2:-^ *50 }" out
    pid=$(cat pid); kill -"$1" "$pid"
    await gone "$pid"
    kill -KILL "$pid" 2>/dev/null
}
heeding=; env --default-signal=INT true 2>/dev/null && heeding='env --default-signal=INT'
# The state must be that of a run that was never stopped.
stopped() {     # SIGNAL STATUS
    rm -rf stop same; set -- "$1" "$2" $small --dropout 0.1 --decay-steps 1000 --log-every 50 --eval-every 1000000
    sig=$1 status=$2; shift 2
    # In the foreground: a shell's background jobs ignore SIGINT. So do all that such a job starts,
    # unless env can help.
    : >out; rm -f pid; killer "$sig" &
    $heeding sh -c 'echo $$ >pid; exec "$0" "$@"' "$program" "$@" --steps 100000000 --out stop >out 2>err </dev/null
    got=$?; wait
    check "SIG$sig exits with $status" test $got -eq "$status"
    check "SIG$sig says that no best model is there yet" grep -q "best.safetensors is still the untrained model of step 0" err
    check "SIG$sig says how to go on" grep -q -- "Go on with: .*trainer --out stop --resume" err
    at=$(sed -n 's/.*after step \([0-9]*\).*/\1/p' err); at=${at:-0}
    gpt 0 --out stop --resume --steps $((at + 5))
    check "SIG$sig saved step $at" grep -q "^resumed  at step $at of" out
    gpt 0 "$@" --steps $((at + 5)) --out same
    check "stopped by SIG$sig and resumed equals straight, bit for bit" cmp -s stop/checkpoint.safetensors same/checkpoint.safetensors
}
stopped INT 130
stopped TERM 143
# Whatever reads our output or stops us, a look at the best checkpoint does not replace the newest.
gpt 0 $small --steps 6 --eval-every 2 --lr 1 --out looked; before=$(cksum looked/*)
if [ -w /dev/full ]; then
    "$program" --out looked --resume --from best --compare fp32 >/dev/full 2>err; got=$?
    check "a look at the best one, cut short, changes nothing" sh -c "test $got -eq 1 && grep -q 'nothing is changed' err"
    check "no checkpoint" test "$before" = "$(cksum looked/*)"
    "$program" --out looked --resume --from best --compare fp32 --ranks fork:2 --shard states >/dev/full 2>err; got=$?
    check "nor does that of ranks that share states" sh -c "test $got -eq 1 && grep -q 'nothing is changed' err"
else skip "a look that is cut short" "no /dev/full"; fi
rm -f pid; : >out; killer INT jumps &
$heeding sh -c 'echo $$ >pid; exec "$0" "$@"' "$program" --init looked/best.safetensors --steps 0 --sample 1000000000 --prompt jumps --quiet >out 2>err </dev/null
got=$?; wait; check "Ctrl-C ends a sample with 130" test $got -eq 130
( "$program" $small --steps 100000000 --log-every 10 --eval-every 1000000 --out pipe 2>err; echo $? >status ) | head -n 5 >out
check "a closed pipe ends the run with 141" test "$(cat status)" -eq 141
check "which is saved" test -s pipe/checkpoint.safetensors
if [ -w /dev/full ]; then
    "$program" $small --steps 50 --log-every 1 >/dev/full 2>err; got=$?
    check "a full disk under stdout is a failure" sh -c "test $got -eq 1 && grep -q 'No space' err"
else skip "a full disk under stdout" "no /dev/full"; fi

# --- ranks ---
refuses "ranks of no kind"     2 "not one of fork:N"        $small --ranks threads:4
refuses "too many ranks"       2 "not one of fork:N"        $small --ranks fork:1000
refuses "MPI is not built in"  2 "built without"         $small --ranks mpi
best() { sed -n 's/^\(best val [0-9.]*\).*/\1/p' out; }
gpt 0 $small --steps 6 --accumulate 2; one=$(best); one=${one:-it learned nothing}
check "2 ranks learn what 2 batches a step do" sh -c "'$program' $small --steps 6 --ranks fork:2 >out 2>err && grep -q '$one' out"
check "ranks write one folder" gpt 0 $small --steps 4 --ranks fork:2 --out ranks
check "and go on in it"        gpt 0 --out ranks --resume --steps 8 --ranks fork:2
check "ranks that share states learn the same" sh -c "'$program' $small --steps 6 --ranks fork:2 --shard states >out 2>err && grep -q '$one' out"
check "and those that share sums" sh -c "'$program' $small --steps 6 --ranks fork:2 --shard sums >out 2>err && grep -q '$one' out"
check "they save one file"     gpt 0 $small --steps 4 --ranks fork:2 --shard sums --out shards
check "with which one goes on" gpt 0 --out shards --resume --steps 6
check "the header tells of them" sh -c "'$program' $small --steps 0 --ranks fork:3 --accumulate 2 | tr -s '\n ' ' ' | grep -q ', 3 ranks, 24 x 8 tokens a step'"
# Ranks divide a validation of 5 batches, and its loss has the bits of one rank.
vals() { for r in 1 2 3 4; do gpt 0 $small --eval-batches 5 --steps 1 --ranks fork:$r --out vals --overwrite && sed -n 's/^{"step":0,\("val":[0-9.]*\),.*/\1/p' vals/metrics.jsonl; done; }
check "they validate together, to the bit" test "$(vals | sort | uniq -c | awk '{ print $1 }')" = 4
gpt 0 $small --steps 6 --total-batch 8; check "--total-batch of one rank" grep -q "$one" out
gpt 0 $small --steps 6 --total-batch 8 --ranks fork:2 --profile --out total; check "and of two, is as much" grep -q "$one" out
check "whose waiting has a row" sh -c 'grep -Eq "^waiting for ranks  +[0-9.]+ +[0-9.]+%$" out && grep -q "\"cost\":\"waiting for ranks\"" total/metrics.jsonl'
check "and whose number is kept" grep -q '"ranks": "2"' total/config.json
gpt 0 --out total --resume --steps 7; check "one goes on with the same batch" sh -c 'grep -q "^ranks    1 in place of 2: a step has 8 sequences, as before$" out && test ! -s err'
gpt 0 $small --steps 2 --ranks fork:4 --out four; gpt 0 --out four --resume --steps 3
check "a smaller batch is told of" grep -q "warning: 1 rank in place of 4: a step has 4 sequences, and had 16: --total-batch 16 keeps that" err
gpt 0 --out four --resume --steps 4; check "once" test ! -s err
refuses "a total batch that ranks cannot divide" 2 "total-batch 10 is not 1 to 65536 times the 8 sequences of --batch 4 on 2 ranks" $small --total-batch 10 --ranks fork:2
refuses "a total batch and another" 2 "total-batch 8 takes --accumulate 2 here, not 3" $small --total-batch 8 --accumulate 3
# --ordered: ranks that take turns train the same bits. Scale 3e7 overflows at first: skips agree, too.
parted="$small --batch 2 --eval-batches 4 --steps 12 --eval-every 4 --total-batch 8"
alike() { for r in 1 2 4; do gpt 0 $parted "$@" --ranks fork:$r --out alike$r --overwrite || return 1; done
    cmp alike1/checkpoint.safetensors alike2/checkpoint.safetensors && cmp alike1/checkpoint.safetensors alike4/checkpoint.safetensors; }
losses() { sed -n 's/^\({"step":[0-9]*,"loss":[0-9.]*,"val":[0-9.]*\).*/\1/p' alike$1/metrics.jsonl; }
check "1, 2 and 4 ranks in order write the same bits" alike --ordered --dropout 0.1
gpt 0 $parted --ordered --dropout 0.1 --out alike; check "as one without ranks does" cmp alike1/checkpoint.safetensors alike/checkpoint.safetensors
check "and log the same losses" test "$(losses 1 | wc -l)" -eq 3 -a "$(losses 1)" = "$(losses 4)"
check "with skips, low weights and Muon" alike --ordered --init-scale 3e7 --level 3 --optimizer muon
check "of which there were some" grep -q '"step":12,.*"skipped":[1-9],' alike4/metrics.jsonl
check "with parts of the states" alike --ordered --shard states --moments 8bit
check "with NVFP4, which rounds at random" alike --ordered --dtype bf16 --recipe nvfp4 --width 32 --block 16
alike >/dev/null; check "without --ordered they do not" sh -c '! cmp -s alike1/checkpoint.safetensors alike4/checkpoint.safetensors'
gpt 0 $parted --steps 4 --decay-steps 12 --ordered --dropout 0.1 --ranks fork:4 --out turns
gpt 0 --out turns --resume --steps 12 --ranks fork:2; check "also where their number changes" cmp alike/checkpoint.safetensors turns/checkpoint.safetensors
rm -rf alike* turns
refuses "an order of no batch"        2 "add --total-batch"          $small --ordered
refuses "an order and a guard"        2 "exclude each other"         $parted --ordered --guard on
refuses "an order and scattered sums" 2 "Use --shard states"         $parted --ordered --shard sums --ranks fork:2
refuses "an order and samples"        2 "exclude each other"         $parted --ordered --sample-every 3
refuses "an order of NCCL"            2 "fork:N, tcp or mpi"         $parted --ordered --graph
refuses "a validation that ranks cannot divide" 2 "2 ranks cannot divide --eval-batches 3" $parted --ordered --eval-batches 3 --ranks fork:2
gpt 0 $small --steps 2 --shard states; check "--shard wants ranks" grep -q "there is one rank" err
: >out; rm -f pid
{ await grep -q '^ *50 ' out; pid=$(cat pid); kill -TERM "$pid"; } &
sh -c 'echo $$ >pid; exec "$0" "$@"' "$program" $small --ranks fork:2 --shard states --steps 100000000 --log-every 50 --eval-every 1000000 --out shards --overwrite >out 2>err </dev/null
got=$?; wait; check "a signal to rank 0 stops them together with 143" test $got -eq 143
at=$(sed -n 's/.*after step \([0-9]*\).*/\1/p' err); at=${at:-0}
gpt 0 --out shards --resume --steps $((at + 2)) --ranks fork:3 --shard states; check "which saves what all have" grep -q "^resumed  at step $at of" out
rm -rf shards
( "$program" $small --ranks fork:2 --shard states --steps 100000000 --log-every 2 --eval-every 1000000 --out shards 2>err; echo $? >status ) | head -n 8 >out
check "a closed pipe stops them with 141" test "$(cat status)" -eq 141
check "which is saved, too" grep -q "Go on with: .*--out shards --resume" err
rm -rf shards
# A signal to all of them, as of a terminal that is closed.
: >out; rm -f pid
{ await grep -q '^ *50 ' out; pid=$(cat pid); kill -TERM "$pid" $(ps -o pid= --ppid "$pid" 2>/dev/null); } &
sh -c 'echo $$ >pid; exec "$0" "$@"' "$program" $small --ranks fork:2 --steps 100000000 --log-every 50 --eval-every 1000000 --out ranks --overwrite >out 2>err </dev/null
got=$?; wait; check "a signal to all ranks stops them with 143" test $got -eq 143
at=$(sed -n 's/.*after step \([0-9]*\).*/\1/p' err); at=${at:-0}
gpt 0 --out ranks --resume --steps $((at + 2)) --ranks fork:2; check "and is saved" grep -q "^resumed  at step $at of" out
rm -rf ranks

# --- the terminal ---
if command -v script >/dev/null && script -qec true /dev/null >/dev/null 2>&1; then
    terminal() { TERM=xterm script -qec "$program $small --steps 200 --log-every 50 $*" /dev/null >out 2>err </dev/null; }
    terminal; check "a bar on a terminal" grep -q "$(printf '\033')\[36m#" out
    work() { tr '\r' '\n' <out | sed "s/$(printf '\033')\[K//" | grep -Eq "^$1\$"; }
    check "and the share of the text that is read" work 'looking at text +0%'
    check "and of a validation" work 'validating on validation data +50%'
    check "before it the words are hidden" sh -c "! tr '\\r' '\\n' <out | grep -q 'validating.*best'"
    OMPI_COMM_WORLD_SIZE=2; export OMPI_COMM_WORLD_SIZE; terminal; unset OMPI_COMM_WORLD_SIZE
    check "no bar under mpirun, whose terminal is none" test "$(tr -dc '\033' <out | wc -c)" -eq 0
    NO_COLOR=1; export NO_COLOR; terminal; unset NO_COLOR
    check "NO_COLOR: a bar without colour" sh -c 'grep -q "##" out && ! grep -q "$(printf "\033")\[3" out'
    # Keys that are pressed while it trains, Ctrl-C among them, are not echoed into the bar.
    # In the foreground: a shell's background jobs ignore SIGINT.
    rm -f keys; mkfifo keys
    { await grep -q '% step' out
      printf 'zzz'; sleep 0.3; printf '\003'; await grep -q 'stopped after step' out; } >keys 2>/dev/null &
    : >out; TERM=xterm timeout 300 $heeding script -qec "$program $small --steps 100000000 --log-every 50" /dev/null >out 2>err <keys; wait
    check "nor the last words behind it" grep -q "$(printf '\r\033')\[Ktrainer: stopped after step" out
    check "and the guard does not sum up"  sh -c '! grep -q "no event" out'
    check "Ctrl-C is not written into the bar" sh -c 'grep -q "stopped after step" out && ! grep -q "\^C" out && ! grep -q zzz out'
    terminal --out shown; terminal --out shown --resume --steps 201
    check "a checkpoint that is loaded is named" work 'loading shown/checkpoint.safetensors'
    terminal --init shown/checkpoint.safetensors --steps 1 --quiet; check "not where it is quiet" sh -c '! grep -q loading out'
else skip "the bar on a terminal" "no script(1)"; fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
