#!/usr/bin/env bash
# Takes the images of docs/comfyui.md: runs the example workflows in ComfyUI's own page.
#   COMFYUI_PATH=path/to/ComfyUI COMFYUI_PYTHON=its/python bash scripts/update_comfy_images.sh
# Needs chromium, chromedriver, selenium, and comfyui-frontend-package in COMFYUI_PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${COMFYUI_PATH:?names the folder of a ComfyUI}"
MMACCEL_SCREENSHOTS="$PWD/docs/images" "${PYTHON:-python}" -m pytest -q tests/comfy/test_page.py -k image_of_the_screen
