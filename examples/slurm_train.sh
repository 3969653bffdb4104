#!/bin/bash
# rowdit train on several machines under Slurm: one task a node, torchrun starts a process for each of its GPUs.
#
#     sbatch examples/slurm_train.sh imagenet256:XL/2 --data.source latents:/shared/imagenet256 --out /shared/runs/xl
#
# The folder after --out must be on a file system that all nodes share. When the time limit comes near, Slurm sends
# SIGTERM, the step under way is finished and the state saved; --requeue then starts the same command again, which goes
# on where it was, on as many nodes as there are by then.
#
# Not run on a real cluster by this project: the lines that matter, torchrun with a rendezvous and the same command on
# every node, are what the tests run on one machine.
#SBATCH --job-name=rowdit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$SLURM_GPUS_PER_NODE" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head_node:29500" \
    -m rowdit train "$@" \
    --parallel.replicas "$SLURM_NNODES" \
    --parallel.param-dtype bfloat16
