#!/bin/sh
# Predicted interference of the eight tasks of tiny, compared with the drift measured on test examples.
#
#     sh examples/interference.sh [FOLDER] [SEED]
#
# Takes about ten minutes; needs kfacpack installed. Vectors and bundles are kept in FOLDER, by default `interference`,
# and are not computed again. SEED, by default 0, is that of the vectors; use another FOLDER for each.
set -e
folder=${1:-interference}
seed=${2:-0}
mkdir -p "$folder"
set --
for task in digits mnist materials faces hebrew syllabics emblems weaves; do
    bundle=$folder/$task.kfac vector=$folder/$task.safetensors
    [ -e "$bundle" ] || kfacpack estimate --model tiny --task "$task" --examples 256 --seed 0 -o "$bundle" --quiet
    [ -e "$vector" ] || kfacpack train --model tiny --task "$task" --head prototypes --steps 50 --batch-size 32 \
        --seed "$seed" -o "$vector" --quiet
    set -- "$@" "$vector" --bundle "$bundle"
done
kfacpack measure interference "$@" --measured --figure "$folder/interference.png" -o "$folder/interference.json"
