#!/bin/sh
# What is measured on several GPUs of one node, in two parts of less than 250 s each on two GPUs where all goes well:
#     sh benchmarks/h200_gpus.sh RANKS OUT sums      # tests of comm/, then the table of all-reduces
#     sh benchmarks/h200_gpus.sh RANKS OUT decode    # whole steps of 8B, `stepgraph run`, then tests of the engine
# OUT/gpus_PART.tgz holds all logs, tables, results and pictures; it is written anew after each step, and a step that
# fails or hangs does not keep the next from running.
set -u
ranks=$1 out=$(mkdir -p "$2" && cd "$2" && pwd) part=$3
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root/src:$root/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
work=$(mktemp -d)
cd "$root" || exit
torchrun="python3 -m torch.distributed.run --standalone --nproc-per-node $ranks"

step() { # NAME SECONDS COMMAND...
    name=$1 limit=$2
    shift 2
    started=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>"$work/$name.err" </dev/null
    code=$?
    echo "== $name: exit code $code, $(($(date +%s) - started)) of at most $limit s" | tee -a "$work/steps.log"
    tail -n 25 "$work/$name.log" | cut -c -600
    tail -n 30 "$work/$name.err" | cut -c -300
    tar -czf "$out/part.tmp" -C "$work" . && mv "$out/part.tmp" "$out/gpus_$part.tgz"
    return $code
}

case $part in
sums)
    step tests_comm 110 python3 -m pytest -m gpu -v -p no:cacheprovider tests/comm
    step allreduce 100 $torchrun benchmarks/h200_allreduce.py --samples 7 --out "$work" ||
        [ -e "$work/h200_allreduce_x$ranks.json" ] ||
        step allreduce_ours 80 $torchrun benchmarks/h200_allreduce.py --samples 7 --out "$work" --ours
    ;;
decode)
    step steps_8b 105 $torchrun benchmarks/h200_tensor_parallel.py --rows 1,16,64 --out "$work"
    step model 20 python3 -c "from pathlib import Path; from engine.hf import write_checkpoint; write_checkpoint(
        Path('$work/model'), num_attention_heads=8, num_key_value_heads=8, hidden_size=512, eos_token_id=None)"
    step run 30 python3 -m stepgraph run hello 'a longer prompt' --model "$work/model" --tp "$ranks" --ladder 1,2
    rm -r "$work/model"
    step tests_engine 100 python3 -m pytest -m gpu -v -p no:cacheprovider tests/engine/test_parallel_gpu.py
    step tests_cli 45 python3 -m pytest -m gpu -v -p no:cacheprovider tests/cli/test_run_tp.py
    ;;
*)
    echo "$part is neither sums nor decode" >&2
    exit 2
    ;;
esac
