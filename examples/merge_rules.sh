#!/bin/sh
# Approximation error of each merge rule on the eight tasks of tiny. Takes a minute; needs kfacpack installed.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for task in digits mnist materials faces hebrew syllabics emblems weaves; do
    kfacpack estimate --model tiny --task "$task" -o "$folder/$task.kfac" --quiet
done
for rule in tak "optimal --rank 1" "optimal --rank 2" "optimal --rank 3" stack; do
    echo "$rule"
    kfacpack merge "$folder"/*.kfac -o "$folder/merged" --rule $rule
done
