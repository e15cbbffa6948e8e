#!/bin/sh
# All that is measured on several GPUs of one node, within ten minutes:
#     sh benchmarks/h200_gpus.sh RANKS OUT
# Tables, results and the picture go to OUT; a step that misses a bar does not keep the next from running.
set -u
ranks=$1 out=$2
here=$(dirname "$0")
export PYTHONPATH="$here/../src${PYTHONPATH:+:$PYTHONPATH}" NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
start="python3 -m torch.distributed.run --standalone --nproc-per-node $ranks"
mkdir -p "$out"
$start "$here/h200_allreduce.py" --out "$out"
for shape in llama-3-8b llama-3-70b; do
    $start "$here/h200_tensor_parallel.py" --shape $shape --rows 1,16,64 --tables "$out/tables" --out "$out"
done
$start "$here/h200_tensor_parallel.py" --shape llama-3-8b --rows 1 --library --out "$out"
